"""Methods that share the global correction Delta_G and the mean second moments v_bar: FedACT and its relatives."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray

from strategies import wire
from strategies.federated import FederatedStrategy
from strategies.reply import Reply
from strategies.wire import Vectors


class FedAdamW(FederatedStrategy):
    """AdamW on the clients that goes on from shared second moments, and along a shared correction.

    With weights w_i (1/S unless ``weighting = "examples"``), K_i local steps, the round's learning rate eta and the
    steps t behind v::

        client  m = 0, v = v_bar at first; each step
                m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g g
                u  = (1 - rho) m / (1 - b1^k) / (sqrt(v / (1 - b2^t)) + eps) + rho Delta_G
                x <- (1 - eta lam) x - eta u
        server  Delta_G <- - sum_i w_i delta_i / (K_i eta)
                v_bar   <-   sum_i w_i v_i
                x       <- x + server_lr sum_i w_i delta_i

    Delta_G takes the raw client deltas, weight decay included, even where server_lr is not 1 (FedACT, Algorithm 1).

    Both ways v travels in full, or, to save a third of the bytes down and half of those up, as its means over blocks:
    ``second_moment = "tensor"`` has one number per parameter tensor, ``"block"`` one per block of it (query, key and
    value of each head; other tensors are one block). Clients start from v_bar with each entry at its block's mean.

    In fewer bits (``wire_second_moment``) what returns is the share of v_i that the round's own gradients have,
    v_i - b2^K_i v_bar: rounding v_i itself would hide the little that a round changes, and add up from round to round.
    Where ``wire_correction = "derived"``, a client whose delta made x^r from the x that it was sent then finds
    Delta_G = -(x^r - x) / (server_lr K eta) itself.
    """

    source = "Liu et al. 2025, arXiv:2510.27486"
    broadcast = (wire.CORRECTION, wire.SECOND_MOMENT)
    returned: ClassVar[tuple[str, ...]] = (wire.SECOND_MOMENT,)
    settings_used: ClassVar[tuple[str, ...]] = ("second_moment", "wire_correction", "wire_second_moment")

    def like(self, record: str) -> Vectors:
        parameters = super().like(record)
        if record != wire.SECOND_MOMENT or self.settings.second_moment == "full":
            return parameters
        blocks = self.blocks if self.settings.second_moment == "block" else {}
        return {name: np.zeros(blocks.get(name, 1), x.dtype) for name, x in parameters.items()}

    def terms(self, reply: Reply) -> Mapping[str, Vectors]:
        """Where K_i differs, the mean of delta_i / K_i is none of the deltas' mean, and a sum of its own."""
        if not self.settings.local_epochs:
            return reply.vectors
        steps = np.float32(reply.num_steps)
        per_step = {name: np.asarray(delta / steps) for name, delta in self.parameters(reply.delta).items()}
        return {**reply.vectors, wire.CORRECTION: per_step}

    def restored(self, reply: Reply) -> Reply:
        """v_i = b2^K_i v_bar + what is new, where only that travels."""
        if self.settings.wire_second_moment == "float32":
            return reply
        kept = np.float32(self.settings.beta2**reply.num_steps)
        new = reply.vectors[wire.SECOND_MOMENT]
        v = {name: np.asarray(new[name] + kept * old) for name, old in self.state[wire.SECOND_MOMENT].items()}
        return replace(reply, vectors={**reply.vectors, wire.SECOND_MOMENT: v})

    def tailor(self, partition: int, records: dict[str, ArrayRecord], config: ConfigRecord) -> None:
        """Who was folded in the round before has the x that Delta_G leads from; if that is lost, it fails but once."""
        s, before = self.settings, self.folded.get(partition, 0)
        if s.derives_correction and before and before == self._round - 1:
            del records[wire.CORRECTION]
            config[wire.STEP_SIZE] = s.server_lr * s.local_steps * self.last_lr

    def fold(self, mean: dict[str, dict[str, NDArray]], replies: int, lr: float) -> None:
        per_step, steps = mean.get(wire.CORRECTION), 1
        if per_step is None:
            per_step, steps = mean[wire.DELTA], self.settings.local_steps
        self.state[wire.CORRECTION] = {
            name: np.asarray(array / array.dtype.type(-steps * lr)) for name, array in self.parameters(per_step).items()
        }
        self.state[wire.SECOND_MOMENT] = mean[wire.SECOND_MOMENT]
        self.move(mean[wire.DELTA])


class FedLADA(FedAdamW):
    """The same server; the clients return AMSGrad's maximum as v_i (`clients.fedlada.AmendedAMSGrad`)::

    client  m = 0, v = v_max = v_bar at first; each step, with g <- g + lam x
            m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g g          v_max <- max(v_max, v)
            x <- x - eta ((1 - rho) m / (sqrt(v_max) + eps) + rho Delta_G)
    """

    source = "Sun et al. 2023, arXiv:2308.00522"
    settings_used = ("wire_correction",)


class FedACTLocal(FedAdamW):
    """FedACT whose clients score with their own direction (the ablation of the paper's Table 3)::

    s = u_loc g, with u_loc the direction u without rho, and the step along u
    """

    source = "the FedACT paper, Table 3"


class FedACT(FedAdamW):
    """FedAdamW with a trust modulation of each coordinate on the clients (`clients.optimizers.ActAdamW`)::

    client  s = u g;  phi = alpha on the floor(tau d) largest s, gamma on the rest
            x <- (1 - eta lam) x - eta phi u
    """

    source = "the FedACT paper, Algorithm 1"


class FedACTAlign(FedACT):
    """FedACT whose clients go on from what was their own, as pFLAlign's do; a combination that is new here::

    client  x <- x^r + Delta_i at first; each step of FedACT's is followed by
            gamma <- 1/2 - 1/2 erf(|m_hat| / sqrt(2 max(v_hat - m_hat m_hat, 0) + align_eps)) sign(-m_hat Delta_i)
            x <- x - gamma Delta_i / K
            and Delta_i <- x - x^r, which is also the delta that it returns
    server  Delta_G <- the mean of what FedACT's own steps moved, over - K_i eta

    So Delta_G has FedACT's scale: a delta with the old Delta_i in it does not shrink with eta, and over K eta would
    grow without bound where the schedule decays. It costs a third record up.
    """

    source = "FedACT with the realignment of pflalign"
    returned = (wire.SECOND_MOMENT, wire.CORRECTION)

    def terms(self, reply: Reply) -> Mapping[str, Vectors]:
        """What the steps moved comes as the mean over them."""
        return reply.vectors
