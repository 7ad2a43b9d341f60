"""Records read back: `fedact list`, `show` and `compare`, and what is no record."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedact_flwr.cli import app
from fedact_flwr.experiments.runs import Run, Unreadable, find_runs, read_run
from fedact_flwr.record import LOCK_FILE, ROUNDS_FILE, SUMMARY_FILE, locked
from fedact_flwr.settings import SETTINGS_FILE

LINES = [
    {"round": 0, "loss": 2.5, "accuracy": 0.1, "seconds": 0.5},
    {"round": 1, "loss": 1.5, "accuracy": 0.6, "bytes_sent": 2_000_000, "bytes_received": 1_000_000, "replies": 2,
     "failures": 1, "failed": ["partition 3, node 7: no reply in time"], "seconds": 1.5},
    {"round": 2, "loss": None, "accuracy": 0.4, "replies": 3, "failures": 0, "seconds": 2.5},
]  # fmt: skip


def fedact(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_a_record_is_read_back(write_record: Any, tmp_path: Path) -> None:
    run = read_run(write_record(tmp_path / "a", LINES, seed=3, rho=0.25))
    assert isinstance(run, Run)
    assert (run.status, run.cause, run.settings["rho"], run.settings["seed"]) == ("completed", None, 0.25, 3)
    assert run.rounds == LINES
    assert run.final == LINES[2]
    assert run.best == LINES[1]


def test_a_line_that_its_writer_did_not_finish_is_left_out(write_record: Any, tmp_path: Path) -> None:
    folder = write_record(tmp_path / "a", LINES, status="unfinished")
    with (folder / ROUNDS_FILE).open("a") as file:
        file.write('{"round": 3, "lo')
    run = read_run(folder)
    assert isinstance(run, Run)
    assert run.rounds == LINES
    assert (run.status, run.cause) == ("unfinished", "it ended without a word")
    with locked(folder):
        assert read_run(folder).status == "running"  # type: ignore[union-attr]


def test_a_record_of_an_older_version_has_the_defaults_of_what_came_since(write_record: Any, tmp_path: Path) -> None:
    folder = write_record(tmp_path / "a", LINES)
    kept = [line for line in (folder / SETTINGS_FILE).read_text().splitlines() if not line.startswith("wire_delta")]
    (folder / SETTINGS_FILE).write_text("\n".join([*kept, 'of_old = "yes"']))
    run = read_run(folder)
    assert isinstance(run, Run)
    assert (run.settings["wire_delta"], run.settings["of_old"]) == ("float32", "yes")


BROKEN = {
    "settings.toml is not there": lambda folder: (folder / SETTINGS_FILE).unlink(),
    "settings.toml: not valid TOML": lambda folder: (folder / SETTINGS_FILE).write_text("rounds = "),
    "settings.toml: method = 'fedx': this version has none of that name": lambda folder: (
        folder / SETTINGS_FILE
    ).write_text("method = 'fedx'"),
    "settings.toml: rounds = 'x': not a whole number": lambda folder: (folder / SETTINGS_FILE).write_text("rounds='x'"),
    "rounds.jsonl: line 2 is no round's": lambda folder: (folder / ROUNDS_FILE).write_text(
        '{"round": 0, "seconds": 1}\n{"round": 1}\n'
    ),
    "summary.json: not a run's summary": lambda folder: (folder / SUMMARY_FILE).write_text("[]"),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_what_can_not_be_read_is_listed_and_left_out(reason: str, write_record: Any, tmp_path: Path) -> None:
    write_record(tmp_path / "good", LINES)
    BROKEN[reason](write_record(tmp_path / "bad", LINES))
    runs, unreadable = find_runs([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    assert [folder.folder.name for folder in unreadable] == ["bad"]
    code, output = fedact("list", tmp_path)
    assert code == 0
    assert f"left out: {tmp_path / 'bad'}: {reason}" in output
    code, output = fedact("show", tmp_path / "bad")
    assert code == 2
    assert f"error: {tmp_path / 'bad'}: {reason}" in output
    assert output.count("\n") == 1


@given(st.sampled_from([SETTINGS_FILE, ROUNDS_FILE, SUMMARY_FILE, LOCK_FILE]), st.binary() | st.text().map(str.encode))
def test_any_bytes_are_read_or_said_to_be_unreadable(write_record: Any, name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = write_record(Path(folder) / "a", LINES)
        (record / name).write_bytes(content)
        run = read_run(record)
        assert isinstance(run, Run) or (isinstance(run, Unreadable) and "\n" not in run.reason)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["round", "seconds", "x"]), inner),
    max_leaves=4,
)


@given(st.lists(st.dictionaries(st.sampled_from(["round", "seconds", "accuracy", "failed", "loss"]), JSON)))
def test_any_lines_are_numbers_or_unreadable(write_record: Any, lines: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = read_run(write_record(Path(folder) / "a", lines, rounds=2))
        if isinstance(run, Run):
            for line in run.rounds:
                assert all(isinstance(v, int | float | None) for key, v in line.items() if key != "failed")
            assert run.final is None or isinstance(run.final["accuracy"], int | float)


def test_list(write_record: Any, tmp_path: Path) -> None:
    write_record(tmp_path / "sweep" / "one", LINES, method="fedavg", seed=1, rounds=2)
    write_record(tmp_path / "sweep" / "two", LINES[:2], "interrupted", rounds=2)
    (tmp_path / "sweep" / "figures").mkdir()
    (tmp_path / "sweep" / "figures" / "a.svg").write_text("no record")
    code, output = fedact("list", tmp_path)
    assert code == 0
    one, two = output.splitlines()[1:]
    assert one.split()[1:6] == ["completed", "fedavg", "digits", "1", "2/2"]
    assert "accuracy 0.4 in round 2" in one
    assert "accuracy 0.6 in round 1" in one
    assert two.split()[1:6] == ["interrupted", "fedact", "digits", "42", "1/2"]


def test_show(write_record: Any, tmp_path: Path) -> None:
    folder = write_record(tmp_path / "a", LINES, status="failed", rounds=2, rho=0.25, method="fedadamw")
    code, output = fedact("show", folder)
    assert code == 0
    assert f"{folder}: failed, RunFailed: round 2" in output
    settings = output[output.index("settings that") : output.index("accuracy:")].splitlines()[1:]
    assert [line.split() for line in settings if line.strip()] == [
        ["task", '"digits"'], ["method", '"fedadamw"'], ["rho", "0.25"], ["rounds", "2"],
    ]  # fmt: skip
    assert "final accuracy 0.4 in round 2, best accuracy 0.6 in round 1" in output
    assert "2.00 + 1.00" in output
    assert "1 failed replies:\n  round 1, partition 3, node 7: no reply in time" in output


def test_compare(write_record: Any, tmp_path: Path) -> None:
    write_record(tmp_path / "a", LINES, rho=0.25)
    write_record(tmp_path / "b", LINES[:2], "failed", seed=7)
    code, output = fedact("compare", tmp_path / "a", tmp_path / "b")
    assert code == 0
    rows = [line.split() for line in output.splitlines()]
    assert ["seed", "42", "7"] in rows
    assert ["rho", "0.25", "0.5"] in rows
    assert ["final", "accuracy", "0.4", "0.6"] in rows
    assert ["status", "completed", "failed"] in rows
    assert not any(row[0] == "rounds" and row[1:] == ["60", "60"] for row in rows if row)


def test_nothing_there(write_record: Any, tmp_path: Path) -> None:
    assert fedact("list", tmp_path / "no") == (
        2,
        f"error: {tmp_path / 'no'}: not there; allowed is the folder of a record, or one with such folders\n",
    )
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.svg").touch()
    assert fedact("list", tmp_path / "figures")[0] == 2
