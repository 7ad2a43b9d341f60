"""A step of ACT-AdamW beside a step of PyTorch's AdamW.

    python benchmarks/optimizer_step.py [--threads 2] [--device cpu] [--repeats 21] [--sizes 1 5.4 25 100] [--zeros 0]

The shapes are those of a Vision Transformer of 12 blocks, so of 149 tensors, with so many million parameters. The
optimizers take turns, and the medians count; the memory is what a step takes beside parameters, gradients and state.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from clients.cpu_kernel import cpu_kernel
from clients.optimizers import ActAdamW

BLOCKS = 12
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], list[Tensor]], Optimizer]] = {
    "AdamW, fused": lambda x, c: AdamW(x, 1e-3, fused=True),
    "AdamW, foreach": lambda x, c: AdamW(x, 1e-3, foreach=True),
    "ACT-AdamW": lambda x, c: act_adamw(x, c, compiled=True),
    "ACT-AdamW, plain": lambda x, c: act_adamw(x, c, compiled=False),
}


def act_adamw(x: list[nn.Parameter], correction: list[Tensor], compiled: bool) -> ActAdamW:
    optimizer = ActAdamW(x, 1e-3, rho=0.4, tau=0.5, correction=correction, second_moment=[c * c for c in correction])
    optimizer.kernel = "fitting" if compiled else None
    return optimizer


def shapes(millions: float) -> list[tuple[int, ...]]:
    """Of 12 blocks of a width that gives about so many parameters, and five tensors around them."""
    d = round((millions * 1e6 / (12 * BLOCKS)) ** 0.5)
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(1, d), (16, d), *(BLOCKS * block), (d,), (d,), (10, d)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 5.4, 25, 100], metavar="MILLIONS")
    parser.add_argument("--zeros", type=float, default=0.0, help="share of gradient entries that are 0")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {arguments.threads} threads"
    print(f"{where}, torch {torch.__version__}; ACT-AdamW goes the way {path_on(arguments.device)}\n")
    print("| parameters | optimizer | ms a step | times fused AdamW | extra vectors |\n|---|---|---|---|---|")
    for millions in arguments.sizes:
        measure(millions, arguments.device, arguments.repeats, arguments.zeros)


def path_on(device: str) -> str:
    x = nn.Parameter(torch.zeros(3, device=device))
    x.grad = torch.ones_like(x)
    optimizer = act_adamw([x], [x.detach()], compiled=True)
    optimizer.step()
    return optimizer.path


def measure(millions: float, device: str, repeats: int, zeros: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in shapes(millions)]
    d = sum(t.numel() for t in start)
    seconds: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    extra: dict[str, float] = {}
    x = [nn.Parameter(t.to(device)) for t in start]
    for p in x:
        p.grad = torch.randn(p.shape, generator=generator)
        p.grad = p.grad.mul_(torch.rand(p.shape, generator=generator) >= zeros).to(device)
    correction = [torch.randn(t.shape, generator=generator).mul_(1e-2).to(device) for t in start]
    optimizers = {name: make(x, correction) for name, make in OPTIMIZERS.items()}
    for i in range(repeats + 2):
        for name, optimizer in optimizers.items():
            synchronize(device)
            began = time.perf_counter()
            optimizer.step()
            synchronize(device)
            if i >= 2:  # state is made in the first step, and memory is touched for the first time
                seconds[name].append(time.perf_counter() - began)
    for name, optimizer in optimizers.items():
        extra[name] = peak_of(optimizer, device) / (4 * d)
    fused = statistics.median(seconds["AdamW, fused"])
    for name, times in seconds.items():
        ms = statistics.median(times)
        print(f"| {d / 1e6:.1f} M | {name} | {1e3 * ms:.3g} | {ms / fused:.1f} | {extra[name]:.1f} |", flush=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_of(optimizer: Optimizer, device: str) -> float:
    """The most bytes that a step takes beside what is there before it, and the vector that ACT-AdamW keeps."""
    kernel = cpu_kernel()
    kept = kernel.scratch_bytes if kernel and isinstance(optimizer, ActAdamW) and optimizer.kernel else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        return kept + torch.cuda.max_memory_allocated() - before
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kilobytes(status, "VmRSS")
    optimizer.step()
    return kept + 1024 * (kilobytes(status, "VmHWM") - before)


def kilobytes(status: Path, key: str) -> int:
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


if __name__ == "__main__":
    main()
