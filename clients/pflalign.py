"""The local optimizer of pflalign, after Kim and Lee 2026, "Personalized Federated Learning for Gradient Alignment",
arXiv:2605.02143.

Its abstract gives the two mechanisms: local gradients adapted to reduce their variance on small heterogeneous data, and
realignment of the received global model with the client's own direction, both derived from a PAC-Bayesian analysis. The
step is that of a third-party implementation that says it follows the paper's Algorithm 1, coordinate by coordinate. All
else is a decision here, and marked as one.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

Realign = Literal["probability", "sign", "never", "half", "always"]
SHRINKAGE = "shrinkage"  # P, in what a client keeps
FIXED = {"never": 0.0, "half": 0.5, "always": 1.0}  # gamma


class AlignedSGD(Optimizer):
    """SGD on shrunk gradients that lets go of the client's own Delta where a descent step would oppose it.

    With m = 0 at first, and v, P and Delta as the client's last round left them, one of the T steps of a round is::

        g = g + weight_decay x                              (coupled: the decay is part of the gradient)
        m = b m + (1 - b) g                                 v = b v + (1 - b) g g
        P = P (1 - (1 - b) g g / (v + eps)) + (1 - b) m m / (v + eps)
        gamma = 1/2 - 1/2 erf(|m| / sqrt(2 max(v - m m, 0) + eps)) sign(-m Delta)
        x = x - lr P g - gamma Delta / T

    P estimates the shrinkage m m / E[g g], a ratio of signal to noise. gamma is the probability that a descent step
    opposes Delta. Delta is the same in all steps of the round; where it is 0, so is the last term.

    Whoever makes the optimizer starts x at x^r + Delta, and takes x_K - x^r as the next Delta, as
    `clients.personal.pflalign` does.

    **The range of P** is 0 to C = (1 + sqrt(b))^2, which is 3.80 for b = .9, and not 0 to 1. With eps = 0, P is the
    running mean of m m over that of g g, which settles below 1 where the gradients are noise around a mean. But from
    P = 1, where a constant gradient leads, gradients of 0 take it to 1 + b; and gradients that shrink by sqrt(b) each
    step take it to C. It is not clamped (a decision): the account does not clamp it, and a step is then at most C times
    one of SGD.

    Proof, with v and P after and w, Q before a step::

        (v + eps) P = (b w + eps) Q + (1 - b) m m >= 0

    and, for b above 0 and s = sqrt(b) (1 + sqrt(b)), (v + eps) (C - P) >= s m m: it holds at first, and where m starts
    again at 0; and by induction after each step, n being m before it, as::

        (v + eps) (C - P) = (b w + eps) (C - Q) + C (1 - b) g g - (1 - b) m m
                         >= b s n n + C (1 - b) g g - (1 - b) m m

    and m m <= (b / s + (1 - b) / C) (b s n n + C (1 - b) g g), by Cauchy and Schwarz, whose first factor is
    1 / (s + 1 - b). With b = 0, P is 0 to 1, as m m is g g. The code computes P as the first line of the proof has it,
    where nothing is subtracted: it is never below 0, and above C by rounding at most.

    A parameter without a gradient in a step takes no part in it: x, m, v and P stay, and Delta is not let go of. One
    that never has a gradient has Delta = 0.

    Parameters
    ----------
    beta : float
        b, at least 0 and below 1.
    eps : float
        Above 0: v is 0 where there never was a gradient.
    steps : int
        T.
    delta, second_moment, shrinkage : sequence of Tensor
        Delta, v and P, shaped like the parameters, in order. v and P are at least 0; they are changed in place.
    shrink : bool
        Off is P = 1 in the step of x. (P itself goes on.)
    realign : {"probability", "sign", "never", "half", "always"}
        gamma: as above; with 1 in the place of erf, so that it is 1 where -m opposes Delta, 0 where it agrees with it,
        and 1/2 where either is 0; or 0, 1/2 or 1 always.

    Raises ValueError where ``realign`` is none of these, or a sequence has another length than the parameters.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        beta: float,
        eps: float,
        weight_decay: float,
        steps: int,
        *,
        delta: Sequence[Tensor],
        second_moment: Sequence[Tensor],
        shrinkage: Sequence[Tensor],
        shrink: bool = True,
        realign: Realign = "probability",
    ) -> None:
        if realign not in get_args(Realign):
            raise ValueError(f"realign = {realign!r}: allowed is one of {', '.join(get_args(Realign))}")
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps, "weight_decay": weight_decay})
        self._steps, self._shrink, self._realign = steps, shrink, realign
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, d, v, shrunk in zip(parameters, delta, second_moment, shrinkage, strict=True):
            self.state[p] = {"m": torch.zeros_like(p), "v": v, "P": shrunk, "delta": d}

    def second_moments(self) -> list[Tensor]:
        """v, one tensor per parameter, in order. Not copied."""
        return [self.state[p]["v"] for group in self.param_groups for p in group["params"]]

    def shrinkages(self) -> list[Tensor]:
        """P, likewise."""
        return [self.state[p]["P"] for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if x := [p for p in group["params"] if p.grad is not None]:
                self._step(x, group["lr"], group["beta"], group["eps"], group["weight_decay"])

    def _step(self, x: list[Tensor], lr: float, beta: float, eps: float, weight_decay: float) -> None:
        m, v, shrinkage, delta = ([self.state[p][key] for p in x] for key in ("m", "v", "P", "delta"))
        g = torch._foreach_add([p.grad for p in x if p.grad is not None], x, alpha=weight_decay)
        torch._foreach_lerp_(m, g, 1 - beta)
        torch._foreach_mul_(v, beta)
        torch._foreach_mul_(shrinkage, torch._foreach_add(v, eps))
        torch._foreach_addcmul_(v, g, g, value=1 - beta)
        torch._foreach_addcmul_(shrinkage, m, m, value=1 - beta)
        torch._foreach_div_(shrinkage, torch._foreach_add(v, eps))

        if self._shrink:
            torch._foreach_mul_(g, shrinkage)
        torch._foreach_add_(x, g, alpha=-lr)
        torch._foreach_addcmul_(x, opposition(m, v, delta, eps, self._realign), delta, value=-1 / self._steps)


def opposition(m: list[Tensor], v: list[Tensor], delta: list[Tensor], eps: float, realign: Realign) -> list[Tensor]:
    """gamma, see `AlignedSGD`; lists of tensors of one order and shapes."""
    if realign in FIXED:
        return [torch.full_like(d, FIXED[realign]) for d in delta]
    gamma = list(torch._foreach_sign(m))  # two signs and not that of a product, which may be too small for a float
    torch._foreach_mul_(gamma, list(torch._foreach_sign(delta)))
    if realign == "probability":
        spread = torch._foreach_addcmul(v, m, m, value=-1)
        torch._foreach_clamp_min_(spread, 0)
        torch._foreach_mul_(spread, 2)
        torch._foreach_add_(spread, eps)
        torch._foreach_sqrt_(spread)
        certainty = torch._foreach_abs(m)
        torch._foreach_div_(certainty, spread)
        torch._foreach_erf_(certainty)
        torch._foreach_mul_(gamma, certainty)
    torch._foreach_mul_(gamma, 0.5)
    torch._foreach_add_(gamma, 0.5)
    return gamma
