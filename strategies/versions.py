"""What the bits of a run depend on beside its settings and the machine."""

import platform
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("flwr", "torch", "numpy")


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Python's version and those of the packages that train; of a package that is not installed, "none"."""
    return {"python": platform.python_version(), **{name: package_version(name) for name in PACKAGES}}


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # Flower may run the app from its bundle alone
        return "none"
