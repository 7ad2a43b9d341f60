"""Records of runs, read back: for lists, comparisons, sweeps and reports."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fedact_flwr.failure import COMPLETED, RUNNING
from fedact_flwr.record import LOCK_FILE, LOG_FILE, ROUNDS_FILE, SUMMARY_FILE
from fedact_flwr.settings import AUTO, SETTINGS_FILE, SettingsError, dump, parse, read_defaults, read_file
from strategies import STRATEGIES
from tasks import TASKS
from tasks.task import Task

SWEEP_FILE, TUNING_FOLDER, RUNS_FOLDER = "sweep.toml", "tuning", "runs"  # of a sweep's folder
READ_BY = {"dirichlet_alpha": ("dirichlet", "dirichlet_priors"), "classes_per_client": ("by_class",)}  # which splits
UNFINISHED = "unfinished"  # ended without a word
TEXTS = ("failed", "reports")  # keys of a round's line that hold lists of text
RECORD_FILES = (SETTINGS_FILE, ROUNDS_FILE, SUMMARY_FILE, LOG_FILE)

# What may differ between runs that are alike: where they ran, and what was written down.
MACHINE = (
    "device", "threads", "client_gpus", "output", "name", "metrics_to", "checkpoint_every",
    "checkpoints_kept", "resume", "round_timeout", "node_timeout",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A record.

    Attributes
    ----------
    folder : Path
    settings : mapping
        All of them, where the record is of an older version with the defaults of those that it does not have.
    rounds : sequence of mapping
        The lines of rounds.jsonl.
    status : str
        "completed", "failed", "interrupted", "running", or "unfinished" where it ended without a word.
    cause : str or None
        Of the end, if not "completed".
    machine : str
        On which it was made, in words, and with which PyTorch; empty where the record does not say.
    """

    folder: Path
    settings: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    status: str
    cause: str | None
    machine: str = ""

    @property
    def task(self) -> Task:
        return TASKS[self.settings["task"]]

    @property
    def final(self) -> Mapping[str, Any] | None:
        """The last evaluated round; None where its target is not a number, as of a run that diverged."""
        evaluated = [line for line in self.rounds if self.task.target in line]
        return evaluated[-1] if evaluated and evaluated[-1][self.task.target] is not None else None

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The best evaluated round; of equal ones the first."""
        sign = 1 if self.task.higher_is_better else -1
        evaluated = [line for line in self.rounds if line.get(self.task.target) is not None]
        return max(evaluated, key=lambda line: sign * line[self.task.target]) if evaluated else None

    @property
    def reports(self) -> list[str]:
        """What was said of sinks of metrics that failed."""
        return [text for line in self.rounds for text in line.get("reports", ())]

    @cached_property
    def effective(self) -> Mapping[str, Any]:
        return effective(self.settings)

    def differing(self, other: Mapping[str, Any], ignored: Sequence[str] = ()) -> list[str]:
        """The keys, in the order of the record, whose values differ from another's settings."""
        keys = dict.fromkeys((*self.settings, *other))
        return [key for key in keys if key not in ignored and self.settings.get(key) != other.get(key)]


@dataclass(frozen=True)
class Unreadable:
    """A folder that should be a record and can't be read, and why."""

    folder: Path
    reason: str


def effective(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with numbers where alpha and gamma are "auto", and the default where the split does not read one."""
    tau = settings["tau"]
    usual = {"alpha": 1 / tau if tau else AUTO, "gamma": tau}
    unused = {key: _defaults()[key] for key, splits in READ_BY.items() if settings["split"] not in splits}
    return {key: usual.get(key, value) if value == AUTO else value for key, value in settings.items()} | unused


def show(value: object) -> str:
    """A setting's value for people, and for names: a number in as few digits as tell it."""
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def read_run(folder: Path) -> Run | Unreadable:
    """The record in ``folder``. A last line that its writer did not finish is left out."""
    if not (folder / SETTINGS_FILE).exists():
        return Unreadable(folder, f"{SETTINGS_FILE} is not there")
    try:
        own = read_file(folder / SETTINGS_FILE)
        settings = _defaults() | own
        _check_settings(settings)
        rounds = _read_rounds(folder / ROUNDS_FILE)
        run = Run(folder, settings, rounds, *_end(folder))
        last = rounds[-1]["round"] if rounds else None
        if run.status == COMPLETED and last != settings["rounds"]:
            raise ValueError(f"{ROUNDS_FILE}: it ends at round {last} of {settings['rounds']}")
    except SettingsError as error:
        return Unreadable(folder, str(error).removeprefix(f"{folder}{os.sep}"))
    except (OSError, ValueError) as error:
        return Unreadable(folder, str(error))
    return run


def find_runs(paths: Sequence[Path], tuning: bool = True) -> tuple[list[Run], list[Unreadable]]:
    """All records in these folders and the folders in them, in the order of their paths, each once.

    Those of a sweep's tuning only if ``tuning``. Raises `SettingsError` where a path is no folder.
    """
    found: dict[Path, Run | Unreadable] = {}
    for path in paths:
        if not path.is_dir():
            raise SettingsError(f"{path}: not there; allowed is the folder of a record, or one with such folders")
        for folder in _folders(path.resolve()):
            if _is_record(folder) and (tuning or not _is_tuning(folder)):
                found[folder] = found.get(folder) or read_run(folder)
    runs = [run for run in found.values() if isinstance(run, Run)]
    return runs, [run for run in found.values() if isinstance(run, Unreadable)]


def find_sweeps(paths: Sequence[Path]) -> list[Path]:
    """The folders of sweeps among these and the folders in them, each once. Raises as `find_runs`."""
    folders = (folder for path in paths if path.is_dir() for folder in _folders(path.resolve()))
    return list(dict.fromkeys(folder for folder in folders if (folder / SWEEP_FILE).is_file()))


def run_in(folder: Path) -> Run:
    """The record in ``folder``. Raises `SettingsError` where it can't be read."""
    run = read_run(folder.resolve())
    if isinstance(run, Unreadable):
        raise SettingsError(f"{folder}: {run.reason}; allowed is the folder of a record")
    return run


def _folders(folder: Path) -> Iterator[Path]:
    """This one and those in it, but for what is in a record."""
    yield folder
    if not _is_record(folder):
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.is_symlink():
                yield from _folders(child)


def _is_record(folder: Path) -> bool:
    names = {entry.name for entry in os.scandir(folder)}
    return bool(names & set(RECORD_FILES)) or not names


def _is_tuning(folder: Path) -> bool:
    return folder.parent.name == TUNING_FOLDER and (folder.parent.parent / SWEEP_FILE).is_file()


@cache
def _defaults() -> dict[str, Any]:
    return dump(parse(read_defaults()))


def _check_settings(settings: Mapping[str, Any]) -> None:
    for key, registry in (("task", TASKS), ("method", STRATEGIES)):
        if not isinstance(settings[key], str) or settings[key] not in registry:
            raise ValueError(f"{SETTINGS_FILE}: {key} = {settings[key]!r}: this version has none of that name")
    for key in ("tau", "lr"):
        if type(settings[key]) not in (int, float):
            raise ValueError(f"{SETTINGS_FILE}: {key} = {settings[key]!r}: not a number")
    for key in ("seed", "rounds", "clients", "clients_per_round", "local_steps"):
        if type(settings[key]) is not int:
            raise ValueError(f"{SETTINGS_FILE}: {key} = {settings[key]!r}: not a whole number")
    if odd := [key for key, value in settings.items() if not isinstance(value, str | int | float | bool)]:
        raise ValueError(f"{SETTINGS_FILE}: {odd[0]}: not a plain value")


def _read_rounds(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rounds = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            values = json.loads(line)
            well = isinstance(values, dict) and type(values["round"]) is int and _is_number(values["seconds"])
            well = well and all(v is None or _is_number(v) for k, v in values.items() if k not in TEXTS)
            well = well and all(isinstance(text, str) for key in TEXTS for text in values.get(key, ()))
        except (ValueError, KeyError, TypeError, RecursionError):
            well = False
        if not well:
            raise ValueError(f"{path.name}: line {number} is no round's")
        rounds.append(values)
    return rounds


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _end(folder: Path) -> tuple[str, str | None, str]:
    """Status, cause and machine."""
    path = folder / SUMMARY_FILE
    if not path.exists():
        return (RUNNING, None, "") if _goes_on(folder) else (UNFINISHED, "it ended without a word", "")
    try:
        summary = json.loads(path.read_bytes())
        status, cause, machine = summary["status"], summary["cause"], summary.get("machine", "")
        if machine:
            machine += f", torch {summary['versions']['torch']}"
        if isinstance(status, str) and isinstance(cause, str | None) and isinstance(machine, str):
            return status, cause, machine
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ValueError(f"{SUMMARY_FILE}: not a run's summary")


def _goes_on(folder: Path) -> bool:
    """Whether a process holds the record's lock, where the system can tell."""
    if os.name != "posix" or not (folder / LOCK_FILE).exists():
        return False
    import fcntl

    with (folder / LOCK_FILE).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
