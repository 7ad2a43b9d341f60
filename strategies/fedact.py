"""Methods that share the global correction Delta_G and the mean second moments v_bar: FedACT and its relatives."""

from collections.abc import Sequence

from strategies import wire
from strategies.aggregation import linear_combination
from strategies.federated import FederatedStrategy
from strategies.reply import Reply


class FedAdamW(FederatedStrategy):
    """FedACT's server with the clients' trust modulation phi = 1 (here with the full v_bar).

    With weights w_i (1/S unless ``weighting = "examples"``), K_i local steps and the round's learning rate eta::

        Delta_G <- - sum_i w_i delta_i / (K_i eta)
        v_bar   <-   sum_i w_i v_i
        x       <- x + server_lr sum_i w_i delta_i

    Delta_G takes the raw client deltas, weight decay included, even where server_lr is not 1 (FedACT, Algorithm 1).
    """

    source = "FedAdamW, as compared in the FedACT paper"
    broadcast = (wire.CORRECTION, wire.SECOND_MOMENT)
    returned = (wire.SECOND_MOMENT,)

    def fold(self, replies: Sequence[Reply], weights: Sequence[float], lr: float) -> None:
        deltas = [self.parameters(reply.delta) for reply in replies]
        per_step = [-w / (reply.num_steps * lr) for w, reply in zip(weights, replies, strict=True)]
        self.state[wire.CORRECTION] = linear_combination(per_step, deltas)
        self.state[wire.SECOND_MOMENT] = linear_combination(
            weights, [reply.vectors[wire.SECOND_MOMENT] for reply in replies]
        )
        self.move(replies, weights)


class FedLADA(FedAdamW):
    """The same server; what the clients return as v_i is AMSGrad's maximum, see `clients.fedlada.AmendedAMSGrad`."""

    source = "Sun et al. 2023, FedLADA"


class FedACTLocal(FedAdamW):
    """FedACT whose clients score with their own direction, s = u_loc * g (the ablation of the paper's Table 3)."""

    source = "the FedACT paper, Table 3"


class FedACT(FedAdamW):
    """Federated Adaptive Coordinate Trust modulation; the clients run `clients.optimizers.ActAdamW`."""

    source = "the FedACT paper, Algorithm 1"
