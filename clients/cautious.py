"""Cautious AdamW: Liang et al. 2024, "Cautious Optimizers: Improving Training with One Line of Code",
arXiv:2411.16085."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

LEAST_SHARE = 1e-3  # so that a tensor with hardly any agreement takes no huge step


class CautiousAdamW(Optimizer):
    """AdamW that moves only where its direction agrees with the gradient, tensor by tensor::

        m = b1 m + (1 - b1) g                v = b2 v + (1 - b2) g g
        u = m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + eps)
        phi = 1 / max(share of agreeing coordinates, 0.001) where u g > 0, else 0
        x = (1 - lr weight_decay) x - lr phi u

    The paper scales by d / (1 + the number of agreeing coordinates); this form, with a bound on the share, is that of
    its authors' code. A parameter without a gradient takes no part in the step.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "step": 0}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, state = p.grad, self.state[p]
                state["step"] += 1
                m, v, k = state["m"], state["v"], state["step"]
                m.lerp_(g, 1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                u = (m / (1 - beta1**k)).div_((v / (1 - beta2**k)).sqrt_().add_(group["eps"]))
                phi = (u * g > 0).to(u.dtype)
                phi.div_(phi.mean().clamp_(min=LEAST_SHARE))
                p.mul_(1 - group["lr"] * group["weight_decay"]).addcmul_(phi, u, value=-group["lr"])
