"""ACT-AdamW's step on a CPU in three passes over memory: moments and direction, the selection, the update.

The C++ below does what `clients.optimizers` does with PyTorch's operations, in the same order, each rounded once, so it
ends in the same bits; it is compiled when it is first needed, where there is a compiler, and kept in the user's cache.
It needs one vector beside the optimizer's state, of directions; scores are never all in memory.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t CHUNK = 1 << 14;  // entries that one thread takes at a time
constexpr int64_t PIECE = 1 << 10;  // of those, whose scores are looked at while they are in the cache
constexpr uint32_t BINS = 1 << 12;  // of a histogram

struct Scalars { float beta1, rest1, beta2, rest2, unbias1, unbias2, eps, own, shared, decay, lr; };
struct Tensors { float* p; const float* g; float* m; float* v; const float* correction; Scalars k; };
struct Chunk { int64_t tensor, start, end, offset; };  // [start, end) of a tensor; offset of start in the whole vector

inline int64_t end_of(const Chunk& chunk) { return chunk.offset + chunk.end - chunk.start; }

// Trusted are scores above the threshold, and those at it up to this index.
struct Trusted { float threshold; int64_t last; bool all = false; };

// Writes to w what is scored: the direction u, or u_loc, of which a pass makes u again by two multiplications.
template <bool OWN>
void moments(const Tensors& t, const Chunk& chunk, float* __restrict w) {
    const Scalars k = t.k;
    const float* __restrict g = t.g; const float* __restrict c = t.correction;
    float* __restrict m = t.m; float* __restrict v = t.v;
    for (int64_t i = chunk.start; i < chunk.end; i++) {
        m[i] = m[i] * k.beta1 + g[i] * k.rest1;
        v[i] = v[i] * k.beta2 + (g[i] * g[i]) * k.rest2;
        const float own = (m[i] * k.unbias1) / (std::sqrt(v[i] * k.unbias2) + k.eps);
        w[chunk.offset + i - chunk.start] = OWN ? own : own * k.own + c[i] * k.shared;
    }
}

// Leaves the scores in w where they are to be kept.
template <bool OWN, bool KEEP, typename Phi>
void update(const Tensors& t, const Chunk& chunk, float* __restrict w, Phi phi) {
    const Scalars k = t.k;
    const float* __restrict g = t.g; const float* __restrict c = t.correction;
    float* __restrict p = t.p;
    for (int64_t i = chunk.start; i < chunk.end; i++) {
        const int64_t j = chunk.offset + i - chunk.start;
        const float u = OWN ? w[j] * k.own + c[i] * k.shared : w[j];
        const float score = w[j] * g[i];
        p[i] = p[i] * k.decay - (u * phi(score, j)) * k.lr;
        if (KEEP) w[j] = score;
    }
}

// A total order of floats as integers, -0 with 0, and NaN above all, so that no input can confuse a sort.
inline uint32_t key(float x) {
    uint32_t bits;
    x = x != x ? NAN : x + 0.0f;
    std::memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float value(uint32_t key) {
    const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// The one of that rank, 1 is the largest: a histogram over their range says in which bin it is, and that bin is sorted
// as far as need be.
uint32_t largest(const std::vector<uint32_t>& keys, int64_t rank) {
    uint32_t least = ~0u, most = 0;
    for (uint32_t x : keys) { least = std::min(least, x); most = std::max(most, x); }
    int shift = 0;
    while (((most - least) >> shift) >= BINS) shift++;
    std::vector<int64_t> counts(BINS, 0);
    for (uint32_t x : keys) counts[(x - least) >> shift]++;
    uint32_t bin = BINS - 1;
    for (; rank > counts[bin]; bin--) rank -= counts[bin];
    std::vector<uint32_t> those;
    those.reserve(counts[bin]);
    for (uint32_t x : keys) if ((x - least) >> shift == bin) those.push_back(x);
    std::nth_element(those.begin(), those.begin() + (rank - 1), those.end(), std::greater<uint32_t>());
    return those[rank - 1];
}

// How many scores are above the bracket (NaN among them), and at each of its ends: of those there may be very many, as
// where gradients are 0.
struct Counts { int64_t above = 0, high = 0, low = 0; };

// Counts, puts what is strictly between `low` and `high` into `between`, and gives how many those are.
int64_t sift(const float* __restrict s, int64_t n, float low, float high, Counts& counts, float* __restrict between) {
    int64_t i = 0, kept = 0, above = 0, at_high = 0, at_low = 0;
#ifdef __AVX512F__
    const __m512 lows = _mm512_set1_ps(low), highs = _mm512_set1_ps(high);
    for (; i + 16 <= n; i += 16) {
        const __m512 x = _mm512_loadu_ps(s + i);
        const __mmask16 under = _mm512_cmp_ps_mask(x, highs, _CMP_LT_OQ);
        const __mmask16 top = _mm512_cmp_ps_mask(x, highs, _CMP_EQ_OQ);
        const __mmask16 in = _mm512_mask_cmp_ps_mask(under, x, lows, _CMP_GT_OQ);
        above += 16 - __builtin_popcount(under | top);
        at_high += __builtin_popcount(top);
        at_low += __builtin_popcount(_mm512_mask_cmp_ps_mask(under, x, lows, _CMP_EQ_OQ));
        if (in) {
            _mm512_storeu_ps(between + kept, _mm512_maskz_compress_ps(in, x));
            kept += __builtin_popcount(in);
        }
    }
#endif
    for (; i < n; i++) {
        above += !(s[i] <= high);
        at_high += s[i] == high;
        at_low += (s[i] == low) & (s[i] < high);
        between[kept] = s[i];
        kept += (s[i] > low) & (s[i] < high);
    }
    counts.above += above;
    counts.high += at_high;
    counts.low += at_low;
    return kept;
}

// The scores of some chunks, which are never all in memory: w times g.
struct Scores {
    const std::vector<Tensors>& tensors; const Chunk* chunks; int64_t count; const float* w;

    int64_t first() const { return chunks[0].offset; }
    int64_t size() const { return end_of(chunks[count - 1]) - first(); }
    const float* gradient(const Chunk& chunk) const { return tensors[chunk.tensor].g + chunk.start - chunk.offset; }
};

// So many scores from equal stretches of the vector, a pseudorandom one of each: rows and columns have no say in it.
std::vector<uint32_t> sample(const Scores& scores, int64_t size, int threads) {
    std::vector<uint32_t> keys(size);
    const int64_t n = scores.size();
    #pragma omp parallel num_threads(threads)
    {
        const Chunk* chunk = scores.chunks;
        #pragma omp for schedule(static)
        for (int64_t i = 0; i < size; i++) {
            const int64_t begin = i * n / size, end = (i + 1) * n / size;
            const uint64_t random = (i * 0x9e3779b97f4a7c15u) >> 32;
            const int64_t j = scores.first() + begin + int64_t(random * uint64_t(end - begin) >> 32);
            while (j >= end_of(*chunk)) chunk++;
            keys[i] = key(scores.w[j] * scores.gradient(*chunk)[j]);
        }
    }
    return keys;
}

// The k-th largest of n scores, 0 < k < n, exactly: a sample of about n^(2/3) brackets it, one pass counts what is
// above the bracket and gathers what is in it (Floyd and Rivest 1975), and the gathered decide.
Trusted select(const Scores& scores, int64_t k, int threads) {
    const int64_t n = scores.size();
    float low = -INFINITY, high = INFINITY;
    if (n > CHUNK) {
        const int64_t size = std::cbrt(double(n)) * std::cbrt(double(n)) / 2;
        const std::vector<uint32_t> keys = sample(scores, size, threads);
        const double share = double(k) / double(n);
        const int64_t middle = int64_t(share * size);
        const int64_t reach = int64_t(3 * std::sqrt(size * share * (1 - share))) + 4;  // too little once in 400
        if (middle - reach >= 1) high = value(largest(keys, middle - reach));
        if (middle + reach <= size) low = value(largest(keys, middle + reach));
    }
    std::vector<uint32_t> keys;  // of those between
    Counts counts;
    for (;;) {
        keys.clear();
        counts = {};
        #pragma omp parallel num_threads(threads)
        {
            std::vector<uint32_t> mine;
            float piece[PIECE], between[PIECE + 16];
            Counts count;
            #pragma omp for schedule(static)
            for (int64_t c = 0; c < scores.count; c++) {
                const Chunk& chunk = scores.chunks[c];
                const float* __restrict w = scores.w;
                const float* __restrict g = scores.gradient(chunk);
                const int64_t end = end_of(chunk);
                for (int64_t start = chunk.offset; start < end; start += PIECE) {
                    const int64_t length = std::min(PIECE, end - start);
                    for (int64_t i = 0; i < length; i++) piece[i] = w[start + i] * g[start + i];
                    const int64_t kept = sift(piece, length, low, high, count, between);
                    for (int64_t i = 0; i < kept; i++) mine.push_back(key(between[i]));
                }
            }
            #pragma omp critical
            {
                counts.above += count.above;
                counts.high += count.high;
                counts.low += count.low;
                keys.insert(keys.end(), mine.begin(), mine.end());
            }
        }
        const int64_t down_to_low = counts.above + counts.high + int64_t(keys.size()) + counts.low;
        if ((k > counts.above && k <= down_to_low) || (low == -INFINITY && high == INFINITY)) break;
        low = -INFINITY;  // the sample was misleading
        high = INFINITY;
    }
    const int64_t end = scores.first() + n, between = keys.size();
    int64_t places = k - counts.above;
    if (places <= 0) return {NAN, end};  // more NaN than places: nothing compares, nothing is trusted
    float limit = high;
    int64_t ties = counts.high;
    if (places > counts.high + between) {
        places -= counts.high + between;
        limit = low;
        ties = counts.low;
    } else if (places > counts.high) {
        places -= counts.high;
        const uint32_t threshold = largest(keys, places);
        ties = 0;
        for (uint32_t x : keys) { places -= x > threshold; ties += x == threshold; }
        limit = value(threshold);
    }
    if (places == ties) return {limit, end};
    int64_t j = scores.first();
    for (int64_t c = 0; places > 0; c++) {
        const Chunk& chunk = scores.chunks[c];
        const float* g = scores.gradient(chunk);
        for (; places > 0 && j < end_of(chunk); j++) places -= scores.w[j] * g[j] == limit;
    }
    return {limit, j - 1};
}

template <bool OWN, bool KEEP>
void step(
    const std::vector<Tensors>& tensors, const std::vector<Chunk>& chunks, const int64_t* trusted, bool each_tensor,
    float alpha, float gamma, float* w, int threads
) {
    const int64_t count = chunks.size();
    #pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t c = 0; c < count; c++) moments<OWN>(tensors[chunks[c].tensor], chunks[c], w);

    const auto vector_of = [=](const Chunk& chunk) { return each_tensor ? chunk.tensor : 0; };
    std::vector<Trusted> selected(tensors.size());
    for (int64_t begin = 0, end; begin < count; begin = end) {
        const int64_t vector = vector_of(chunks[begin]);
        for (end = begin + 1; end < count && vector_of(chunks[end]) == vector;) end++;
        const Scores scores{tensors, &chunks[begin], end - begin, w};
        const int64_t k = trusted[vector], n = scores.size();
        if (k == 0) selected[vector] = {NAN, scores.first() + n};
        else if (k < n) selected[vector] = select(scores, k, threads);
        else selected[vector].all = true;
    }

    #pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t c = 0; c < count; c++) {
        const Chunk& chunk = chunks[c];
        const Tensors& t = tensors[chunk.tensor];
        const Trusted& which = selected[vector_of(chunk)];
        const float limit = which.threshold;
        const int64_t last = which.last;
        if (which.all)
            update<OWN, KEEP>(t, chunk, w, [=](float, int64_t) { return alpha; });
        else if (last >= end_of(chunk))
            update<OWN, KEEP>(t, chunk, w, [=](float score, int64_t) { return score >= limit ? alpha : gamma; });
        else
            update<OWN, KEEP>(t, chunk, w, [=](float score, int64_t j) {
                return (score > limit) | ((score == limit) & (j <= last)) ? alpha : gamma;
            });
    }
}

}  // namespace

extern "C" void act_adamw_step(
    int64_t count, float** p, const float** g, float** m, float** v, const float** correction, const int64_t* n,
    const float* scalars, const int64_t* trusted, bool each_tensor, bool own_score, bool keep_scores, float alpha,
    float gamma, float* w, int threads
) {
    std::vector<Tensors> tensors(count);
    std::vector<Chunk> chunks;
    int64_t offset = 0;
    for (int64_t t = 0; t < count; t++) {
        tensors[t] = {p[t], g[t], m[t], v[t], correction[t], {}};
        std::memcpy(&tensors[t].k, scalars + 11 * t, sizeof(Scalars));
        for (int64_t start = 0; start < n[t]; start += CHUNK)
            chunks.push_back({t, start, std::min(n[t], start + CHUNK), offset + start});
        offset += n[t];
    }
    const auto way = own_score ? (keep_scores ? step<true, true> : step<true, false>)
                               : (keep_scores ? step<false, true> : step<false, false>);
    way(tensors, chunks, trusted, each_tensor, alpha, gamma, w, threads);
}
"""

SCALARS = 11  # of each tensor, as in the source
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-fopenmp",
    "-ffp-contract=off",  # each operation rounds, as PyTorch's do
    "-fno-math-errno", "-fno-trapping-math",  # so that the loops become vector instructions; no bit depends on it
)  # fmt: skip

log = logging.getLogger(__name__)


class Scratch(threading.local):
    """A vector for each thread, kept from step to step and client to client: new memory costs as much as filling it."""

    def __init__(self) -> None:
        self.vector = torch.empty(0)


class CpuKernel:
    """The compiled step."""

    name = "C++"

    def __init__(self, path: Path) -> None:
        self._step = ctypes.CDLL(str(path)).act_adamw_step
        self._step.restype = None
        self._memory = Scratch()

    @property
    def scratch_bytes(self) -> int:
        """What it keeps of memory, as much as the vector of the last step."""
        return self._memory.vector.nbytes

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
        """One step, in place. Gives the scores, shape (d,), if they are to be kept.

        Parameters
        ----------
        tensors : sequence of (p, g, m, v, correction)
            Contiguous float32 tensors on the CPU, five of one size for each parameter.
        scalars : sequence of sequence of float
            For each parameter beta1, 1 - beta1, beta2, 1 - beta2, 1 / (1 - beta1^k), 1 / (1 - beta2^t), eps, 1 - rho,
            rho, 1 - lr weight_decay, lr.
        trusted : sequence of int
            How many scores of all are trusted, or of each tensor with ``each_tensor``.
        own_score : bool
            Whether the direction without the correction is scored.
        """
        n = len(tensors)
        d = sum(each[0].numel() for each in tensors)
        if self._memory.vector.numel() != d:
            self._memory.vector = torch.empty(d, dtype=torch.float32, device="cpu")
        scratch = self._memory.vector
        pointers = [(ctypes.c_void_p * n)(*(t.data_ptr() for t in each)) for each in zip(*tensors, strict=True)]
        sizes = (ctypes.c_int64 * n)(*(each[0].numel() for each in tensors))
        flat = (ctypes.c_float * (SCALARS * n))(*(x for of in scalars for x in of))
        self._step(
            ctypes.c_int64(n), *pointers, sizes, flat, (ctypes.c_int64 * len(trusted))(*trusted),
            ctypes.c_bool(each_tensor), ctypes.c_bool(own_score), ctypes.c_bool(keep_scores), ctypes.c_float(alpha),
            ctypes.c_float(gamma), ctypes.c_void_p(scratch.data_ptr()), ctypes.c_int(torch.get_num_threads()),
        )  # fmt: skip
        if not keep_scores:
            return None
        self._memory.vector = torch.empty(0)
        return scratch


@cache
def cpu_kernel() -> CpuKernel | None:
    """The kernel of this process, compiled if this machine has not done so before; None where that can't be."""
    try:
        compiler = shlex.split(os.environ.get("CXX", "clang++" if platform.system() == "Darwin" else "g++"))
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
        what = "".join([SOURCE, *FLAGS, _processor()]).encode() + version
        cached = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "fedact"
        library = cached / f"act-adamw-{hashlib.sha256(what).hexdigest()[:16]}.so"
        if not library.exists():
            cached.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cached) as folder:
                source, built = Path(folder) / "act_adamw.cpp", Path(folder) / library.name
                source.write_text(SOURCE)
                subprocess.run(
                    [*compiler, *FLAGS, str(source), "-o", str(built)], capture_output=True, check=True, timeout=300
                )
                built.rename(library)  # whole or not at all: others may be doing the same
        return CpuKernel(library)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        log.debug("no kernel: %s", error)
        return None


def _processor() -> str:
    """What the compiler's ``native`` depends on: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    except OSError:
        return platform.machine() + platform.processor()
