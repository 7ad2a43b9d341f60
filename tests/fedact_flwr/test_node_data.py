"""split = "nodes": each node trains on data of its own, and the server sees none of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from flwr.app.user_config import UserConfig
from PIL import Image

from fedact_flwr import server_app
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import InProcessGrid
from fedact_flwr.settings import Settings, dump
from strategies import RunFailed

MakeSettings = Callable[..., Settings]
SIZES = (30, 45)


def write_images(path: Path, n: int) -> str:
    """A `save_to_disk` data set of one split: n dark images of class 0 and bright ones of class 1, in turn."""
    images = [Image.fromarray(np.full((28, 28), 40 + 150 * (i % 2) + i, np.uint8)) for i in range(n)]
    Dataset.from_dict({"image": images, "label": [i % 2 for i in range(n)]}).save_to_disk(str(path))
    return str(path)


def settings_of(make_settings: MakeSettings, **own: Any) -> Settings:
    few = {
        "task": "fashion_mnist", "model": "small_cnn", "augment": False, "split": "nodes", "clients": 2,
        "clients_per_round": 2, "rounds": 3, "local_steps": 4, "min_replies": 1, "node_timeout": 0.0, "name": "run",
        "evaluate_every": 0, "data": "/nowhere/on/the/server",
    }  # fmt: skip
    return make_settings(**(few | own))


def run(settings: Settings, *nodes: dict[str, Any]) -> list[dict[str, Any]]:
    """Over nodes with these node configs; the rounds that trained."""
    grid = InProcessGrid(client_app, len(nodes), dump(settings))
    for context, config in zip(grid._contexts.values(), nodes, strict=True):
        context.node_config = UserConfig(config)
    server_app.run(settings, grid)
    lines = (Path(settings.output) / "run" / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    """Two node configs."""
    return [{"partition-id": i, "data": write_images(tmp_path / f"node{i}", n)} for i, n in enumerate(SIZES)]


def test_each_node_trains_on_its_own_and_the_server_needs_none(
    make_settings: MakeSettings, nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = settings_of(make_settings)
    rounds = run(settings, *nodes)
    assert [line["num_examples"] for line in rounds] == [sum(SIZES)] * 3
    assert rounds[-1]["train_loss"] < rounds[0]["train_loss"]
    assert not {"accuracy", "loss"} & rounds[-1].keys()
    folder = Path(settings.output) / "run"
    assert not (folder / "clients.json").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["final"]) == ("completed", 3, None)


def test_the_server_evaluates_on_its_own(
    make_settings: MakeSettings, nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    held_out = tmp_path / "server" / "test"
    for y in range(10):
        (tmp_path / "server" / "train" / str(y)).mkdir(parents=True)  # it has none to train on
    for y in (0, 1):
        (held_out / str(y)).mkdir(parents=True)
        for i in range(5):
            Image.new("L", (28, 28), 60 + 150 * y + i).save(held_out / str(y) / f"{i}.png")
    own = {"evaluate_every": 3, "data": str(tmp_path / "server"), "rounds": 6, "local_steps": 10, "lr": 0.01}
    rounds = run(settings_of(make_settings, **own), *nodes)
    assert ["accuracy" in line for line in rounds] == [False, False, True] * 2
    assert rounds[-1]["accuracy"] == 1.0


def test_each_node_measures_on_its_own(make_settings: MakeSettings, nodes: list[dict[str, Any]]) -> None:
    """Where one fails, the other counts: the server has no data to measure with."""
    own = {"holdout": 0.2, "personal_every": 3, "method": "ditto"}
    rounds = run(settings_of(make_settings, **own), *nodes)
    assert ["personal_accuracy" in line for line in rounds] == [False, False, True]
    assert rounds[-1]["personal_failures"] == 0
    nodes[1]["data"] = "/nowhere"
    rounds = run(settings_of(make_settings, **own, output=f"{make_settings().output}-2"), *nodes)
    assert rounds[-1]["personal_failures"] == 1
    assert "personal_accuracy" in rounds[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, 'split = "nodes": the node config has no data; start it with "data='),
        ({"data": "/nowhere"}, "data = '/nowhere': it is not on this node"),
        ({"partition-id": None}, "the node config has no partition-id"),
        ({"device": "gpu"}, "device = 'gpu': allowed is one of 'auto', 'cpu', 'cuda', 'mps'"),
    ],
)
def test_a_node_that_can_not_take_part_is_named_and_the_other_goes_on(
    change: dict[str, Any], message: str, make_settings: MakeSettings, nodes: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    nodes[1] = {key: value for key, value in (nodes[1] | change).items() if value is not None}
    rounds = run(settings_of(make_settings), *nodes)
    assert [line["num_examples"] for line in rounds] == [SIZES[0]] * 3
    assert "does not say what it hosts and is left out: " in caplog.text
    assert message in caplog.text


@pytest.mark.parametrize(
    ("own", "content", "message"),
    [
        ({}, None, "other holds no format known here"),
        ({"min_samples": 20}, 12, "12 examples, min_samples = 20"),
    ],
)
def test_data_that_does_not_do_fails_its_client_alone(
    own: dict[str, Any], content: int | None, message: str, make_settings: MakeSettings, nodes: list[dict[str, Any]],
    tmp_path: Path,
) -> None:  # fmt: skip
    nodes[1]["data"] = str(tmp_path / "other")
    if content is None:
        (tmp_path / "other").mkdir()
    else:
        write_images(tmp_path / "other", content)
    rounds = run(settings_of(make_settings, **own), *nodes)
    assert [line["failures"] for line in rounds] == [1] * 3
    assert all(message in line["failed"][0] for line in rounds)


def test_a_node_without_the_tasks_packages_is_left_out(
    make_settings: MakeSettings, nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(make_settings)
    monkeypatch.setattr("fedact_flwr.settings.find_spec", lambda package: None if package == "torchvision" else 1)
    monkeypatch.setattr(server_app, "check_task", lambda *_, **__: None)  # the server has them
    with pytest.raises(RunFailed, match="it needs packages that are not installed, torchvision"):
        run(settings, *nodes)
