"""Methods whose server only averages: McMahan et al. 2017, arXiv:1602.05629."""

from collections.abc import Sequence

from strategies.federated import FederatedStrategy
from strategies.reply import Reply


class FedAvg(FederatedStrategy):
    """``x <- x + server_lr mean(delta_i)``; the clients run SGD."""

    source = "McMahan et al. 2017, arXiv:1602.05629"

    def fold(self, replies: Sequence[Reply], weights: Sequence[float], lr: float) -> None:
        self.move(replies, weights)


class FedProx(FedAvg):
    """FedAvg whose clients add mu/2 |x - x^r|^2 to their loss, so that they stay near the global model."""

    source = "Li et al. 2020, arXiv:1812.06127"


class LocalAdam(FedAvg):
    """FedAvg whose clients run Adam, with coupled weight decay, from a fresh state each round."""

    source = "a baseline of the FedACT paper"


class LocalAdamW(FedAvg):
    """FedAvg whose clients run AdamW from a fresh state each round."""

    source = "a baseline of the FedACT paper"
