"""Arithmetic over named tensors."""

from collections.abc import Callable, Sequence

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
                with np.errstate(over="ignore"):  # the strategy looks at what comes of it
                    np.add(total, array if weight == 1 else _times(array, weight), out=total)

    def result(self) -> dict[str, NDArray]:
        """Ends the sums, in whose memory it is."""
        sums, self._sums = self._sums, {}
        for total in sums.values():
            if np.issubdtype(total.dtype, np.floating):
                np.divide(total, self._weight, out=total)
        return sums


class TrimmedMean:
    """The mean of vectors, entry by entry, without the ``cut(S)`` largest and smallest of its S values.

    It bounds what ``cut(S)`` clients can do (Yin et al. 2018, arXiv:1803.01498); the most that can be cut is all but
    one or two, which leaves the median. All vectors are held, and none is weighted.
    """

    def __init__(self, cut: Callable[[int], int]) -> None:
        self._cut = cut
        self._vectors: list[Vectors] = []

    def add(self, vectors: Vectors, weight: float) -> None:
        self._vectors.append(vectors)

    def result(self) -> dict[str, NDArray]:
        vectors, self._vectors = self._vectors, []
        cut = self._cut(len(vectors))
        result = {}
        for name, first in vectors[0].items():
            if np.issubdtype(first.dtype, np.floating):
                ordered = np.sort([vector[name] for vector in vectors], axis=0)[cut : len(vectors) - cut]
                result[name] = np.asarray(ordered.mean(0, dtype=np.float64), dtype=first.dtype)
            else:
                result[name] = first.copy()
        return result


def _times(array: NDArray, weight: float) -> NDArray:
    """A new array, of the same dtype; 0-d ones stay arrays."""
    if weight == 1 or not np.issubdtype(array.dtype, np.floating):
        return array.copy()
    return np.asarray(array * array.dtype.type(weight))
