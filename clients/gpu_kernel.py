"""ACT-AdamW's step on a GPU, in Triton: eight kernels and a sum, however many tensors there are.

They do what `clients.optimizers` does with PyTorch's operations, in the same order, each rounded once, so they end in
the same bits. One vector is needed beside the optimizer's state, of directions; the scores are made again where they
are needed. The threshold of the selection is found digit by digit: a score's bits, turned into a number of the same
order, are counted by their upper 11 bits, then, of those that begin like the threshold, by the next 11 and the last
10. Nothing is sampled, so there is nothing that could fail, and the host waits for nothing.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # entries of one program: at twice as many, a multiprocessor's registers have room for only one
BINS = tl.constexpr(2048)
COLUMNS = tl.constexpr(5)  # of a chunk: its tensor, its group, where it starts in the tensor, its length, its offset
SCALARS = tl.constexpr(11)


@triton.jit
def _chunk(chunks):
    row = chunks + COLUMNS * tl.program_id(0)
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def _array(pointers, number, n, tensor):
    """Of p, g, m, v and the correction, the one of this number."""
    return tl.load(pointers + number * n + tensor).to(tl.pointer_type(tl.float32))


@triton.jit
def _key(score):
    """Unsigned numbers in the order of the scores; zeros of both signs are one."""
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000)


@triton.jit
def _count(digits, here, histogram, BLOCK: tl.constexpr):
    """Add the digits, of those entries that are here, to a histogram."""
    bins = tl.arange(0, BINS)
    counts = tl.histogram(tl.where(here, digits.to(tl.int32), 0), BINS)
    counts -= tl.where(bins == 0, BLOCK - tl.sum(here.to(tl.int32), 0), 0)
    tl.atomic_add(histogram + bins, counts, mask=counts != 0, sem="relaxed")


@triton.jit
def _moments(chunks, pointers, scalars, n, vector, histograms, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """m, v, and in the vector what is scored: the direction u, or its own part u_loc. Counts the first digit."""
    tensor, group, start, length, offset = _chunk(chunks)
    i = tl.arange(0, BLOCK)
    here = i < length
    at = start + i
    k = scalars + SCALARS * tensor
    g = tl.load(_array(pointers, 1, n, tensor) + at, here, 0.0)
    m = tl.load(_array(pointers, 2, n, tensor) + at, here, 0.0) * tl.load(k) + g * tl.load(k + 1)
    v = tl.load(_array(pointers, 3, n, tensor) + at, here, 0.0) * tl.load(k + 2) + (g * g) * tl.load(k + 3)
    tl.store(_array(pointers, 2, n, tensor) + at, m, here)
    tl.store(_array(pointers, 3, n, tensor) + at, v, here)
    scored = tl.div_rn(m * tl.load(k + 4), tl.sqrt_rn(v * tl.load(k + 5)) + tl.load(k + 6))
    if not OWN:
        correction = tl.load(_array(pointers, 4, n, tensor) + at, here, 0.0)
        scored = scored * tl.load(k + 7) + correction * tl.load(k + 8)
    tl.store(vector + offset + i, scored, here)
    _count(_key(scored * g) >> 21, here, histograms + group * BINS, BLOCK)


@triton.jit
def _keys(pointers, n, tensor, at, vector, here):
    return _key(tl.load(vector, here, 0.0) * tl.load(_array(pointers, 1, n, tensor) + at, here, 0.0))


@triton.jit
def _digit(
    chunks, pointers, n, vector, histograms, thresholds, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Counts the ``WIDTH`` bits from ``SHIFT`` on, of the keys whose upper bits are those of the threshold."""
    tensor, group, start, length, offset = _chunk(chunks)
    i = tl.arange(0, BLOCK)
    here = i < length
    keys = _keys(pointers, n, tensor, start + i, vector + offset + i, here)
    upper = tl.load(thresholds + group).to(tl.uint32, bitcast=True) >> (SHIFT + WIDTH)
    digits = (keys >> SHIFT) & ((1 << WIDTH) - 1)
    _count(digits, here & (keys >> (SHIFT + WIDTH) == upper), histograms + group * BINS, BLOCK)


@triton.jit
def _choose(histograms, thresholds, rooms, equals, SHIFT: tl.constexpr):
    """Of each group the threshold's digit, the room that larger scores leave, and how many scores share the digit."""
    group = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.load(histograms + group * BINS + bins)
    room = tl.load(rooms + group)
    larger = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    chosen = (larger < room) & (larger + counts >= room)
    digit = tl.sum(tl.where(chosen, bins, 0), 0)
    digit = tl.where(room == 0, BINS - 1, digit)  # with no room at all no score is above the threshold
    tl.store(thresholds + group, tl.load(thresholds + group) | (digit << SHIFT))
    tl.store(rooms + group, room - tl.sum(tl.where(chosen, larger, 0), 0))
    tl.store(equals + group, tl.sum(tl.where(chosen, counts, 0), 0))
    tl.store(histograms + group * BINS + bins, tl.zeros_like(counts))


@triton.jit
def _ties(chunks, pointers, n, vector, thresholds, rooms, equals, ties, BLOCK: tl.constexpr):
    """How many scores of a chunk are at the threshold, where there is not room for all of them."""
    tensor, group, start, length, offset = _chunk(chunks)
    count = 0
    if tl.load(equals + group) > tl.load(rooms + group):
        i = tl.arange(0, BLOCK)
        here = i < length
        keys = _keys(pointers, n, tensor, start + i, vector + offset + i, here)
        threshold = tl.load(thresholds + group).to(tl.uint32, bitcast=True)
        count = tl.sum((here & (keys == threshold)).to(tl.int32), 0)
    tl.store(ties + tl.program_id(0), count)


@triton.jit
def _update(
    chunks, pointers, scalars, n, vector, thresholds, rooms, equals, ties, ties_up_to, first, alpha, gamma,
    OWN: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor, group, start, length, offset = _chunk(chunks)
    i = tl.arange(0, BLOCK)
    here = i < length
    at = start + i
    k = scalars + SCALARS * tensor
    scored = tl.load(vector + offset + i, here, 0.0)
    score = scored * tl.load(_array(pointers, 1, n, tensor) + at, here, 0.0)
    keys = _key(score)
    threshold = tl.load(thresholds + group).to(tl.uint32, bitcast=True)
    room = tl.load(rooms + group)
    trusted = keys >= threshold
    if tl.load(equals + group) > room:
        here_first = tl.load(first + group)
        before = tl.load(ties_up_to + tl.program_id(0)) - tl.load(ties + tl.program_id(0))
        before -= tl.load(ties_up_to + here_first) - tl.load(ties + here_first)
        equal = keys == threshold
        trusted = (keys > threshold) | (equal & (before + tl.cumsum((here & equal).to(tl.int32), 0) <= room))
    elif room == 0:
        trusted = keys > threshold
    u = scored
    if OWN:
        correction = tl.load(_array(pointers, 4, n, tensor) + at, here, 0.0)
        u = scored * tl.load(k + 7) + correction * tl.load(k + 8)
    p = _array(pointers, 0, n, tensor) + at
    moved = (u * tl.where(trusted, alpha, gamma)) * tl.load(k + 10)
    tl.store(p, tl.load(p, here, 0.0) * tl.load(k + 9) - moved, here)
    if KEEP:
        tl.store(vector + offset + i, score, here)


class GpuKernel:
    """The step in Triton. It takes what `clients.cpu_kernel.CpuKernel` takes, on one GPU, up to 2^31 - 1 entries.

    ``block`` is how many entries one program takes, a power of 2.
    """

    name = "Triton"

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block

    def step(
        self,
        tensors: Sequence[Sequence[Tensor]],
        scalars: Sequence[Sequence[float]],
        trusted: Sequence[int],
        each_tensor: bool,
        own_score: bool,
        keep_scores: bool,
        alpha: float,
        gamma: float,
    ) -> Tensor | None:
        """One step, in place. Gives the scores, shape (d,), if they are to be kept. See `CpuKernel.step`."""
        device, n = tensors[0][0].device, len(tensors)
        sizes = tuple(each[0].numel() for each in tensors)
        chunks, first = _chunks(sizes, each_tensor, self.block, device)
        groups, grid = len(trusted), (len(chunks),)
        if not len(chunks):
            return torch.empty(0, device=device) if keep_scores else None
        pointers = _sent([[t.data_ptr() for t in array] for array in zip(*tensors, strict=True)], torch.int64, device)
        factors = _sent(scalars, torch.float32, device)
        rooms = _sent(trusted, torch.int32, device)
        thresholds, equals = torch.zeros(2, groups, dtype=torch.int32, device=device)
        histograms = torch.zeros(groups, BINS.value, dtype=torch.int32, device=device)
        ties, vector = torch.empty_like(chunks[:, 0], dtype=torch.int32), torch.empty(sum(sizes), device=device)

        exactly = {"BLOCK": self.block, "num_warps": 8, "enable_fp_fusion": False}
        with torch.cuda.device_of(vector):
            _moments[grid](chunks, pointers, factors, n, vector, histograms, OWN=own_score, **exactly)
            _choose[(groups,)](histograms, thresholds, rooms, equals, SHIFT=21)
            for shift, width in ((10, 11), (0, 10)):
                at = {"SHIFT": shift, "WIDTH": width}
                _digit[grid](chunks, pointers, n, vector, histograms, thresholds, **at, **exactly)
                _choose[(groups,)](histograms, thresholds, rooms, equals, SHIFT=shift)
            _ties[grid](chunks, pointers, n, vector, thresholds, rooms, equals, ties, **exactly)
            up_to = ties.cumsum(0, dtype=torch.int32)
            _update[grid](
                chunks, pointers, factors, n, vector, thresholds, rooms, equals, ties, up_to, first, alpha, gamma,
                OWN=own_score, KEEP=keep_scores, **exactly,
            )  # fmt: skip
        return vector if keep_scores else None


@lru_cache(maxsize=8)
def _chunks(sizes: tuple[int, ...], each_tensor: bool, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The chunks, see `COLUMNS`, and the first chunk of each group."""
    rows: list[tuple[int, ...]] = []
    first, offset = [], 0
    for tensor, size in enumerate(sizes):
        first.append(len(rows))
        for start in range(0, size, block):
            group = tensor if each_tensor else 0
            rows.append((tensor, group, start, min(block, size - start), offset + start))
        offset += size
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, COLUMNS.value), torch.tensor(
        first, dtype=torch.int32, device=device
    )


def _sent(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
