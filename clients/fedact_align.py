"""The local optimizer of fedact_align: FedACT's, with the realignment of pflalign."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clients.optimizers import ActAdamW
from clients.pflalign import Realign, opposition


class RealignedActAdamW(ActAdamW):
    """ActAdamW whose every step is followed by x = x - gamma Delta / T.

    gamma is that of `clients.pflalign.AlignedSGD`, with m_hat and v_hat in the place of m and v. A parameter without a
    gradient in a step takes no part in either.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, **own
        As of `ActAdamW`, but for groups.
    delta : sequence of Tensor
        Delta, one tensor per parameter, in order.
    align_eps : float
        Above 0.
    realign : {"probability", "sign", "never", "half", "always"}
    steps : int
        T.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *args: Any,
        delta: Sequence[Tensor],
        align_eps: float,
        realign: Realign,
        steps: int,
        **own: Any,
    ) -> None:
        super().__init__(params, *args, **own)
        self._align_eps, self._realign, self._steps = align_eps, realign, steps
        for p, d in zip(params, delta, strict=True):
            self.state[p] |= {"delta": d, "let_go": torch.zeros_like(d)}

    def let_go(self) -> list[Tensor]:
        """How much of Delta all steps have let go of, one tensor per parameter, in order. Not copied."""
        return [self.state[p]["let_go"] for p in self._trainable]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        x = [p for p in self._trainable if p.grad is not None]
        if x:
            k = [self.state[p]["step"] for p in x]
            m, v, delta, let_go = ([self.state[p][key] for p in x] for key in ("m", "v", "delta", "let_go"))
            m_hat = [m_p / (1 - beta1**k_p) for m_p, k_p in zip(m, k, strict=True)]
            v_hat = [v_p / (1 - beta2 ** (self.steps_done + k_p)) for v_p, k_p in zip(v, k, strict=True)]
            gamma = opposition(m_hat, v_hat, delta, self._align_eps, self._realign)
            torch._foreach_addcmul_(x, gamma, delta, value=-1 / self._steps)
            torch._foreach_addcmul_(let_go, gamma, delta, value=1 / self._steps)
        return loss
