"""Adaptive steps on the server: Reddi et al. 2021, arXiv:2003.00295."""

import numpy as np
from numpy.typing import NDArray

from strategies import wire
from strategies.aggregation import linear_combination
from strategies.federated import FederatedStrategy

FIRST, SECOND = "server_m", "server_v"


class FedAdam(FederatedStrategy):
    """FedAvg's clients, and Adam on their mean delta (Algorithm 2, without bias correction)::

        D <- sum_i w_i delta_i
        m <- b1 m + (1 - b1) D
        v <- b2 v + (1 - b2) D D
        x <- x + server_lr m / (sqrt(v) + server_eps)

    with b1, b2 = server_beta1, server_beta2. Buffers are no parameters: they move by their mean delta.
    """

    kept = (FIRST, SECOND)
    default_server_lr = 0.01
    source = "Reddi et al. 2021, arXiv:2003.00295"
    settings_used = ("server_beta1", "server_beta2", "server_eps")

    def fold(self, mean: dict[str, dict[str, NDArray]], replies: int, lr: float) -> None:
        s = self.settings
        delta = self.parameters(mean[wire.DELTA])
        squared = {name: d * d for name, d in delta.items()}
        m = linear_combination([s.server_beta1, 1 - s.server_beta1], [self.state[FIRST], delta])
        v = linear_combination([s.server_beta2, 1 - s.server_beta2], [self.state[SECOND], squared])
        self.state |= {FIRST: m, SECOND: v}
        self.move(mean[wire.DELTA], {name: m[name] / (np.sqrt(v[name]) + s.server_eps) for name in m})
