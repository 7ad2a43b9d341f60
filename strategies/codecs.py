"""Fewer bytes on the wire: float32 arrays as bfloat16, or as one byte a number.

One byte a number has two forms. Signed vectors (deltas, Delta_G) are integers from -127 to 127 times a scale for each
run of `BLOCK` numbers, so that an outlier costs its own block alone (Dettmers et al. 2021, arXiv:2110.02861); second
moments, which span many powers of ten, are floats of two mantissa bits below the largest of their tensor. Both round
at random, up with the probability that makes the mean exact: rounding to nearest would lose what is small in every
client alike. The random numbers follow from a seed, so that a run can be repeated.
"""

from collections.abc import Collection
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from strategies import wire
from strategies.seeds import derive_seed
from strategies.wire import Vectors

Format = Literal["float32", "bfloat16", "int8"]
BLOCK = 1024  # numbers under one scale
LOG_BITS = 21  # of float32's 23 mantissa bits, those that a second moment loses
LARGEST = 0x7F7FFFFF >> LOG_BITS  # the code of the largest finite numbers


class WireSettings(BaseModel):
    """How records travel; both halves read it, and pyproject.toml explains each setting."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    wire_delta: Format
    wire_correction: Literal["float32", "bfloat16", "int8", "derived"]
    wire_second_moment: Format

    @property
    def derives_correction(self) -> bool:
        """Whether clients find Delta_G themselves where they hold the model before; to others it goes as float32."""
        return self.wire_correction == "derived"

    def format(self, record: str) -> Format:
        """Of an array record, by its name."""
        if record == wire.DELTA:
            return self.wire_delta
        if record == wire.CORRECTION and self.wire_correction != "derived":
            return self.wire_correction
        return self.wire_second_moment if record == wire.SECOND_MOMENT else "float32"


class Codec(Protocol):
    def encode(self, array: NDArray, generator: np.random.Generator) -> NDArray:
        """A finite float32 array as it travels."""

    def decode(self, code: NDArray, shape: tuple[int, ...]) -> NDArray:
        """The float32 array of that shape. Raises ValueError where ``code`` is none of such an array."""


class BFloat16:
    """The upper half of each float32, rounded to nearest, ties to even: uint16, of the same shape."""

    def encode(self, array: NDArray, generator: np.random.Generator) -> NDArray:
        bits = array.ravel().view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16).reshape(array.shape)

    def decode(self, code: NDArray, shape: tuple[int, ...]) -> NDArray:
        _check(code, np.uint16, shape)
        return np.left_shift(code.ravel(), 16, dtype=np.uint32).view(np.float32).reshape(shape)


class BlockInt8:
    """uint8, flat: the blocks' scales as little-endian float32, then an int8 for each number in memory order."""

    def encode(self, array: NDArray, generator: np.random.Generator) -> NDArray:
        blocks = -(-array.size // BLOCK)
        padded = np.zeros((blocks, BLOCK), np.float32)
        padded.ravel()[: array.size] = array.ravel()
        largest = np.maximum(padded.max(1, initial=0), -padded.min(1, initial=0))
        scales = largest / np.float32(127)
        # a block of zeros, or of numbers so small that they have no scale, is one of zeros
        padded *= np.divide(1, scales, out=np.zeros_like(scales), where=scales >= np.finfo(np.float32).tiny)[:, None]
        padded += generator.random(padded.shape, np.float32)
        codes = np.clip(np.floor(padded, out=padded), -127, 127, out=padded).astype(np.int8)
        return np.concatenate([scales.astype("<f4").view(np.uint8), codes.ravel()[: array.size].view(np.uint8)])

    def decode(self, code: NDArray, shape: tuple[int, ...]) -> NDArray:
        size = int(np.prod(shape))
        blocks = -(-size // BLOCK)
        _check(code, np.uint8, (4 * blocks + size,))
        scales, codes = code[: 4 * blocks].view("<f4"), code[4 * blocks :].view(np.int8)
        array = codes.astype(np.float32)
        whole = size // BLOCK * BLOCK
        with np.errstate(over="ignore", invalid="ignore"):  # who asked looks for what is not finite
            array[:whole].reshape(-1, BLOCK)[:] *= scales[: size // BLOCK, None]
            array[whole:] *= scales[size // BLOCK :]
        return array.reshape(shape)


class LogInt8:
    """Numbers from 0 up, as uint8, flat: two bytes that give the code below the smallest one's, then a byte a number.

    A code counts in steps of a quarter of a power of two; 0 is 0, and so is what is below a 2**63th of the largest.
    """

    def encode(self, array: NDArray, generator: np.random.Generator) -> NDArray:
        noise = generator.integers(0, 1 << LOG_BITS, array.size, dtype=np.uint32)
        noise += array.ravel().view(np.uint32) & 0x7FFFFFFF  # -0 is 0
        codes = (noise >> LOG_BITS).astype(np.int16)
        np.minimum(codes, LARGEST, out=codes)
        base = max(0, int(codes.max(initial=0)) - 255)
        codes -= base
        np.maximum(codes, 0, out=codes)
        return np.concatenate([np.array([base], "<u2").view(np.uint8), codes.astype(np.uint8)])

    def decode(self, code: NDArray, shape: tuple[int, ...]) -> NDArray:
        _check(code, np.uint8, (2 + int(np.prod(shape)),))
        base = int(code[:2].view("<u2")[0])
        if base > LARGEST:
            raise ValueError(f"its base is {base}")
        values = (np.arange(256, dtype=np.uint32) + base) << LOG_BITS
        values[0] = 0
        return values.view(np.float32)[code[2:]].reshape(shape)


def codec(record: str, format: str) -> Codec | None:
    """How an array record travels in this format; None where it goes as it is."""
    if format == "bfloat16":
        return BFloat16()
    if format == "int8":
        return LogInt8() if record == wire.SECOND_MOMENT else BlockInt8()
    return None


def encode(record: str, vectors: Vectors, format: str, exact: Collection[str], seed: int) -> Vectors:
    """An array record as it travels. Arrays that are no float32, and those named in ``exact``, stay as they are."""
    coder = codec(record, format)
    if coder is None:
        return vectors
    generator = np.random.default_rng(derive_seed(seed, record, "rounding"))
    return {  # in the order of names: that of the mapping may be another after a run is resumed
        name: coder.encode(vectors[name], generator) if _travels(name, vectors[name], exact) else vectors[name]
        for name in sorted(vectors)
    }


def decode(record: str, vectors: Vectors, format: str, exact: Collection[str], like: Vectors) -> Vectors:
    """What `encode` was given, but for the rounding. Raises ValueError where it can't have been like ``like``.

    Names that ``like`` does not have are left as they are.
    """
    coder = codec(record, format)
    if coder is None:
        return vectors
    decoded = dict(vectors)
    for name, code in vectors.items():
        if name in like and _travels(name, like[name], exact):
            try:
                decoded[name] = coder.decode(code, like[name].shape)
            except ValueError as error:
                raise ValueError(f"{name} in {format}: {error}") from error
    return decoded


def _travels(name: str, array: NDArray, exact: Collection[str]) -> bool:
    return name not in exact and array.dtype == np.float32


def _check(code: NDArray, dtype: type, shape: tuple[int, ...]) -> None:
    if code.dtype != dtype or code.shape != shape:
        raise ValueError(f"{code.dtype}{list(code.shape)}, not {np.dtype(dtype)}{list(shape)}")
