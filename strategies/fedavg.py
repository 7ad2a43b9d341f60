"""Methods whose server only averages: McMahan et al. 2017, arXiv:1602.05629.

g is the gradient of a local step, lam the weight decay; w_i are the weights of the replies, 1/S by default.
"""

from numpy.typing import NDArray

from strategies import wire
from strategies.federated import FederatedStrategy


class FedAvg(FederatedStrategy):
    """Federated averaging (Algorithm 1)::

    client  x <- x - eta (g + lam x)
    server  x <- x + server_lr sum_i w_i delta_i
    """

    source = "McMahan et al. 2017, arXiv:1602.05629"

    def fold(self, mean: dict[str, dict[str, NDArray]], replies: int, lr: float) -> None:
        self.move(mean[wire.DELTA])


class FedProx(FedAvg):
    """FedAvg whose clients stay near the global model, with mu/2 |x - x^r|^2 added to their loss (Algorithm 2)::

    client  x <- x - eta (g + mu (x - x^r) + lam x)
    """

    source = "Li et al. 2020, arXiv:1812.06127"


class PFLAlign(FedAvg):
    """FedAvg whose clients go on from what was their own, with b = beta1 and Delta_i, v, P kept by each client::

    client  x <- x^r + Delta_i, m <- 0, then K steps, with g the gradient with lam x in it:
            m <- b m + (1 - b) g            v <- b v + (1 - b) g g
            P <- P (1 - (1 - b) g g / (v + eps)) + (1 - b) m m / (v + eps)
            gamma <- 1/2 - 1/2 erf(|m| / sqrt(2 max(v - m m, 0) + eps)) sign(-m Delta_i)
            x <- x - eta P g - gamma Delta_i / K
            and Delta_i <- x - x^r, which is also the delta that it returns

    `clients.pflalign` says where this comes from. Replies count by examples, as there.
    """

    source = "after Kim and Lee 2026, arXiv:2605.02143, by a third-party account"
    default_weighting = "examples"


class LocalOnly(FedAvg):
    """No federation: each client trains a model of its own, from x^0, in the rounds that it is asked in.

    Nothing of it is sent: what returns is a delta of 0, and the global model stays x^0.
    """

    source = "a baseline"


class FedPer(FedAvg):
    """FedAvg of the lower layers; the last ones (``personal_layers``) are each client's own, and stay with it.

    Both train together. What returns of a client's own layers is a delta of 0, and those of the global model stay as
    they were at first.
    """

    source = "Arivazhagan et al. 2019, arXiv:1912.00818"


class Ditto(FedAvg):
    """FedAvg, whose clients also train a model of their own that stays near the global one (Algorithm 1)::

    client  K steps of x from x^r, whose delta returns; and K steps of v_i with the gradient g + mu (v_i - x^r)

    mu is the paper's lambda. A client that takes part for the first time begins with v_i = x^r.
    """

    source = "Li et al. 2021, arXiv:2012.04221"


class LocalAdam(FedAvg):
    """FedAvg whose clients run Adam, with coupled weight decay, from a fresh state each round::

    client  g <- g + lam x
            m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g g
            x <- x - eta m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + eps)
    """

    source = "a baseline of the FedACT paper"


class LocalAdamW(FedAvg):
    """FedAvg whose clients run AdamW, Adam with decoupled weight decay, from a fresh state each round::

    client  m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g g
            x <- (1 - eta lam) x - eta m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + eps)
    """

    source = "a baseline of the FedACT paper"
