"""The server half of every method, and the vocabulary that both halves speak."""

from strategies.fedact import FedACT, FedACTAlign, FedACTLocal, FedAdamW, FedLADA
from strategies.fedadam import FedAdam
from strategies.fedavg import Ditto, FedAvg, FedPer, FedProx, LocalAdam, LocalAdamW, LocalOnly, PFLAlign
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
    "local_only": LocalOnly,
    "fedper": FedPer,
    "ditto": Ditto,
    "pflalign": PFLAlign,
    "fedadamw": FedAdamW,
    "fedact_local": FedACTLocal,
    "fedact": FedACT,
    "fedact_align": FedACTAlign,
}

__all__ = [
    "STRATEGIES",
    "Ditto",
    "FAdamGC",
    "FedACT",
    "FedACTAlign",
    "FedACTLocal",
    "FedAdam",
    "FedAdamW",
    "FedAvg",
    "FedLADA",
    "FedPer",
    "FedProx",
    "FederatedStrategy",
    "LocalAdam",
    "LocalAdamW",
    "LocalOnly",
    "PFLAlign",
    "RunFailed",
    "Scaffold",
    "ServerSettings",
]
