"""What a checkpoint holds, what is refused, and which one is used."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedact_flwr import checkpoint as module
from fedact_flwr.checkpoint import ARRAYS_FILE, JSON_FILE, BadCheckpoint, Checkpoint, Checkpoints, read, write
from fedact_flwr.cli import app as cli
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import run_inprocess
from fedact_flwr.server_app import app as server_app
from fedact_flwr.settings import Settings, dump, parse, read_defaults
from tasks import TASKS

MakeSettings = Callable[..., Settings]
STATE = {
    "model": {"w": np.array([1, 2.5, -3], np.float32), "count": np.array(7), "scale": np.array(0.1, np.float32)},
    "state": {"correction": {"w": np.array([1e-30, np.nextafter(1, 2, dtype=np.float32), 0], np.float32)}},
    "steps_done": 0.1 + 0.2,
    "folded": {3: 1, 0: 2},
    "failed_in_a_row": 1,
    "state_folder": "run/clients-1",
    "norms": {"delta": [1.5]},
}
SMALL = ["clients=4", "clients_per_round=3", "local_steps=3", "device=cpu", "method=scaffold", "checkpoint_every=2"]
RUN = ["run", "--engine", "inprocess"]


def sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def checkpoint_of(settings: Settings, server_round: int = 2, accuracy: float | None = None) -> Checkpoint:
    rounds = [{"round": r, "seconds": 1.0 * r} for r in range(server_round + 1)]
    if accuracy is not None:
        rounds[-1]["accuracy"] = accuracy
    return Checkpoint(STATE | {"rounds_done": server_round}, rounds, dump(settings))


def test_it_holds_every_bit(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings()
    write(tmp_path / "round-2", checkpoint_of(settings))
    found = read(tmp_path / "round-2", settings)
    assert found.round == 2
    assert found.rounds == checkpoint_of(settings).rounds
    for got, wanted in ((found.state["model"], STATE["model"]), (found.state["state"], STATE["state"])):
        assert got.keys() == wanted.keys()
    for got, wanted in (
        (found.state["model"], STATE["model"]),
        (found.state["state"]["correction"], STATE["state"]["correction"]),
    ):
        assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in got.items()} == {
            name: (a.dtype, a.shape, a.tobytes()) for name, a in wanted.items()
        }
    assert found.state["steps_done"] == 0.1 + 0.2
    assert {int(partition): r for partition, r in found.state["folded"].items()} == {3: 1, 0: 2}
    assert sorted(p.name for p in (tmp_path / "round-2").iterdir()) == [ARRAYS_FILE, JSON_FILE]


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def with_hashes(folder: Path) -> None:
    """The hashes of the files as they are now, as somebody would write them who knows how."""
    outer = json.loads((folder / JSON_FILE).read_text())
    body = json.loads(outer["body"]) | {ARRAYS_FILE: module._hash_of_file(folder / ARRAYS_FILE)}
    text = json.dumps(body)
    (folder / JSON_FILE).write_text(json.dumps(outer | {"body": text, "sha256": module._hash(text)}))


class Bomb:
    def __reduce__(self) -> Any:
        return os._exit, (3,)


def put_pickle(folder: Path) -> None:
    (folder / ARRAYS_FILE).write_bytes(pickle.dumps(Bomb()))
    with_hashes(folder)


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated arrays": (lambda f: rewrite(f / ARRAYS_FILE, lambda b: b[:-4]), "another hash"),
    "one bit": (lambda f: rewrite(f / ARRAYS_FILE, lambda b: b[:-1] + bytes([b[-1] ^ 1])), "another hash"),
    "truncated json": (lambda f: rewrite(f / JSON_FILE, lambda b: b[: len(b) // 2]), "JSONDecodeError"),
    "tampered json": (lambda f: rewrite(f / JSON_FILE, lambda b: b.replace(b"clients-1", b"clients-2")), "hash says"),
    "other format": (lambda f: rewrite(f / JSON_FILE, lambda b: b.replace(b"checkpoint 1", b"checkpoint 9")), "format"),
    "no arrays": (lambda f: (f / ARRAYS_FILE).unlink(), "No such file"),
    "no json": (lambda f: (f / JSON_FILE).unlink(), "No such file"),
    "json of another kind": (lambda f: rewrite(f / JSON_FILE, lambda b: b"[1]"), "TypeError"),
    "pickle": (put_pickle, ARRAYS_FILE),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_one_is_refused_and_the_one_before_is_used(
    case: str, make_settings: MakeSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings()
    spoil, reason = BAD[case]
    for server_round in (1, 2):
        write(tmp_path / "checkpoints" / f"round-{server_round}", checkpoint_of(settings, server_round))
    spoil(tmp_path / "checkpoints" / "round-2")
    with pytest.raises(BadCheckpoint, match=reason):
        read(tmp_path / "checkpoints" / "round-2", settings)
    found = Checkpoints(tmp_path, settings, TASKS["digits"]).newest()
    assert found is not None
    assert found.round == 1
    assert "round-2 is not used" in caplog.text


def test_no_round_follows_the_last_checkpoint(make_settings: MakeSettings, tmp_path: Path) -> None:
    """A signal's handler writes it while another thread goes on: its clients would forget what the checkpoint needs."""
    settings = make_settings(checkpoint_every=10)
    checkpoints = Checkpoints(tmp_path, settings, TASKS["digits"])
    checkpoints.after_round(checkpoint_of(settings, 3))
    checkpoints.close()
    with pytest.raises(SystemExit):
        checkpoints.after_round(checkpoint_of(settings, 4))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["round-3"]


def test_one_of_another_run_is_foreign(make_settings: MakeSettings, tmp_path: Path) -> None:
    write(tmp_path / "round-2", checkpoint_of(make_settings(seed=7)))
    with pytest.raises(BadCheckpoint, match="other settings"):
        read(tmp_path / "round-2", make_settings())
    assert read(tmp_path / "round-2", make_settings(seed=7, rounds=99, name="other")).round == 2


def test_the_newest_and_the_best_stay(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(checkpoint_every=1, checkpoints_kept=2)
    checkpoints = Checkpoints(tmp_path, settings, TASKS["digits"])
    for server_round, accuracy in enumerate((0.3, 0.9, 0.2, 0.5, 0.8), start=1):
        assert checkpoints.after_round(checkpoint_of(settings, server_round, accuracy))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["round-2", "round-4", "round-5"]
    assert checkpoints.pinned() == [{3: 1, 0: 2}] * 3


def test_between_two_the_last_round_is_written_when_the_run_ends(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(checkpoint_every=3)
    checkpoints = Checkpoints(tmp_path, settings, TASKS["digits"])
    assert [checkpoints.after_round(checkpoint_of(settings, r)) for r in (1, 2, 3, 4)] == [False, False, True, False]
    checkpoints.close()
    checkpoints.close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["round-3", "round-4"]


@pytest.mark.parametrize("failing", ["os.fsync", "sync_folder", "save_file"])
def test_a_disk_that_is_full_costs_a_checkpoint_and_not_the_run(
    failing: str, make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    settings = make_settings(checkpoint_every=1)
    checkpoints = Checkpoints(tmp_path, settings, TASKS["digits"])
    assert checkpoints.after_round(checkpoint_of(settings, 1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module if "." not in failing else module.os, failing.removeprefix("os."), full)
    assert not checkpoints.after_round(checkpoint_of(settings, 2))
    assert "round 2: no checkpoint could be written: [Errno 28] No space left on device; the run goes on" in caplog.text
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["round-1"]
    monkeypatch.undo()
    assert checkpoints.after_round(checkpoint_of(settings, 3))


SMALL_FILES = """
import resource, signal, sys
from fedact_flwr.__main__ import main

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
main()
"""


def test_a_disk_that_is_full_at_the_end_fails_the_run(tmp_path: Path) -> None:
    """No file may be longer than 100 kB, so the rounds can be written, and neither checkpoints nor the model."""
    arguments = [*RUN, *sets("rounds=2", "checkpoint_every=1", "clients=2", "clients_per_round=2", "local_steps=1")]
    arguments += sets(f"output={tmp_path}", "name=run", "device=cpu")
    ended = subprocess.run([sys.executable, "-c", SMALL_FILES, *arguments], timeout=120, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "error: the run failed: " in ended.stderr
    assert "File too large" in ended.stderr
    record = tmp_path / "run"
    assert [json.loads(line)["round"] for line in (record / "rounds.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert "round 1: no checkpoint could be written" in (record / "run.log").read_text()
    assert list((record / "checkpoints").iterdir()) == []
    assert json.loads((record / "summary.json").read_text())["status"] == "failed"


# ---- runs


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, [*RUN, *arguments])


def model(record: Path) -> bytes:
    return (record / "model.safetensors").read_bytes()


KILLED = """
import os, signal, sys
from fedact_flwr.__main__ import main
from {module} import {owner}

original = {owner}.{method}
def {method}(self, *arguments):
    if {moment}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, *arguments)
{owner}.{method} = {method}
main()
"""
MOMENTS = {
    "in the middle of a round": KILLED.format(
        module="clients.client", owner="FedClient", method="fit",
        moment="(arguments[1]['round'], arguments[1]['partition']) >= (4, 1)",
    ),
    "while it writes a checkpoint": KILLED.format(
        module="fedact_flwr.checkpoint", owner="Path", method="rename", moment="arguments[0].name == 'round-4'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(moment: str, tmp_path: Path) -> None:
    """Of round 4's checkpoint all is there but its name, or nothing; the run goes on from round 2."""
    settings = sets(*SMALL, "rounds=5", f"output={tmp_path}")
    assert run(*settings, *sets("name=straight")).exit_code == 0
    arguments = [*RUN, *settings, *sets("name=killed")]
    killed = subprocess.run([sys.executable, "-c", MOMENTS[moment], *arguments], timeout=120, stdout=subprocess.DEVNULL)
    assert killed.returncode == -signal.SIGKILL
    record = tmp_path / "killed"
    left = sorted(path.name.partition("-4")[0] for path in (record / "checkpoints").iterdir())
    assert left == [*([".unfinished-round"] if "writes" in moment else []), "round-2"]
    result = run("--resume", str(record))
    assert result.exit_code == 0, result.output
    assert "goes on after round 2" in result.output
    assert "round 2/5" not in result.output
    assert "round 3/5" in result.output
    assert model(record) == model(tmp_path / "straight")
    assert sorted(path.name for path in (record / "checkpoints").iterdir())[-2:] == ["round-4", "round-5"]
    assert not list((record / "checkpoints").glob(".unfinished*"))
    assert [json.loads(line)["round"] for line in (record / "rounds.jsonl").read_text().splitlines()] == list(range(6))
    assert json.loads((record / "summary.json").read_text())["status"] == "completed"


def test_a_record_that_was_copied_and_renamed_goes_on_by_itself(tmp_path: Path) -> None:
    """More rounds than it had; the one that it was copied from stays as it is."""
    settings = sets(*SMALL, "lr_schedule=constant", f"output={tmp_path}")
    assert run(*settings, *sets("rounds=4", "name=long")).exit_code == 0
    assert run(*settings, *sets("rounds=2", "name=short")).exit_code == 0
    shutil.copytree(tmp_path / "short", tmp_path / "elsewhere" / "copy")
    before = {path: path.read_bytes() for path in (tmp_path / "short").rglob("*") if path.is_file()}
    result = run("--resume", str(tmp_path / "elsewhere" / "copy"), *sets("rounds=4"))
    assert result.exit_code == 0, result.output
    assert model(tmp_path / "elsewhere" / "copy") == model(tmp_path / "long")
    assert {path: path.read_bytes() for path in (tmp_path / "short").rglob("*") if path.is_file()} == before


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """A record of three rounds."""
    settings = parse(
        read_defaults()
        | {"rounds": 3, "clients": 2, "clients_per_round": 2, "local_steps": 1, "device": "cpu", "client_gpus": 0.0}
        | {"output": str(tmp_path), "name": "run"}
    )
    run_inprocess(server_app, client_app, 2, dump(settings))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lr=0.5", "lr = 0.5: the run that is to be resumed has 0.003, which is what is allowed"),
        ("method=fedadamw", "method = 'fedadamw': the run that is to be resumed has 'fedact'"),
        ("seed=1", "seed = 1: the run that is to be resumed has 42"),
        ("rounds=2", "rounds = 2: the run that is to be resumed has 3; allowed is at least that"),
    ],
)
def test_changed_settings_are_refused(setting: str, message: str, ended: Path) -> None:
    before = (ended / "rounds.jsonl").read_bytes()
    result = run("--resume", str(ended), *sets(setting))
    assert result.exit_code == 2
    assert message in result.output
    assert (ended / "rounds.jsonl").read_bytes() == before


def test_what_may_change_may(ended: Path) -> None:
    result = run("--resume", str(ended), *sets("rounds=4", "metrics_to=tensorboard", "checkpoint_every=1"))
    assert result.exit_code == 0, result.output
    assert json.loads((ended / "summary.json").read_text())["rounds"] == 4
    assert list((ended / "tensorboard").glob("events.*"))


def test_a_run_of_another_command_goes_on_and_keeps_its_settings(tmp_path: Path, make_settings: MakeSettings) -> None:
    """`flwr run` leaves "auto" and relative paths as they are; `fedact run` does not."""
    settings = make_settings(rounds=2, clients=2, clients_per_round=2, local_steps=1, device="auto", name="run")
    run_inprocess(server_app, client_app, 2, dump(settings))
    record = Path(settings.output) / "run"
    assert run("--resume", str(record)).exit_code == 0
    assert 'device = "auto"' in (record / "settings.toml").read_text()
    own = ["clients=2", "clients_per_round=2", "local_steps=1", "device=cpu", "rounds=3"]
    result = run(*sets(*own, f"resume={record}", f"output={record.parent}", "name=run"))
    assert result.exit_code == 0, result.output
    assert 'device = "auto"' in (record / "settings.toml").read_text()
    assert "rounds = 3" in (record / "settings.toml").read_text()


def test_what_was_in_the_record_stays_where_the_disk_is_full(ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    files = [ended / name for name in ("settings.toml", "rounds.jsonl", "summary.json")]
    before = [path.read_bytes() for path in files]
    monkeypatch.setattr("fedact_flwr.record.os.fsync", full)
    result = run("--resume", str(ended), *sets("rounds=4"))
    assert result.exit_code == 2
    assert "No space left on device" in result.output
    assert [path.read_bytes() for path in files] == before


def test_a_run_that_has_ended_ends_at_once_with_the_same_model(ended: Path) -> None:
    before = model(ended)
    result = run("--resume", str(ended))
    assert result.exit_code == 0, result.output
    assert model(ended) == before
    assert json.loads((ended / "summary.json").read_text())["rounds"] == 3


def test_what_can_not_be_resumed(ended: Path, tmp_path: Path) -> None:
    cases = {
        str(tmp_path / "nowhere"): "nowhere/settings.toml: No such file",
        str(tmp_path): "settings.toml: No such file",
    }
    for place, message in cases.items():
        result = run("--resume", place)
        assert result.exit_code == 2
        assert message in result.output
    for place in (str(tmp_path / "nowhere"), "~nobody-of-that-name/x"):
        result = run(*sets(f"resume={place}"))
        assert result.exit_code == 2
        assert f"error: resume = '{place}': " in result.output
    shutil.rmtree(ended / "checkpoints")
    result = run("--resume", str(ended))
    assert result.exit_code == 2
    assert f"resume = '{ended}': it has no checkpoint that can be used" in result.output


def test_a_run_that_goes_on_is_left_alone(ended: Path) -> None:
    from fedact_flwr.record import locked

    before = (ended / "rounds.jsonl").read_bytes()
    with locked(ended):
        result = run("--resume", str(ended), *sets("rounds=4"))
    assert result.exit_code == 2
    assert "that run goes on; allowed is one that has ended" in result.output
    assert (ended / "rounds.jsonl").read_bytes() == before


def test_none_where_none_are_wanted(make_settings: MakeSettings) -> None:
    settings = make_settings(rounds=1, clients=2, clients_per_round=2, local_steps=1, checkpoint_every=0, name="run")
    run_inprocess(server_app, client_app, 2, dump(settings))
    assert not (Path(settings.output) / "run" / "checkpoints").exists()
