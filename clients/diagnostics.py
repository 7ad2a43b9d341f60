"""The paper's diagnostics of agreement between clients and of the trust score (Appendix A)."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from strategies.wire import Vectors

Vector = Tensor | NDArray | Sequence[Tensor | NDArray]


def direction_consistency(deltas: Sequence[Vector]) -> float:
    """DC: the mean over clients of the cosine between a client's delta and the mean delta, in [-1, 1].

    1 where all clients move alike, about 1/sqrt(S) for S orthogonal ones; a zero vector counts 0. (The mean of
    cosines with the mean direction is our reading of the paper's measure.)

    Parameters
    ----------
    deltas : sequence
        One vector per client: a tensor, a NumPy array, or a sequence of them in the same order for each client.
    """
    consistency = DirectionConsistency()
    for delta in deltas:
        consistency.add_parts(cast(Sequence[Tensor], delta if isinstance(delta, (list, tuple)) else [delta]))
    return consistency.value()


class DirectionConsistency:
    """`direction_consistency` of deltas that come one after another, in the memory of two.

    The mean of the cosines is the cosine's formula for the sum of the unit vectors: with m the mean delta,
    sum_i (delta_i . m) / (|delta_i| |m|) = (sum_i delta_i / |delta_i|) . m / |m|. Both sums run in float32.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sum: list[Tensor] = []
        self._directions: list[Tensor] = []

    def add(self, delta: Vectors) -> None:
        self.add_parts(list(delta.values()))

    def add_parts(self, parts: Sequence[Tensor | NDArray]) -> None:
        tensors = [torch.as_tensor(part) for part in parts]
        norm = _norm(tensors)
        if not self._sum:
            self._sum, self._directions = ([torch.zeros_like(t) for t in tensors] for _ in range(2))
        self._count += 1
        if norm > 0:
            torch._foreach_add_(self._sum, tensors)
            torch._foreach_add_(self._directions, tensors, alpha=1 / norm)

    def value(self) -> float:
        norm = _norm(self._sum)
        if norm == 0:
            return 0.0
        pairs = zip(self._directions, self._sum, strict=True)  # one tensor at a time, so that one is widened
        return sum((u.double() * m.double()).sum().item() for u, m in pairs) / norm / self._count

    def metrics(self) -> dict[str, float]:
        return {"direction_consistency": self.value()}


def positive_score_ratio(score: Tensor) -> float:
    """The share of coordinates with a score above 0, in [0, 1]; 0 for an empty vector."""
    return (score > 0).double().mean().item() if score.numel() else 0.0


def top_score_mass(score: Tensor, p: float) -> float:
    """The share of the sum of |score| that the ceil(p d) coordinates of largest |score| carry, in [0, 1].

    0 where all scores are 0. p in [0, 1].
    """
    magnitude = score.flatten().abs().double()
    total = magnitude.sum().item()
    count = math.ceil(Fraction(repr(float(p))) * magnitude.numel())
    return magnitude.topk(count).values.sum().item() / total if total > 0 else 0.0


def _norm(parts: Sequence[Tensor]) -> float:
    return math.hypot(*(torch.linalg.vector_norm(part, dtype=torch.float64).item() for part in parts))
