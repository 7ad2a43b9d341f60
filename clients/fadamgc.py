"""FAdamGC's local optimizer: Chen et al. 2025, "Gradient Correction in Federated Learning with Adaptive Optimization",
arXiv:2502.02727."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class TrackingAdamW(torch.optim.AdamW):
    """AdamW whose gradient is corrected before it enters the moments::

        g^ = g + y - y_i
        m = b1 m + (1 - b1) g^               v = b2 v + (1 - b2) g^ g^
        x = (1 - lr weight_decay) x - lr m_hat / (sqrt(v_hat) + eps)

    ``shift`` is y - y_i, one tensor per parameter, in order. A parameter without a gradient takes no part in the
    step. (AdamW, with decoupled decay and bias correction, where a third-party account of the source has AMSGrad
    without either: here the methods of this family share one local optimizer, so that they differ by their correction
    alone.)
    """

    def __init__(self, params: Iterable[Tensor], *args: Any, shift: Sequence[Tensor], **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self._shift = shift
        self._sums = [torch.zeros_like(p) for p in self._parameters]
        self._steps = 0

    def step(self) -> None:  # type: ignore[override]
        self._steps += 1
        for p, shift, total in zip(self._parameters, self._shift, self._sums, strict=True):
            if p.grad is not None:
                total.add_(p.grad)
                p.grad.add_(shift)
        super().step()

    def mean_gradients(self) -> list[Tensor]:
        """The mean of the uncorrected gradients over the steps done, one tensor per parameter, in order."""
        return [total / self._steps for total in self._sums]
