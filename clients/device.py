"""The device that training and evaluation run on, set up so that a run repeats to the bit."""

import os

import torch


class UnavailableDevice(ValueError):
    """The device named is not on this machine; the message says which are."""


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
