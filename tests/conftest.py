"""Shared by all tests: settings made from the project's own defaults."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedact_flwr.settings import Settings, parse, read_defaults

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)


WAITING = (
    "test_network_faults",
    "test_supernodes",
    "test_deploy",
    "test_simulation",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for processes, for minutes, comes first, so that the other workers have something to do beside it."""
    items.sort(key=lambda item: item.path.stem not in WAITING)


@pytest.fixture
def make_settings(tmp_path: Any) -> Callable[..., Settings]:
    """Settings at their defaults, but for the overrides and an output folder of the test's own."""
    return lambda **overrides: parse(read_defaults() | {"output": str(tmp_path / "runs"), "device": "cpu"} | overrides)
