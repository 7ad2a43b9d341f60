"""The server half of every method, and the vocabulary that both halves speak."""

from strategies.fedact import FedACT, FedACTLocal, FedAdamW, FedLADA
from strategies.fedadam import FedAdam
from strategies.fedavg import FedAvg, FedProx, LocalAdam, LocalAdamW, PFLAlign
from strategies.federated import FederatedStrategy, RunFailed, ServerSettings
from strategies.scaffold import FAdamGC, Scaffold

STRATEGIES: dict[str, type[FederatedStrategy]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedadam": FedAdam,
    "local_adam": LocalAdam,
    "local_adamw": LocalAdamW,
    "fedlada": FedLADA,
    "fadamgc": FAdamGC,
    "pflalign": PFLAlign,
    "fedadamw": FedAdamW,
    "fedact_local": FedACTLocal,
    "fedact": FedACT,
}

__all__ = [
    "STRATEGIES",
    "FAdamGC",
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
    "PFLAlign",
    "RunFailed",
    "Scaffold",
    "ServerSettings",
]
