"""The server half of every method, and the vocabulary that both halves speak."""

from strategies.fedact import FedACT, FedACTLocal, FedAdamW, FedLADA
from strategies.fedadam import FedAdam
from strategies.fedavg import FedAvg, FedProx, LocalAdam, LocalAdamW
from strategies.federated import FederatedStrategy, RunFailed, ServerSettings

STRATEGIES: dict[str, type[FederatedStrategy]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedadam": FedAdam,
    "local_adam": LocalAdam,
    "local_adamw": LocalAdamW,
    "fedlada": FedLADA,
    "fedadamw": FedAdamW,
    "fedact_local": FedACTLocal,
    "fedact": FedACT,
}

__all__ = [
    "STRATEGIES",
    "FedACT",
    "FedACTLocal",
    "FedAdam",
    "FedAdamW",
    "FedAvg",
    "FedLADA",
    "FedProx",
    "FederatedStrategy",
    "LocalAdam",
    "LocalAdamW",
    "RunFailed",
    "ServerSettings",
]
