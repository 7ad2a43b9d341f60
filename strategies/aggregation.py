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


class RunningMean:
    """The weighted mean of vectors that come one after another, in the memory of one.

    Sums run in the dtype of the vectors, in the order of the calls. Arrays that are no floats (counters) have no mean:
    those of the first vector are taken.
    """

    def __init__(self) -> None:
        self._sums: dict[str, NDArray] = {}
        self._weight = 0.0

    def add(self, vectors: Vectors, weight: float) -> None:
        self._weight += weight
        if not self._sums:
            self._sums = {name: _times(array, weight) for name, array in vectors.items()}
            return
        for name, array in vectors.items():
            total = self._sums[name]
            if np.issubdtype(total.dtype, np.floating):
                np.add(total, array if weight == 1 else _times(array, weight), out=total)

    def result(self) -> dict[str, NDArray]:
        """Ends the sums, in whose memory it is."""
        sums, self._sums = self._sums, {}
        for total in sums.values():
            if np.issubdtype(total.dtype, np.floating):
                np.divide(total, self._weight, out=total)
        return sums


def _times(array: NDArray, weight: float) -> NDArray:
    """A new array, of the same dtype; 0-d ones stay arrays."""
    if weight == 1 or not np.issubdtype(array.dtype, np.floating):
        return array.copy()
    return np.asarray(array * array.dtype.type(weight))
