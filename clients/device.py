"""The device that training and evaluation run on, set up so that a run repeats to the bit."""

import ctypes
import os
import platform
import shlex
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch.optim import Optimizer

from clients.settings import LocalSettings

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # mallopt(3)


class UnavailableDevice(ValueError):
    """The device named is not on this machine, or can't do what is asked of it; the message says what it can."""


def prepare_device(device: str, threads: int) -> torch.device:
    """Resolve ``device`` and set this process's threads and determinism.

    "auto" takes CUDA, then MPS, then the CPU. Raises `UnavailableDevice`.
    """
    torch.set_num_threads(threads)
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        device = next(name for name, there in available.items() if there)
    if not available[device]:
        there = ", ".join(f"'{name}'" for name, is_there in available.items() if is_there)
        raise UnavailableDevice(f"device = '{device}': not available here; allowed are 'auto', {there}")
    if device == "cuda":
        # cuBLAS repeats its results only with a fixed workspace, cuDNN only without its benchmark
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.device(device)


def keep_freed_memory() -> None:
    """Have this process use again what it freed, where it runs on glibc: a client's round is a few large arrays.

    By default each large array comes from the system and goes back to it, and the system clears its pages one by one:
    that takes longer than any pass over them.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
            libc.mallopt(parameter, value)


def seed_draws(device: torch.device, seed: int) -> None:
    """Seed what draws on the CPU and on ``device``.

    `torch.manual_seed` seeds every kind of device that there is: a millisecond, and a list that grows.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def spare_dynamo() -> None:
    """Keep torch's optimizers from importing torch._dynamo, which takes seconds, to tell it to leave them alone.

    For processes that compile nothing. It skips a wrapper around two methods that do no arithmetic.
    """
    for method in (Optimizer.add_param_group, Optimizer.zero_grad):
        function = getattr(method, "__wrapped__", None)  # of torch.compiler's wrapper, where this torch has it
        if function is not None and not hasattr(function, "__dynamo_disable"):
            function.__dynamo_disable = function


def require_compiler(device: str) -> None:
    """Raise `UnavailableDevice` where torch.compile lacks what it needs for ``device`` ("cpu", "cuda" or "mps")."""
    if device == "cuda" and find_spec("triton") is None:
        raise UnavailableDevice(
            "compile = true: on CUDA it needs the package triton, which is not here; allowed is false"
        )
    variable, usual = ("CC", "gcc") if device == "cuda" else ("CXX", "clang++" if sys.platform == "darwin" else "g++")
    compiler = shlex.split(os.environ.get(variable, usual))[0]  # it may be "ccache g++"
    if device != "mps" and shutil.which(compiler) is None:
        raise UnavailableDevice(
            f"compile = true: it needs a compiler, and {compiler!r} is not here; allowed is false, or the environment "
            f"variable {variable} set to one"
        )


class OutOfMemory(RuntimeError):
    """The device has too little memory for the settings; the message says which to lower."""


@contextmanager
def memory_errors_explained(settings: LocalSettings) -> Iterator[None]:
    """Turn what PyTorch and Python say when memory is short into `OutOfMemory`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        signs = ("can't allocate memory", "not enough memory", "out of memory")  # of a CPU it says so in words alone
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(s in str(error) for s in signs):
            raise
        size = settings.micro_batch_size or settings.batch_size
        gist = str(error).splitlines()[0] if str(error) else type(error).__name__
        traceback.clear_frames(error.__traceback__)  # they hold the round's tensors
    else:
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise OutOfMemory(
        f"out of memory with {size} examples at once ({gist}); set micro_batch_size below that, or lower batch_size"
    )
