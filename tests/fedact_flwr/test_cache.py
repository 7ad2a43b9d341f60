"""What a node keeps on disk between messages, and what a fresh client process must not wait for."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedact_flwr.cache import ExampleCache
from fedact_flwr.settings import PROJECT, Settings, dump

MakeSettings = Callable[..., Settings]
INDICES = np.array([0, 2])


@pytest.fixture
def settings(make_settings: MakeSettings, tmp_path: Path) -> Settings:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("one two")
    return make_settings(task="pretrain_c4", data=str(tmp_path / "data"), model="llama_5m", split="iid")


def made(folder: Path | None, settings: Settings) -> bool:
    """Whether the examples were made, and not read."""
    calls = []

    def make() -> dict[str, torch.Tensor]:
        calls.append(1)
        return {"ids": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)}

    examples = ExampleCache(folder, settings).examples(INDICES, make)
    assert examples["ids"].tolist() == [[1, 2], [3, 4]]
    assert examples["ids"].dtype == torch.int32
    return bool(calls)


def test_what_was_made_is_read(settings: Settings, tmp_path: Path) -> None:
    assert made(tmp_path / "cache", settings)
    assert not made(tmp_path / "cache", settings)
    assert not made(tmp_path / "cache", settings.model_copy(update={"lr": 1.0, "seed": 7}))
    cache = ExampleCache(tmp_path / "cache", settings)
    assert cache.labels(lambda: np.array([3, 1])).tolist() == [3, 1]
    assert cache.labels(lambda: np.array([])).tolist() == [3, 1]


def test_what_could_be_other_is_made_anew(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(tmp_path / "cache", settings)
    assert made(tmp_path / "cache", settings.model_copy(update={"max_length": 77}))
    other = ExampleCache(tmp_path / "cache", settings).examples(INDICES[:1], lambda: {"ids": torch.zeros(1)})
    assert other["ids"].tolist() == [0]
    (tmp_path / "data" / "train.txt").write_text("one too")  # of the same size
    assert made(tmp_path / "cache", settings)
    (tmp_path / "data" / "train.txt").rename(tmp_path / "data" / "test.txt")
    assert made(tmp_path / "cache", settings)
    assert not made(tmp_path / "cache", settings)
    monkeypatch.setattr("fedact_flwr.cache.version", lambda package: "0")
    assert made(tmp_path / "cache", settings)


def test_what_a_linked_folder_holds_counts(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "more.txt").write_text("three")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    assert made(tmp_path / "cache", settings)
    (tmp_path / "elsewhere" / "more.txt").write_text("seven")
    assert made(tmp_path / "cache", settings)


def test_a_damaged_file_is_made_anew(settings: Settings, tmp_path: Path) -> None:
    assert made(tmp_path / "cache", settings)
    (file,) = (tmp_path / "cache").rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-3])
    assert made(tmp_path / "cache", settings)
    assert not made(tmp_path / "cache", settings)


def test_without_a_folder_or_from_the_hub_nothing_is_kept(settings: Settings, tmp_path: Path) -> None:
    hub = settings.model_copy(update={"data": "auto"})
    for folder, own in ((None, settings), (tmp_path / "cache", hub)):
        assert made(folder, own)
        assert made(folder, own)
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_can_not_be_written(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match=r"cache = '.*cache': .*; allowed is a folder to write to"):
        made(tmp_path / "cache", settings)


CHILD = """
import json, sys
from fedact_flwr import client_app
from fedact_flwr.settings import parse
from clients.client import exchanged_state
from strategies import wire
client = client_app._workplace(parse(json.loads(sys.argv[1])), sys.argv[2]).client(0)
state = {name: t.detach().numpy().copy() for name, t in exchanged_state(client.model).items()}
zeros = {name: 0 * a for name, a in state.items()}
config = {wire.PARTITION: 0, wire.SEED: 1, wire.LR: 1e-3, wire.STEPS_DONE: 0, wire.ROUND: 1, wire.FOLDED: 0,
          wire.STATE_FOLDER: sys.argv[2]}
returned, _, _ = client.fit({wire.MODEL: state, wire.CORRECTION: zeros, wire.SECOND_MOMENT: zeros}, config)
heavy = [name for name in ("sklearn", "torch._dynamo", "transformers", "datasets") if name in sys.modules]
print(json.dumps([heavy, float(sum(abs(d).sum() for d in returned[wire.DELTA].values()))]))
"""


def test_a_fresh_process_trains_without_what_it_does_not_need(make_settings: MakeSettings, tmp_path: Path) -> None:
    """Neither scikit-learn for data that is cached, nor the compiler for an optimizer; and the delta is the same."""
    config = json.dumps(dump(make_settings(clients=2, clients_per_round=2, local_steps=2)))

    def train() -> Any:
        command = [sys.executable, "-c", CHILD, config, str(tmp_path / "cache")]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=PROJECT).stdout)

    (first, delta), (second, again) = train(), train()
    assert (first, second) == (["sklearn"], [])
    assert delta == again > 0
