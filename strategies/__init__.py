"""The server half of every method, and the vocabulary that both halves speak."""

from strategies.fedact import FedACT, FedACTLocal, FedAdamW
from strategies.fedavg import FedAvg, LocalAdamW
from strategies.federated import FederatedStrategy, RunFailed, ServerSettings

STRATEGIES: dict[str, type[FederatedStrategy]] = {
    "fedavg": FedAvg,
    "local_adamw": LocalAdamW,
    "fedadamw": FedAdamW,
    "fedact_local": FedACTLocal,
    "fedact": FedACT,
}

__all__ = [
    "STRATEGIES",
    "FedACT",
    "FedACTLocal",
    "FedAdamW",
    "FedAvg",
    "FederatedStrategy",
    "LocalAdamW",
    "RunFailed",
    "ServerSettings",
]
