"""Shared by all tests: settings made from the project's own defaults."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedact_flwr.settings import Settings, parse, read_defaults

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)


# Tests that wait for processes, for minutes: two at a time, one of each group, and what computes beside them.
WAITING = {"test_simulation": "a", "test_deploy": "a", "test_network_faults": "b", "test_supernodes": "b"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in WAITING)  # they come first
    for item in items:
        if group := WAITING.get(item.path.stem):
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def make_settings(tmp_path: Any) -> Callable[..., Settings]:
    """Settings at their defaults, but for the overrides and an output folder of the test's own."""
    return lambda **overrides: parse(read_defaults() | {"output": str(tmp_path / "runs"), "device": "cpu"} | overrides)
