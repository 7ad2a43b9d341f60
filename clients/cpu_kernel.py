"""ACT-AdamW's step on a CPU in three passes over memory: moments and scores, the selection, the update.

The C++ below does what `clients.optimizers` does with PyTorch's operations, in the same order, each rounded once, so it
ends in the same bits; it is compiled when it is first needed, where there is a compiler, and kept in the user's cache.
It needs one vector beside the optimizer's state, of scores.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
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
#include <vector>

namespace {

constexpr int64_t CHUNK = 1 << 14;   // entries that one thread takes at a time
constexpr int64_t SAMPLE = 1 << 16;  // entries that bracket the threshold

struct Scalars { float beta1, rest1, beta2, rest2, unbias1, unbias2, eps, own, shared, decay, lr; };
struct Tensors { float* p; const float* g; float* m; float* v; const float* correction; int64_t n; Scalars k; };
struct Chunk { int64_t tensor, start, end, offset; };  // [start, end) of a tensor; offset of start in the scores

// Trusted are scores above the threshold, and those at it up to this index.
struct Trusted { float threshold; int64_t last; };

inline float direction(float m, float v, float correction, const Scalars& k, float& own) {
    own = (m * k.unbias1) / (std::sqrt(v * k.unbias2) + k.eps);
    return own * k.own + correction * k.shared;
}

void moments_and_scores(const Tensors& t, const Chunk& chunk, bool own_score, float* __restrict s) {
    const Scalars k = t.k;
    const float* __restrict g = t.g; const float* __restrict c = t.correction;
    float* __restrict m = t.m; float* __restrict v = t.v;
    for (int64_t i = chunk.start; i < chunk.end; i++) {
        m[i] = m[i] * k.beta1 + g[i] * k.rest1;
        v[i] = v[i] * k.beta2 + (g[i] * g[i]) * k.rest2;
        float own;
        const float u = direction(m[i], v[i], c[i], k, own);
        s[chunk.offset + i - chunk.start] = (own_score ? own : u) * g[i];
    }
}

template <typename Phi>
void update(const Tensors& t, const Chunk& chunk, const float* __restrict s, Phi phi) {
    const Scalars k = t.k;
    const float* __restrict m = t.m; const float* __restrict v = t.v; const float* __restrict c = t.correction;
    float* __restrict p = t.p;
    for (int64_t i = chunk.start; i < chunk.end; i++) {
        float own;
        const float u = direction(m[i], v[i], c[i], k, own);
        const int64_t j = chunk.offset + i - chunk.start;
        p[i] = p[i] * k.decay - (u * phi(s[j], j)) * k.lr;
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

uint32_t largest(std::vector<uint32_t>& keys, int64_t rank) {  // 1 is the largest
    std::nth_element(keys.begin(), keys.begin() + (rank - 1), keys.end(), std::greater<uint32_t>());
    return keys[rank - 1];
}

// The k-th largest of n scores, 0 < k < n, exactly: a sample brackets it, one pass counts what is above the bracket and
// gathers what is in it (Floyd and Rivest 1975), and the gathered decide.
Trusted select(const float* s, int64_t n, int64_t k, int threads) {
    const int64_t size = std::min(n, SAMPLE);
    std::vector<uint32_t> keys(size);
    for (int64_t i = 0; i < size; i++) keys[i] = key(s[i * n / size]);
    float low = -INFINITY, high = INFINITY;
    if (size < n) {
        const double share = double(k) / double(n);
        const int64_t middle = int64_t(share * size);
        const int64_t reach = int64_t(4 * std::sqrt(size * share * (1 - share))) + 4;
        if (middle - reach >= 1) high = value(largest(keys, middle - reach));
        if (middle + reach <= size) low = value(largest(keys, middle + reach));
    }
    int64_t above = 0;
    if (size < n) {
        for (bool again = true; again;) {
            again = false;
            above = 0;
            keys.clear();
            const int64_t chunks = (n + CHUNK - 1) / CHUNK;
            #pragma omp parallel num_threads(threads)
            {
                std::vector<uint32_t> mine;
                std::vector<float> gathered(CHUNK);
                int64_t count = 0;
                #pragma omp for schedule(static)
                for (int64_t chunk = 0; chunk < chunks; chunk++) {
                    const int64_t end = std::min(n, (chunk + 1) * CHUNK);
                    int64_t kept = 0;
                    for (int64_t i = chunk * CHUNK; i < end; i++) {
                        const float x = s[i];
                        count += !(x <= high);
                        gathered[kept] = x;
                        kept += (x >= low) & (x <= high);
                    }
                    for (int64_t i = 0; i < kept; i++) mine.push_back(key(gathered[i]));
                }
                #pragma omp critical
                {
                    above += count;
                    keys.insert(keys.end(), mine.begin(), mine.end());
                }
            }
            if ((k <= above || k > above + int64_t(keys.size())) && !(low == -INFINITY && high == INFINITY)) {
                low = -INFINITY;  // the sample was misleading
                high = INFINITY;
                again = true;
            }
        }
        if (k <= above) return {NAN, n};  // more NaN than places: nothing compares, nothing is trusted
    }
    const uint32_t threshold = largest(keys, k - above);
    int64_t places = k - above, ties = 0;
    for (uint32_t x : keys) { places -= x > threshold; ties += x == threshold; }
    const float limit = value(threshold);
    if (places == ties || limit != limit) return {limit, n};
    int64_t i = 0;
    for (; places > 0 && i < n; i++) places -= s[i] == limit;
    return {limit, i - 1};
}

}  // namespace

extern "C" void act_adamw_step(
    int64_t tensors, float** p, const float** g, float** m, float** v, const float** correction, const int64_t* n,
    const float* scalars, const int64_t* trusted, bool each_tensor, bool own_score, float alpha, float gamma, float* s,
    int threads
) {
    std::vector<Tensors> all(tensors);
    std::vector<Chunk> chunks;
    std::vector<int64_t> offsets(tensors + 1, 0);
    for (int64_t t = 0; t < tensors; t++) {
        all[t] = {p[t], g[t], m[t], v[t], correction[t], n[t], {}};
        std::memcpy(&all[t].k, scalars + 11 * t, sizeof(Scalars));
        offsets[t + 1] = offsets[t] + n[t];
        for (int64_t start = 0; start < n[t]; start += CHUNK)
            chunks.push_back({t, start, std::min(n[t], start + CHUNK), offsets[t] + start});
    }
    const int64_t count = chunks.size();

    #pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t c = 0; c < count; c++) moments_and_scores(all[chunks[c].tensor], chunks[c], own_score, s);

    const int64_t vectors = each_tensor ? tensors : 1;
    std::vector<Trusted> selected(vectors);
    for (int64_t t = 0; t < vectors; t++) {
        const int64_t size = each_tensor ? n[t] : offsets[tensors];
        if (trusted[t] == 0) selected[t] = {NAN, size};
        else if (trusted[t] == size) selected[t] = {-INFINITY, size};
        else selected[t] = select(s + (each_tensor ? offsets[t] : 0), size, trusted[t], threads);
    }

    #pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t c = 0; c < count; c++) {
        const Chunk& chunk = chunks[c];
        const Trusted& chosen = selected[each_tensor ? chunk.tensor : 0];
        const int64_t size = each_tensor ? n[chunk.tensor] : offsets[tensors];
        const int64_t last = chosen.last + (each_tensor ? offsets[chunk.tensor] : 0);
        const float limit = chosen.threshold;
        if (trusted[each_tensor ? chunk.tensor : 0] == size)
            update(all[chunk.tensor], chunk, s, [=](float, int64_t) { return alpha; });
        else if (chosen.last == size)
            update(all[chunk.tensor], chunk, s, [=](float score, int64_t) { return score >= limit ? alpha : gamma; });
        else
            update(all[chunk.tensor], chunk, s, [=](float score, int64_t i) {
                return (score > limit) | ((score == limit) & (i <= last)) ? alpha : gamma;
            });
    }
}
"""

SCALARS = 11  # of each tensor, as in the source
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-fopenmp",
    "-ffp-contract=off",  # each operation rounds, as PyTorch's do
    "-fno-math-errno", "-fno-trapping-math",  # so that the loops become vector instructions; no bit depends on it
)  # fmt: skip

log = logging.getLogger(__name__)


class CpuKernel:
    """The compiled step."""

    def __init__(self, path: Path) -> None:
        self._step = ctypes.CDLL(str(path)).act_adamw_step
        self._step.restype = None

    def step(
        self,
        tensors: Sequence[Sequence[Tensor]],
        scalars: Sequence[Sequence[float]],
        trusted: Sequence[int],
        each_tensor: bool,
        own_score: bool,
        alpha: float,
        gamma: float,
        scores: Tensor,
    ) -> None:
        """One step, in place.

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
        scores : Tensor
            Of shape (d,), is overwritten.
        """
        n = len(tensors)
        pointers = [(ctypes.c_void_p * n)(*(t.data_ptr() for t in each)) for each in zip(*tensors, strict=True)]
        sizes = (ctypes.c_int64 * n)(*(each[0].numel() for each in tensors))
        flat = (ctypes.c_float * (SCALARS * n))(*(x for of in scalars for x in of))
        self._step(
            ctypes.c_int64(n), *pointers, sizes, flat, (ctypes.c_int64 * len(trusted))(*trusted),
            ctypes.c_bool(each_tensor), ctypes.c_bool(own_score), ctypes.c_float(alpha), ctypes.c_float(gamma),
            ctypes.c_void_p(scores.data_ptr()), ctypes.c_int(torch.get_num_threads()),
        )  # fmt: skip


@cache
def cpu_kernel() -> CpuKernel | None:
    """The kernel of this process, compiled if this machine has not done so before; None where that can't be."""
    compiler = shlex.split(os.environ.get("CXX", "clang++" if platform.system() == "Darwin" else "g++"))
    try:
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
