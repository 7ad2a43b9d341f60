"""What the bits of a run depend on beside its settings."""

import os
import platform
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("flwr", "torch", "numpy")


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Python's version and those of the packages that train; of a package that is not installed, "none"."""
    return {"python": platform.python_version(), **{name: package_version(name) for name in PACKAGES}}


@lru_cache(maxsize=1)
def machine() -> str:
    """This machine in words: its processor, and its CUDA GPUs."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    words = [f"{(names or [platform.processor() or platform.machine()])[0]}, {os.cpu_count()} CPUs"]
    words += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(words)


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # Flower may run the app from its bundle alone
        return "none"
