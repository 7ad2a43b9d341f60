"""Shared by all tests: settings made from the project's own defaults."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from fedact_flwr.settings import Settings, parse, read_defaults

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)


# Files whose tests wait for processes, for minutes: two at a time, one of each group, and what computes beside them.
WAITING = {"test_simulation": "a", "test_network_faults": "b", "test_supernodes": "b"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those come first, and test_deploy, which waits as well, when the rest is done."""
    items.sort(key=lambda item: (item.path.stem not in WAITING) + (item.path.stem == "test_deploy"))


class ByFile(LoadScopeScheduling):
    """As xdist's loadfile, but for the groups. (Its own loadgroup does nothing with pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return WAITING.get(Path(file).stem, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture
def make_settings(tmp_path: Any) -> Callable[..., Settings]:
    """Settings at their defaults, but for the overrides and an output folder of the test's own."""
    return lambda **overrides: parse(read_defaults() | {"output": str(tmp_path / "runs"), "device": "cpu"} | overrides)
