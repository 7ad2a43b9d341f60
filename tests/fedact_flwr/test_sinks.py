"""Where metrics go: rounds.csv, TensorBoard, and the real MLflow and W&B, on this machine."""

import csv
import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedact_flwr import server_app, sinks
from fedact_flwr.cli import app as cli
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import run_inprocess
from fedact_flwr.record import RunRecord
from fedact_flwr.settings import Settings, dump, parse, read_defaults
from fedact_flwr.sinks import CSV_FILE, SINKS, Sinks
from tasks import TASKS

MakeSettings = Callable[..., Settings]
TINY: dict[str, Any] = {"clients": 2, "clients_per_round": 2, "local_steps": 1, "rounds": 2, "name": "run"}
LINES = [
    {"round": 0, "loss": 2.5, "seconds": 0.5},
    {"round": 1, "loss": None, "failed": ["partition 1: \"no, thanks\""], "seconds": 1.5},
    {"round": 2, "loss": 1e-30, "accuracy": 0.1, "replies": 3, "seconds": 2.0},
]  # fmt: skip


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No server, no account, and the log where caplog sees it."""
    for key in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    for key, value in (("MLFLOW_DISABLE_TELEMETRY", "true"), ("WANDB_MODE", "offline"), ("HOME", str(tmp_path))):
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)


def run(settings: Settings) -> Path:
    run_inprocess(server_app.app, client_app, settings.clients, dump(settings))
    return Path(settings.output) / settings.name


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / CSV_FILE).open(newline="") as file:
        return list(csv.DictReader(file))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_csv_with_keys_that_come_later(tmp_path: Path) -> None:
    opened = Sinks([], {}, tmp_path, [])
    assert (tmp_path / CSV_FILE).read_text() == "round,seconds\n"
    for line in LINES:
        opened.log(line)
    wanted = "round,seconds,loss,accuracy,replies\n0,0.5,2.5,,\n1,1.5,,,\n2,2.0,1e-30,0.1,3\n"
    assert (tmp_path / CSV_FILE).read_text() == wanted
    Sinks([], {}, tmp_path, LINES)  # as when the run is resumed
    assert (tmp_path / CSV_FILE).read_text() == wanted
    Sinks([], {}, tmp_path, LINES[:1]).log(LINES[1])
    assert (tmp_path / CSV_FILE).read_text() == "round,seconds,loss\n0,0.5,2.5\n1,1.5,\n"


def test_csv_has_the_rounds_that_count(make_settings: MakeSettings) -> None:
    """Round 1 is resumed from; 2 and 3 are run again. Every number is that of rounds.jsonl."""
    settings = make_settings(**(TINY | {"rounds": 3}), checkpoint_every=1, checkpoints_kept=3, evaluate_every=2)
    folder = run(settings)
    for newer in ("round-2", "round-3"):
        (folder / "checkpoints" / newer / "checkpoint.json").write_text("{}")
    assert [row["round"] for row in rows(folder)] == ["0", "1", "2", "3"]
    columns = list(rows(folder)[0])
    result = CliRunner().invoke(cli, ["run", "--engine", "inprocess", "--resume", str(folder)])
    assert "goes on after round 1" in result.output
    assert [row["round"] for row in rows(folder)] == ["0", "1", "2", "3"]
    for row, line in zip(rows(folder), lines(folder), strict=True):
        assert {key: float(value) for key, value in row.items() if value} == line
    assert rows(folder)[1]["accuracy"] == ""
    assert list(rows(folder)[0]) == columns


def test_names_once_and_with_spaces(make_settings: MakeSettings) -> None:
    assert make_settings(metrics_to="").sinks == []
    assert make_settings(metrics_to="wandb, mlflow,wandb").sinks == ["wandb", "mlflow"]


@pytest.mark.parametrize("name", SINKS)
def test_a_package_that_is_not_installed_is_said_before_the_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedact_flwr.server_app.find_spec", lambda package: None)
    settings = [f"metrics_to={name}", f"output={tmp_path / 'runs'}", "device=cpu"]
    result = CliRunner().invoke(cli, ["run", *(part for setting in settings for part in ("--set", setting))])
    assert result.exit_code == 2
    assert result.output == (
        f"error: metrics_to = '{name}': it needs packages that are not installed, {name}; "
        "see the optional dependencies in pyproject.toml\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_folder_is_no_package(make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B makes a folder `wandb` where it runs, and Python would import that."""
    (tmp_path / "some_sink").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(server_app.SettingsError, match="not installed, some_sink;"):
        server_app.check(make_settings().model_copy(update={"metrics_to": "some_sink"}))


@pytest.mark.parametrize("when", ["made", "logged to", "closed"])
def test_a_sink_that_fails_is_reported_once_and_ends_no_run(
    when: str, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    class Failing:
        def __init__(self, *_: object) -> None:
            self.call("made")

        def log(self, line: object) -> None:
            self.call("logged to")

        def close(self, status: str) -> None:
            self.call("closed")

        def call(self, now: str) -> None:
            calls.append(now)
            if now == when:
                raise ConnectionError("nobody\nthere")

    monkeypatch.setattr(sinks, "SINKS", SINKS | {"mlflow": Failing})
    folder = run(make_settings(**TINY, metrics_to="mlflow,tensorboard"))
    assert calls == {"made": ["made"], "logged to": ["made", "logged to"]}.get(
        when, ["made", *["logged to"] * 3, "closed"]
    )
    assert caplog.text.count("mlflow gets no more metrics: ConnectionError: nobody there") == 1
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    assert len(rows(folder)) == len(lines(folder)) == 3
    assert list((folder / "tensorboard").glob("events.*"))


def test_a_csv_that_can_not_be_written_ends_no_run(
    make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    with RunRecord(make_settings(**TINY), TASKS["digits"]) as record:
        (record.folder / CSV_FILE).unlink()
        (record.folder / CSV_FILE).mkdir()
        for line in LINES[:1] * 2:
            record.write_round(line)  # type: ignore[arg-type]
    assert caplog.text.count("rounds.csv gets no more metrics: IsADirectoryError") == 1
    assert len(lines(record.folder)) == 2


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    opened = Sinks(["tensorboard"], {}, tmp_path, [])
    for line in LINES:
        opened.log(line)
    opened.close("completed")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 2.5), (2, pytest.approx(1e-30))]
    assert [(e.step, e.value) for e in events.Scalars("replies")] == [(2, 3.0)]


def test_mlflow_has_settings_rounds_and_end_and_goes_on_in_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    config = dump(parse(read_defaults()))
    first = Sinks(["mlflow"], config, folder, [])
    first.log(LINES[0])
    first.close("interrupted")
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fedact")
    assert experiment
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("mine", "KILLED")
    assert found.data.params == {key: str(value) for key, value in config.items()}

    second = Sinks(["mlflow"], config | {"rounds": 100}, folder, LINES[:1])
    assert client.get_run(found.info.run_id).info.status == "RUNNING"
    for line in LINES[1:]:
        second.log(line)
    second.close("completed")
    (again,) = client.search_runs([experiment.experiment_id])
    assert (again.info.run_id, again.info.status) == (found.info.run_id, "FINISHED")
    assert again.data.metrics == {"round": 2, "loss": 1e-30, "accuracy": 0.1, "replies": 3, "seconds": 2.0}
    assert [(m.step, m.value) for m in client.get_metric_history(again.info.run_id, "loss")] == [(0, 2.5), (2, 1e-30)]


def test_mlflow_goes_where_it_is_told_and_no_server_there_ends_no_run(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens on that port
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = run(make_settings(**TINY, metrics_to="mlflow"))
    assert caplog.text.count("mlflow gets no more metrics: MlflowException: ") == 1
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    assert not (tmp_path / "runs" / "mlflow.db").exists()


def test_wandb_has_settings_and_rounds_and_goes_on_in_the_same_run(
    make_settings: MakeSettings, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    settings = make_settings(**TINY, metrics_to="wandb", checkpoint_every=1)
    folder = run(settings)
    run(parse(dump(settings) | {"resume": str(folder), "rounds": 3}))
    name = (folder / "wandb.id").read_text()
    written = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in written] == [f"run-{name}.wandb"] * 2
    first, second = map(entries, written)
    assert (first["project"], first["display_name"]) == ("fedact", "run")
    assert first["config"] == dump(settings)
    assert second["config"]["rounds"] == 3
    history = [{key: row[key] for key in line if key in row} for row, line in zip(
        first["history"] + second["history"], lines(folder), strict=True
    )]  # fmt: skip
    assert history == lines(folder)
    assert [row["_step"] for row in first["history"] + second["history"]] == [0, 1, 2, 3]
    assert (first["exit"], second["exit"]) == (0, 0)
    output = capfd.readouterr()
    assert "wandb:" not in output.out + output.err


def entries(path: Path) -> dict[str, Any]:
    """What a file that `wandb sync` would send holds: a header of 7 bytes, then pieces of records in 32 KiB blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    found: dict[str, Any] = {"history": [], "config": {}}
    while at < len(data):
        if (left := -at % 32768) < 7:
            at += left  # no piece begins there
            continue
        length, kind = struct.unpack_from("<4xHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # it goes on
            continue
        record, whole = Record.FromString(whole), b""
        match record.WhichOneof("record_type"):
            case "run":
                found |= {"project": record.run.project, "display_name": record.run.display_name}
                found["config"] |= _updated(record.run.config)
            case "config":  # which may come later
                found["config"] |= _updated(record.config)
            case "history":
                items = record.history.item
                found["history"].append({(i.key or i.nested_key[0]): json.loads(i.value_json) for i in items})
            case "exit":
                found["exit"] = record.exit.exit_code
    return found


def _updated(config: Any) -> dict[str, Any]:
    return {each.key: json.loads(each.value_json) for each in config.update if each.key != "_wandb"}


def test_wandb_without_a_login_ends_no_run(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it has read its variables once
    monkeypatch.setenv("WANDB_MODE", "online")
    folder = run(make_settings(**TINY, metrics_to="wandb"))
    assert caplog.text.count("wandb gets no more metrics: UsageError: ") == 1
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
