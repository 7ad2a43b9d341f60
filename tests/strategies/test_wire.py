"""Arrays as they travel: Flower's own bytes, and views of them."""

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from strategies import wire

dtypes = st.sampled_from(["float32", "float64", "int64", "int8", "uint16", "bool", ">f4"])


@given(array=npst.arrays(dtypes, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
def test_the_bytes_are_flowers_own(array: np.ndarray) -> None:
    (ours,) = wire.to_record({"w": array}).values()
    theirs = Array(np.asarray(array, order="C"))
    assert (ours.dtype, tuple(ours.shape), ours.stype) == (theirs.dtype, tuple(theirs.shape), theirs.stype)
    assert ours.data == theirs.data
    back = wire.from_record(wire.to_record({"w": array}))["w"]
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_arrays_in_other_orders_arrive() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for other in (array.T, array[:, ::2], np.asfortranarray(array)):
        np.testing.assert_array_equal(wire.from_record(wire.to_record({"w": other}))["w"], other)


@pytest.mark.parametrize(
    ("entries", "finite"),
    [
        ([1, -2], True), ([], True), ([np.nan, 1], False), ([np.inf, -np.inf], False), ([np.inf, 1], False),
        ([3e38, 3e38], True),  # whose sum is not
    ],
)  # fmt: skip
def test_all_finite(entries: list[float], finite: bool) -> None:
    assert wire.all_finite(np.array(entries, np.float32)) == finite
    assert wire.all_finite(np.array([1, 2]))
