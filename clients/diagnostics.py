"""The paper's diagnostics of agreement between clients and of the trust score (Appendix A)."""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from numpy.typing import NDArray
from torch import Tensor

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
    clients = [_parts(delta) for delta in deltas]
    dots = torch.zeros(len(clients), dtype=torch.float64)  # delta_i . mean
    squares = torch.zeros(len(clients), dtype=torch.float64)
    mean_square = 0.0
    for parts in zip(*clients, strict=True):  # tensor by tensor, so that one is widened at a time
        stacked = torch.stack([part.double().flatten() for part in parts])
        mean = stacked.mean(0)
        dots += (stacked @ mean).cpu()
        squares += stacked.square().sum(1).cpu()
        mean_square += mean.square().sum().item()
    lengths = squares.sqrt() * math.sqrt(mean_square)
    return torch.where(lengths > 0, dots / lengths, 0.0).mean().item()


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


def _parts(vector: Vector) -> list[Tensor]:
    parts = vector if isinstance(vector, (list, tuple)) else [vector]
    return [torch.as_tensor(part) for part in parts]
