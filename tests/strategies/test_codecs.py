"""What travels in fewer bits, on numbers whose codes can be checked by hand."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from strategies import wire
from strategies.codecs import BLOCK, codec, decode, encode

NARROW = ("bfloat16", "int8")
RECORDS = (wire.DELTA, wire.CORRECTION, wire.SECOND_MOMENT)
finite = st.floats(-(2.0**100), 2.0**100, width=32)
shapes = npst.array_shapes(min_dims=0, max_dims=3, max_side=20)


def there_and_back(record: str, array: Sequence[float] | np.ndarray, form: str, seed: int = 0) -> np.ndarray:
    vectors = {"w": np.asarray(array, np.float32)}
    coded = encode(record, vectors, form, (), seed)
    return decode(record, coded, form, (), vectors)["w"]


def test_bfloat16_by_hand() -> None:
    """It has eight bits of precision: between 1 and 2 a step is 1/128. Halves go to the even neighbour."""
    given = [1, 1 + 1 / 128, 1 + 0.4 / 128, 1 + 1 / 256, 1 + 3 / 256, -3.140625, 0]
    assert there_and_back(wire.DELTA, given, "bfloat16").tolist() == [1, 1 + 1 / 128, 1, 1, 1 + 2 / 128, -3.140625, 0]


def test_int8_by_hand() -> None:
    """Steps of a 127th of the block's largest; what lies on a step stays where it is, and each block has its own."""
    small = np.zeros(BLOCK, np.float32)
    small[:4] = [-127, 3, 0, 64]
    large = np.array([1270, -10, 20], np.float32)
    back = there_and_back(wire.DELTA, np.concatenate([small, large]), "int8")
    assert back.tolist() == [*small, *large]


@pytest.mark.parametrize(("record", "value"), [(wire.DELTA, 0.3), (wire.SECOND_MOMENT, 1.1)])
def test_int8_rounds_to_a_neighbour_with_the_right_mean(record: str, value: float) -> None:
    """Of a delta beside 127: 0.3 is 0 or 1. Of second moments 1.1 is 1 or 1.25. 10,000 of them tell the mean."""
    many = np.full(10_000, value, np.float32)
    many[::BLOCK] = 127
    low, high = (0, 1) if record == wire.DELTA else (1, 1.25)
    back = np.delete(there_and_back(record, many, "int8"), slice(None, None, BLOCK))
    assert set(back.tolist()) == {low, high}
    deviation = (high - low) / 2 / np.sqrt(len(back))
    assert back.mean(dtype=np.float64) == pytest.approx(value, abs=5 * deviation)


def test_second_moments_keep_many_powers_of_ten() -> None:
    v = np.array([1e-12, 1e-6, 1, 0], np.float32)
    back = there_and_back(wire.SECOND_MOMENT, v, "int8")
    np.testing.assert_allclose(back, v, rtol=0.25)
    assert there_and_back(wire.SECOND_MOMENT, [2.0**-70, 1], "int8").tolist() == [0, 1]


@pytest.mark.parametrize("record", RECORDS)
def test_sizes_on_the_wire(record: str) -> None:
    vectors = {"w": np.ones((3, 1000), np.float32)}
    sizes = {form: encode(record, vectors, form, (), 0)["w"].nbytes for form in ("float32", *NARROW)}
    overhead = 2 if record == wire.SECOND_MOMENT else 3 * 4
    assert sizes == {"float32": 12_000, "bfloat16": 6000, "int8": 3000 + overhead}


@given(array=npst.arrays("float32", shapes, elements=finite), seed=st.integers(0, 2**62))
@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("record", RECORDS)
def test_any_array_comes_back_in_its_shape_and_near(record: str, form: str, array: np.ndarray, seed: int) -> None:
    if record == wire.SECOND_MOMENT:
        array = np.abs(array)
    back = there_and_back(record, array, form, seed)
    assert (back.shape, back.dtype) == (array.shape, np.float32)
    np.testing.assert_array_equal(back, there_and_back(record, array, form, seed))
    largest = np.abs(array).max(initial=0)
    if form == "bfloat16":
        bound = np.abs(array) / 256 + 1e-38
    elif record == wire.SECOND_MOMENT:
        bound = array / 4 + largest * 2.0**-62 + 1e-38
        assert (back >= 0).all()
    else:
        bound = np.full_like(array, largest / 127 * 1.001 + 1e-35)
    assert (np.abs(back.astype(np.float64) - array) <= bound).all()


@given(code=npst.arrays(st.sampled_from(["uint8", "uint16", "float32"]), npst.array_shapes(max_dims=2, max_side=40)))
@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("record", RECORDS)
def test_any_code_is_an_array_or_refused(record: str, form: str, code: np.ndarray) -> None:
    coder = codec(record, form)
    assert coder is not None
    for shape in ((), (3,), (5, 4), code.shape, (max(0, code.size - 4),), (max(0, code.size - 2),)):
        try:
            assert coder.decode(code, shape).shape == shape
        except ValueError:
            continue


def test_buffers_and_counters_stay_exact() -> None:
    vectors = {
        "mean": np.array([1.000001], np.float32),
        "count": np.array(7),
        "w": np.array([1.000001], np.float32),
    }
    back = decode(wire.DELTA, encode(wire.DELTA, vectors, "bfloat16", {"mean"}, 0), "bfloat16", {"mean"}, vectors)
    assert back["mean"] == np.float32(1.000001)
    assert back["count"] == 7
    assert back["w"] == 1


def test_rounding_follows_from_the_seed_and_the_record() -> None:
    vectors = {"w": np.linspace(0, 1, 100, dtype=np.float32)}
    codes = [encode(r, vectors, "int8", (), seed)["w"] for r, seed in ((wire.DELTA, 1), (wire.DELTA, 1))]
    others = [encode(r, vectors, "int8", (), seed)["w"] for r, seed in ((wire.DELTA, 2), (wire.CORRECTION, 1))]
    assert (codes[0] == codes[1]).all()
    assert all((codes[0] != other).any() for other in others)
