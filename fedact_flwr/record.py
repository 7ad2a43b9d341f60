"""The record of a run: a folder that says what was run, how it went, and what came out.

* settings.toml: every setting; `fedact run RECORD/settings.toml --set name=auto` repeats the run
* clients.json: how many examples of each class each client has, where the server knows
* rounds.jsonl: one line per round, written as the round ends; round 0 is the model before training
* rounds.csv, and what ``metrics_to`` names: the same numbers where people look (`fedact_flwr.sinks`)
* checkpoints: what a run needs to go on (`fedact_flwr.checkpoint`)
* model.safetensors: the final model's state dict
* summary.json: how the run ended, final and best metrics, duration, versions
* run.log: the log of Flower and the app, of `fedact run`
* lock: held while the run goes on
"""

import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from logging import ERROR
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w
from flwr.common import log
from numpy.typing import NDArray
from torch import nn

from fedact_flwr.failure import COMPLETED, FAILED, INTERRUPTED, RUNNING
from fedact_flwr.files import write_whole
from fedact_flwr.personal import drop_clients_after
from fedact_flwr.settings import AUTO, SETTINGS_FILE, Settings, SettingsError, dump
from fedact_flwr.sinks import Sinks
from strategies.versions import machine, package_version, versions
from tasks.task import Task

CLIENTS_FILE = "clients.json"
ROUNDS_FILE = "rounds.jsonl"
SUMMARY_FILE = "summary.json"
LOCK_FILE = "lock"
LOG_FILE = "run.log"


def make_folder(settings: Settings) -> Path:
    """Make the folder of a new record, that was not there before, and return its absolute path.

    Raises `SettingsError` where it can't be made.
    """
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{settings.task}-{settings.method}-s{settings.seed}"
    names = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
    try:
        output = Path(settings.output).expanduser().resolve()
        output.mkdir(parents=True, exist_ok=True)
        for name in names if settings.name == AUTO else [settings.name]:
            with contextlib.suppress(FileExistsError):
                (output / name).mkdir()
                return output / name
    except (OSError, RuntimeError) as error:  # expanduser raises RuntimeError for a user that there is not
        raise SettingsError(f"output = {settings.output!r}: {error}; allowed is a folder to write to") from None
    raise SettingsError(f"name = {name!r}: {output / name} is there already; allowed is a new name")


class RunRecord:
    """Writes the record; as a context manager it also writes how the run ended.

    Parameters
    ----------
    settings : Settings
        A folder that they name may be there already, made by `make_folder`, but hold no record. With ``resume`` it is
        the record of that run, which goes on.
    task : Task
        Its target is the metric whose best value the summary gives, and it knows how to write the model.
    rounds : sequence of dict, optional
        With ``resume``, the lines of the rounds that count; later ones go.

    Raises `SettingsError` where the folder can't be had.
    """

    def __init__(self, settings: Settings, task: Task, rounds: Sequence[Mapping[str, Any]] = ()) -> None:
        if settings.resume:
            self.folder = record_to_resume(settings)
        else:
            self.folder = Path(settings.output).expanduser().resolve() / settings.name
            if settings.name == AUTO or not self.folder.exists():
                self.folder = make_folder(settings)
            elif (self.folder / SETTINGS_FILE).exists():
                raise SettingsError(
                    f"name = {settings.name!r}: {self.folder} holds another record; allowed is a new name"
                )
        self._open = contextlib.ExitStack()
        self._open.enter_context(locked(self.folder))
        self.task = task
        self.rounds: list[dict[str, Any]] = [dict(line) for line in rounds]
        self.status = RUNNING
        self._started = time.monotonic() - (self.rounds[-1]["seconds"] if self.rounds else 0.0)
        config = dump(settings) | {"resume": ""}
        write_whole(self.folder / SETTINGS_FILE, tomli_w.dumps(config))
        (self.folder / SUMMARY_FILE).unlink(missing_ok=True)
        write_rounds(self.folder, self.rounds)
        drop_clients_after(self.folder, self.rounds[-1]["round"] if self.rounds else 0)
        self._lines = self._open.enter_context((self.folder / ROUNDS_FILE).open("a"))
        self._sinks = Sinks(settings.sinks, config, self.folder, self.rounds)

    def write_clients(self, histograms: NDArray) -> None:
        """``histograms``: examples of each class of each client, shape (clients, classes)."""
        rows = [
            json.dumps({"client": client, "examples": int(row.sum()), "labels": row.tolist()})
            for client, row in enumerate(histograms)
        ]
        (self.folder / CLIENTS_FILE).write_text("[\n" + ",\n".join(rows) + "\n]\n")

    def write_round(self, metrics: Mapping[str, float], failed: Sequence[str] = ()) -> None:
        """One line; a value that is not finite becomes null. ``failed`` says of each failed client why."""
        line: dict[str, Any] = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        if failed:
            line["failed"] = list(failed)
        if reports := self._sinks.take_reports():
            line["reports"] = reports
        line["seconds"] = round(time.monotonic() - self._started, 3)  # since the run began
        self.rounds.append(line)
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        self._sinks.log(line)

    def write_model(self, model: nn.Module) -> None:
        self.task.save(model, self.folder)

    def __enter__(self) -> "RunRecord":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._end(COMPLETED, None)
            elif isinstance(error, KeyboardInterrupt | SystemExit):  # Flower ends a run that it stops by SystemExit
                self.interrupt()
            else:
                self._end(FAILED, f"{type(error).__name__}: {error}")
        except OSError as full:
            self.status = FAILED
            if error is None:
                raise
            log(ERROR, "%s can't be written: %s", SUMMARY_FILE, full)
        finally:  # last, since it may take a while, and not every run that is stopped is given one
            self._sinks.close(self.status)
            self._open.close()

    def interrupt(self) -> None:
        """Write that the run was interrupted, unless it has ended. Also a signal's handler, at any moment."""
        if self.status == RUNNING:
            self._end(INTERRUPTED, "interrupted")

    def _end(self, status: str, cause: str | None) -> None:
        write_summary(self.folder, status, cause, results(self.rounds, self.task))
        self.status = status


def write_rounds(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """rounds.jsonl, of these lines."""
    write_whole(folder / ROUNDS_FILE, "".join(json.dumps(line) + "\n" for line in lines))


def record_to_resume(settings: Settings) -> Path:
    """The record that ``resume`` names. Raises `SettingsError` where there is none."""
    try:
        record = Path(settings.resume).expanduser().resolve()
        if (record / SETTINGS_FILE).is_file():
            return record
        reason = f"{record / SETTINGS_FILE} is not there"
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error)
    raise SettingsError(f"resume = {settings.resume!r}: {reason}; allowed is the folder of a record")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep all others out of a record, where the system can; it is free again when this process ends, however.

    Raises `SettingsError` where somebody is in it.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context((folder / LOCK_FILE).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"resume = {str(folder)!r}: that run goes on; allowed is one that has ended") from None
        except OSError as error:
            raise SettingsError(f"output = {str(folder)!r}: {error}; allowed is a folder to write to") from None
        yield


def results(rounds: Sequence[Mapping[str, Any]], task: Task) -> dict[str, Any]:
    """What the summary says of the rounds: how many, how long, the last and the best evaluated one."""
    evaluated = [line for line in rounds if line.get(task.target) is not None]
    sign = 1 if task.higher_is_better else -1
    return {
        "rounds": rounds[-1]["round"] if rounds else 0,
        "seconds": rounds[-1]["seconds"] if rounds else 0.0,
        "final": evaluated[-1] if evaluated else None,
        "best": max(evaluated, key=lambda line: sign * line[task.target]) if evaluated else None,
    }


def write_summary(folder: Path, status: str, cause: str | None, results: Mapping[str, Any]) -> None:
    """summary.json: how the run ended, why if not well, its results, and what it ran on."""
    summary = {
        "status": status,
        "cause": cause,
        **results,
        "versions": {"fedact-flwr": package_version("fedact-flwr"), **versions()},
        "machine": machine(),
    }
    write_whole(folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """summary.json of a record, or None where the run has not ended (or ended without a word)."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
    except (OSError, ValueError):
        return None
    return summary
