"""The command, as people call it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from fedact_flwr.cli import app
from fedact_flwr.settings import method_settings, read_defaults, read_settings
from strategies import STRATEGIES
from tasks import TASKS

SMALL = ["clients=3", "clients_per_round=2", "rounds=2", "local_steps=2", "device=cpu", "rho=0.3"]


def fedact(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "250"})
    return result.exit_code, result.output


def sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def test_run_shows_rounds_and_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("rounds = 7\nlocal_steps = 1\nmethod = 'fedavg'\n")
    (tmp_path / "b.toml").write_text("rounds = 5\nname = 'mine'\n")
    code, output = fedact("run", "a.toml", "b.toml", "--engine", "inprocess", *sets(*SMALL, "method=fedadamw"))
    assert code == 0, output
    assert "fedadamw on digits: 2 of 3 clients a round, 2 rounds" in output
    assert "note:" not in output
    assert "round 2/2  accuracy 0." in output
    assert "round 0/2  accuracy" in output
    assert "round 1/2  accuracy" in output
    assert "0 s left" in output
    folder = tmp_path / "runs" / "mine"  # output is relative to where the user stands
    assert f"record: {folder}" in output
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3  # with round 0
    assert "[ROUND 2/2]" in (folder / "run.log").read_text()  # Flower's log


@pytest.mark.parametrize(
    ("command", "message"),
    [("run", "no nodes with data of their own; use flwr run"), ("split", "it alone knows which")],
)
def test_nodes_with_data_of_their_own_are_not_simulated(command: str, message: str, tmp_path: Path) -> None:
    own = sets("task=fashion_mnist", "split=nodes", "evaluate_every=0", f"output={tmp_path}")
    code, output = fedact(command, *own)
    assert code == 2
    assert 'split = "nodes": ' in output
    assert message in output


def test_paths_in_the_record_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        for label in "0123456789":
            (tmp_path / "images" / split / label).mkdir(parents=True)
            for i in range(4):
                Image.new("L", (28, 28)).save(tmp_path / "images" / split / label / f"{i}.png")
    (tmp_path / "small_cnn").mkdir()  # a model's name is no path
    own = ["task=fashion_mnist", "model=small_cnn", "data=images", "split=iid", "name=run"]
    code, output = fedact("run", "--engine", "inprocess", *sets(*SMALL, *own))
    assert code == 0, output
    settings = tomllib.loads((tmp_path / "runs" / "run" / "settings.toml").read_text())
    assert settings["data"] == str(tmp_path / "images")
    assert settings["model"] == "small_cnn"


def test_the_edge_of_stability_is_said_once(tmp_path: Path) -> None:
    code, output = fedact("run", "--engine", "inprocess", *sets(*SMALL[:-1], f"output={tmp_path}"))
    assert code == 0
    assert output.count("edge of stability") == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rho=2", "error: rho = 2: allowed is a number at least 0 and at most 1"),
        ("method=sgd", "error: method = 'sgd': allowed is one of fedavg"),
        ("clients_per_round=11", "error: clients_per_round = 11: allowed is 1 to 10"),
        ("min_samples=500", "error: min_samples = 500: "),
        ("mu=0.5", "error: mu = 0.5: fedact has no such setting; allowed is the default, 0.01"),
        ("local_optimizer=adamww", "error: local_optimizer = 'adamww': allowed is one of auto, sgd, adam, adamw, "),
        ("local_optimizer=5", "error: local_optimizer = 5: allowed is one of auto, sgd"),
        ("nonsense", "error: --set nonsense: expected key=value"),
        ("output=/proc/nowhere", "error: output = '/proc/nowhere': "),
        ("output=~nobody-of-that-name/x", "error: output = '~nobody-of-that-name/x': "),
        ("threads=1000", "error: threads = 1000: allowed is 1 to "),
        ("client_gpus=99.0", "error: client_gpus = 99.0: allowed is 0"),
        ("seed=-1", "error: seed = -1: allowed is a whole number at least 0 and below "),
    ],
)
def test_wrong_settings_end_in_one_line_and_exit_code_2(setting: str, message: str, tmp_path: Path) -> None:
    code, output = fedact("run", *sets(f"output={tmp_path}", setting))
    assert code == 2
    assert output.startswith(message)
    assert output.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_compile_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, output = fedact("run", *sets(f"output={tmp_path}", "compile=true", "device=cpu"))
    assert code == 2
    assert output.startswith("error: compile = true: it needs a compiler, and 'no-such-compiler' is not here; ")
    assert output.count("\n") == 1


def test_settings_are_a_file_that_repeats_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("method = 'fedprox'\nrounds = 3\n")
    code, output = fedact("settings", str(tmp_path / "a.toml"), "--set", "mu=0.3")
    assert code == 0
    (tmp_path / "b.toml").write_text(output)
    settings = read_settings([tmp_path / "b.toml"], [])
    assert settings == read_settings([tmp_path / "a.toml"], ["mu=0.3"])
    assert (settings.method, settings.mu, settings.rounds) == ("fedprox", 0.3, 3)
    assert set(tomllib.loads(output)) == set(read_defaults())
    code, output = fedact("settings", "--set", "mu=0.3")
    assert (code, output.count("\n")) == (2, 1)
    assert output.startswith("error: mu = 0.3: fedact has no such setting")


def test_the_split_is_described_and_drawn(tmp_path: Path) -> None:
    settings = sets("clients=4", "clients_per_round=4", "split=by_class", "classes_per_client=7")
    code, output = fedact("split", *settings, "--picture", str(tmp_path / "split.svg"))
    assert code == 0, output
    assert output.startswith("digits, by_class, 4 clients, seed 42\nexamples of a client: ")
    assert "classes of a client: 7 to 7, median 7" in output
    assert "</svg>" in (tmp_path / "split.svg").read_text()
    for picture, reason in (
        (tmp_path / "x.nothing", "Format 'nothing' is not supported"),
        (tmp_path / "x" / "y.png", "No such file"),
    ):
        code, output = fedact("split", "--picture", str(picture))
        assert code == 2
        assert output.startswith(f"error: --picture {picture}: ")
        assert reason in output
    code, output = fedact("split", "--set", "min_samples=500")
    assert code == 2
    assert output.startswith("error: min_samples = 500: ")


def test_an_unknown_key_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "conf.toml").write_text("rouns = 3\n")
    code, output = fedact("run", str(tmp_path / "conf.toml"))
    assert code == 2
    assert "error: rouns = 3: no such setting (did you mean rounds?)" in output


def test_a_failed_run_exits_1_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.digits.Digits.loss", lambda *_: (_ for _ in ()).throw(RuntimeError("no more memory")))
    code, output = fedact("run", "--engine", "inprocess", *sets(*SMALL, f"output={tmp_path}", "max_failed_rounds=1"))
    assert code == 1
    assert "error: the run failed: RunFailed: round 1: 0 good replies" in output
    assert "no more memory" in output


def test_a_client_that_fails_is_shown_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One image of another size: found when its client decodes it. The others train."""
    for i in range(60):
        (tmp_path / "data" / "train" / str(i % 10)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "test" / str(i % 2)).mkdir(parents=True, exist_ok=True)
        image = Image.new("L", (28, 27 if i == 7 else 28), color=200 * (i % 2))
        image.save(tmp_path / "data" / "train" / str(i % 2) / f"{i:02}.png")
        Image.new("L", (28, 28)).save(tmp_path / "data" / "test" / str(i % 2) / "0.png")
    code, output = fedact(
        "run", "--engine", "inprocess", *sets(*SMALL, f"output={tmp_path}", "clients_per_round=3", "rounds=1"),
        *sets("task=fashion_mnist", "model=small_cnn", f"data={tmp_path / 'data'}", "split=iid"),
    )  # fmt: skip
    assert code == 0, output
    assert re.search(
        r"round 1, partition \d, node \d: the client failed: .*07\.png has 28 x 27 pixels, not 28 x 28", output
    )
    assert "1 failed" in output


def test_a_run_in_which_no_round_was_good_has_failed(tmp_path: Path) -> None:
    code, output = fedact("run", "--engine", "inprocess", *sets(*SMALL, f"output={tmp_path}", "lr=1e30"))
    assert code == 1
    assert "error: the run failed: RunFailed: round 2: 0 good replies" in output
    assert "NonFinite: the loss of step" in output


def test_nobody_listens(tmp_path: Path) -> None:
    """As in `fedact run | head -1`: the reader ends, and the run does not."""
    command = [sys.executable, "-m", "fedact_flwr", "run", "--engine", "inprocess"]
    process = subprocess.Popen(
        [*command, *sets(*SMALL, "rounds=20", "name=run", f"output={tmp_path}")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline().startswith("fedact on digits")
    process.stdout.close()
    assert process.wait(120) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"


def test_ctrl_c_before_the_start(tmp_path: Path) -> None:
    """While Python still imports: no traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedact_flwr", "run", *sets(f"output={tmp_path}")], stderr=subprocess.PIPE, text=True
    )
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error == "error: interrupted before the start\n"


def test_ctrl_c_ends_the_run_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedact_flwr", "run", "--engine", "inprocess"]
    process = subprocess.Popen(
        [*command, *sets("rounds=1000", "name=run", f"output={tmp_path}", "device=cpu")],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=os.environ | {"COLUMNS": "250"},
    )  # fmt: skip
    rounds = tmp_path / "run" / "rounds.jsonl"
    deadline = time.monotonic() + 60
    while not (rounds.exists() and rounds.read_text().count("\n") > 1) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error.startswith("error: interrupted after")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


def test_methods_and_tasks_are_listed() -> None:
    code, output = fedact("methods")
    assert code == 0
    parts = output.split("\n  clients")
    assert len(parts) == 1 + len(STRATEGIES)
    for name, head, part in zip(STRATEGIES, parts, parts[1:], strict=False):
        assert head.splitlines()[-1].startswith(f"{name}  ")
        for key in ("server_lr", *method_settings(name)):
            assert f"{key}=" in part.split("settings")[1].splitlines()[0]
    assert "correction" in output
    assert "model, correction, second_moment: 12 bytes per parameter, 8 with tensor or block means" in output
    assert "mu=0.01" in output
    assert "arXiv:1812.06127" in output
    code, output = fedact("tasks")
    assert code == 0
    assert all(name in output for name in TASKS)


def test_help_comes_at_once() -> None:
    """Neither PyTorch nor Flower nor NumPy is imported for it: they take seconds."""
    slow = "{'torch', 'flwr', 'numpy', 'pydantic'}"
    code = f"import sys, fedact_flwr.cli; print(sorted({slow} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
