"""Methods whose server only averages: McMahan et al. 2017, arXiv:1602.05629."""

from collections.abc import Sequence

from strategies.federated import FederatedStrategy
from strategies.reply import Reply


class FedAvg(FederatedStrategy):
    """``x <- x + server_lr mean(delta_i)``; the clients run SGD."""

    def fold(self, replies: Sequence[Reply], weights: Sequence[float], lr: float) -> None:
        self.move(replies, weights)


class LocalAdamW(FedAvg):
    """FedAvg whose clients run AdamW from a fresh state each round."""
