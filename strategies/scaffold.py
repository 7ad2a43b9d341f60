"""Methods whose clients correct their drift with control variates, which both sides keep."""

from numpy.typing import NDArray

from strategies import wire
from strategies.aggregation import linear_combination
from strategies.federated import FederatedStrategy


class Scaffold(FederatedStrategy):
    """Stochastic controlled averaging (Algorithm 1, option II)::

        client  x   <- x - eta (g + c - c_i), or a step of AdamW and then x <- x - eta (c - c_i)
                c_i <- c_i - c + (x^r - x_K) / (K_i eta)
        server  x   <- x + server_lr sum_i w_i delta_i
                c   <- c + sum_i (change of c_i) / N

    c and all c_i are 0 at first, so c stays the mean of the c_i over all N clients, whatever the weights of replies
    and whoever was sampled; not so with a robust aggregation, which leaves part of the changes out. c_i stays on its
    client.
    """

    source = "Karimireddy et al. 2020, arXiv:1910.06378"
    broadcast = (wire.CONTROL,)
    returned = (wire.CONTROL,)
    unweighted = (wire.CONTROL,)

    def fold(self, mean: dict[str, dict[str, NDArray]], replies: int, lr: float) -> None:
        share = replies / self.settings.clients
        self.state[wire.CONTROL] = linear_combination([1, share], [self.state[wire.CONTROL], mean[wire.CONTROL]])
        self.move(mean[wire.DELTA])


class FAdamGC(Scaffold):
    """Gradient tracking inside AdamW: the correction enters both moments, not the step after them::

    client  AdamW on g + y - y_i in the place of g (`clients.fadamgc.TrackingAdamW`)
            y_i <- the mean of the K_i gradients g
    server  x and y as Scaffold's x and c
    """

    source = "Chen et al. 2025, arXiv:2502.02727"
