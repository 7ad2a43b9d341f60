"""FedLADA's local optimizer: Sun et al. 2023, "Efficient Federated Learning via Local Adaptive Amended Optimizer with
Linear Speedup"."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


class AmendedAMSGrad(Optimizer):
    """AMSGrad started from the shared second moments, with its direction amended by the global correction.

    With v = v_max = v_bar and m = 0 at first, a step is::

        g = g + weight_decay x                       (coupled: the decay is part of the gradient)
        m = b1 m + (1 - b1) g                        v = b2 v + (1 - b2) g g
        v_max = max(v_max, v)
        u = (1 - rho) m / (sqrt(v_max) + eps) + rho Delta_G
        x = x - lr u

    without bias correction. ``correction`` (Delta_G) and ``second_moment`` (v_bar) are tensors shaped like the
    parameters, in order; they are copied. A parameter without a gradient takes no part in the step.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        rho: float,
        correction: Sequence[Tensor],
        second_moment: Sequence[Tensor],
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rho": rho})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, delta, v in zip(parameters, correction, second_moment, strict=True):
            self.state[p] = {
                "m": torch.zeros_like(p),
                "v": v.clone(),
                "v_max": v.clone(),
                "correction": delta.clone(),
            }

    def second_moments(self) -> list[Tensor]:
        """v_max, one tensor per parameter, in order. Not copied."""
        return [self.state[p]["v_max"] for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                g = p.grad.add(p, alpha=group["weight_decay"])
                m, v, v_max = state["m"], state["v"], state["v_max"]
                m.lerp_(g, 1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                torch.maximum(v_max, v, out=v_max)
                direction = (m / (v_max.sqrt() + group["eps"])).mul_(1 - group["rho"])
                p.sub_(direction.add_(state["correction"], alpha=group["rho"]), alpha=group["lr"])
