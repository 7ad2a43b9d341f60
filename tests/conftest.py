"""Shared by all tests: settings made from the project's own defaults."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedact_flwr.settings import Settings, parse, read_defaults

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)


# Files whose tests wait for processes, for minutes: two at a time, and what computes beside them.
WAITING = ("test_simulation", "test_network_faults")
WAITING_TOO = ("test_deploy", "test_flwr_run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those come first, and the others that wait when the rest is done."""
    items.sort(key=lambda item: (item.path.stem not in WAITING) + (item.path.stem in WAITING_TOO))


@pytest.fixture
def make_settings(tmp_path: Any) -> Callable[..., Settings]:
    """Settings at their defaults, but for the overrides and an output folder of the test's own."""
    return lambda **overrides: parse(read_defaults() | {"output": str(tmp_path / "runs"), "device": "cpu"} | overrides)
