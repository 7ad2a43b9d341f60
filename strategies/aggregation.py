"""Arithmetic over named tensors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strategies.wire import Vectors


def linear_combination(coefficients: Sequence[float], vectors: Sequence[Vectors]) -> dict[str, NDArray]:
    """``sum_i coefficients[i] * vectors[i]``, name by name; the names are those of the first vector.

    Sums run in float64 in the order given and are rounded once, to the dtype of the first vector. One tensor is
    widened at a time, so the extra memory is twice that of the largest tensor.
    """
    result = {}
    for name, first in vectors[0].items():
        total = np.zeros(first.shape, np.float64)
        for coefficient, vector in zip(coefficients, vectors, strict=True):
            total += np.multiply(vector[name], coefficient, dtype=np.float64)
        result[name] = total.astype(first.dtype)
    return result
