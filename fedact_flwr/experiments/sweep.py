"""A sweep: a TOML file that stands for many runs, and the folder of their records.

    FOLDER/sweep.toml      the file, with what --set said as comments
    FOLDER/tuning/NAME     the runs that choose a learning rate
    FOLDER/tuning.json     what they came to
    FOLDER/runs/NAME       the runs to report
    FOLDER/runs.json       their names: earlier ones may lie beside them

docs/sweeps.md shows one in full.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from clients.methods import CLIENT_METHODS
from fedact_flwr.budget import with_budget
from fedact_flwr.checkpoint import FOLDER as CHECKPOINTS
from fedact_flwr.experiments.runs import MACHINE, RUNS_FOLDER, TUNING_FOLDER, Run, Unreadable, read_run, show
from fedact_flwr.failure import COMPLETED, FAILED, RUNNING
from fedact_flwr.personal import PERSONAL_FAILURES
from fedact_flwr.record import SUMMARY_FILE
from fedact_flwr.run import Engine, for_this_machine
from fedact_flwr.settings import (
    SETTINGS_FILE,
    Settings,
    SettingsError,
    dump,
    parse,
    read_defaults,
    read_file,
    read_override,
)
from strategies import STRATEGIES, wire
from tasks import TASKS, TaskSettings
from tasks.task import BadData, Family

TUNING_FILE = "tuning.json"
CURRENT_FILE = "runs.json"
NOT_OURS = ("output", "name", "resume")
LONGEST_NAME = 150
TYPES = re.compile(r"(str|bool|int|float|list|dict)\b")  # as pydantic names the members of a union

Plain = str | bool | int | float
Own = dict[str, Plain]  # settings of a run that are not the sweep's common ones
Cell = tuple[tuple[str, Plain], ...]  # what is tuned at once: such settings, without the seed
Rates = Annotated[list[PositiveFloat], Field(min_length=1)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Tune(_Table):
    """A learning rate for each combination: the best of a grid by the task's target, the mean over these seeds.

    That of the global model, or by = "personal" of the clients' own models, or where a method has none of the
    fine-tuned one, the mean over the clients.
    """

    lr: Rates | dict[str, Rates]  # for all; or by method, or by family of the local optimizer
    seeds: Annotated[list[int], Field(min_length=1)]
    by: Literal["global", "personal"] = "global"
    at: Own = Field(default_factory=dict)  # where the sweep has several values: those that the tuning has


class Sweep(_Table):
    """The file. Its runs are all combinations of a case and of one value for each key of the grid."""

    title: str = ""
    about: str = ""
    conf: list[str] = Field(default_factory=list)  # files of settings, seen from this file
    settings: Own = Field(default_factory=dict)
    grid: dict[str, Annotated[list[Plain], Field(min_length=1)]] = Field(default_factory=dict)
    cases: Annotated[list[Own], Field(min_length=1)] = [{}]
    tune: Tune | None = None


@dataclass(frozen=True)
class Job:
    """One run that is wanted: its record's folder and its settings."""

    folder: Path
    settings: Settings

    @property
    def steps(self) -> int:
        """Optimizer steps of all clients; an epoch counts as one."""
        s = self.settings
        return s.rounds * s.clients_per_round * (s.local_epochs or s.local_steps)

    def record(self) -> Run | None:
        """The run as far as it went; None where there is no record that can be read."""
        run = read_run(self.folder)
        return run if isinstance(run, Run) else None

    def is_left(self, retry: bool) -> bool:
        """Whether it is to be made or to go on; where it failed only with ``retry``."""
        record = self.record()
        return record is None or record.status not in ((COMPLETED,) if retry else (COMPLETED, FAILED))

    def has_checkpoint(self) -> bool:
        return any((self.folder / CHECKPOINTS).glob("round-*"))

    def check_folder(self) -> None:
        """Raise `SettingsError` where the folder holds another run, or one that goes on."""
        found = read_run(self.folder)
        if isinstance(found, Unreadable):
            if any((self.folder / name).exists() for name in (SETTINGS_FILE, SUMMARY_FILE)):
                raise SettingsError(f"{self.folder}: {found.reason}; allowed is another --output, or to remove it")
            return
        record, wanted = found, dump(self.settings)
        odd = [key for key in record.differing(wanted, MACHINE) if key in wanted]
        if odd:
            raise SettingsError(
                f"{self.folder}: holds a run with {odd[0]} = {record.settings[odd[0]]!r}, not {wanted[odd[0]]!r}; "
                f"allowed is another --output, or to remove it"
            )
        if record.status == RUNNING:
            raise SettingsError(f"{self.folder}: that run goes on; allowed is to wait for its end")


@dataclass(frozen=True)
class Tuned:
    """What the tuning of a cell came to.

    Attributes
    ----------
    cell : Cell
    target : str
        The metric.
    by_lr : mapping of float to float or None
        The mean over seeds of the final target, None where a run failed.
    best : float or None
        The rate to report; None where all failed.
    """

    cell: Cell
    target: str
    by_lr: Mapping[float, float | None]
    best: float | None


def read_sweep(path: Path) -> Sweep:
    """Raises `SettingsError` for what the file may not say."""
    try:
        sweep = Sweep(**read_file(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if not TYPES.match(str(part)))
        allowed = "" if first["loc"][0] in Sweep.model_fields else f"; allowed are {', '.join(Sweep.model_fields)}"
        if first["loc"][0] == "settings" and isinstance(first["input"], list):
            allowed = "; several values belong in [grid]"
        raise SettingsError(f"{path}: {where}: {first['msg']}{allowed}") from None
    places = {
        "settings": set(sweep.settings),
        "grid": set(sweep.grid),
        "cases": set[str]().union(*sweep.cases),
        "tune": {"lr"} if sweep.tune else set(),
    }
    for key in sorted(set[str]().union(*places.values())):
        if key in NOT_OURS:
            raise SettingsError(f"{path}: {key}: a sweep has a folder of its own for records; allowed is --output")
        if len(having := [place for place, keys in places.items() if key in keys]) > 1:
            raise SettingsError(f"{path}: {key}: stands in {' and in '.join(having)}; allowed is one of them")
    if sweep.tune and isinstance(sweep.tune.lr, dict):
        known = [*STRATEGIES, *get_args(Family)]
        if unknown := sorted(sweep.tune.lr.keys() - set(known)):
            raise SettingsError(f"{path}: tune.lr.{unknown[0]}: allowed are methods and families, {', '.join(known)}")
    held = set(sweep.tune.at) if sweep.tune else set()
    if odd := sorted(held - (places["grid"] | places["cases"]) | held & {"seed"}):
        raise SettingsError(f"{path}: tune.at.{odd[0]}: allowed are keys of grid and cases, but for seed")
    return sweep


class Plan:
    """The runs that a sweep stands for on this machine.

    Parameters
    ----------
    path : Path
        The sweep's file.
    folder : Path
        Where its records are, or will be.
    overrides : sequence of str
        KEY=VALUE, before what the file has in ``settings``.
    engine : Engine
    looks : bool
        At data and records; false where runs are only to be counted.

    Attributes
    ----------
    common : dict
        The settings of all runs, but for what cases, grid and tuning say.
    tuning, expected : list of Job
        The runs that tune, and those to report, with the first learning rate of their cell as long as none is tuned.

    All of them are checked here, before the first one starts: raises `SettingsError`.
    """

    def __init__(self, path: Path, folder: Path, overrides: Sequence[str], engine: Engine, looks: bool = True) -> None:
        self.looks = looks
        self.path, self.folder, self.engine = path, folder.expanduser().resolve(), engine
        self.sweep = read_sweep(path)
        own = dict(read_override(text) for text in overrides)
        taken = {*self.sweep.grid, *set().union(*self.sweep.cases), *NOT_OURS, *(("lr",) if self.sweep.tune else ())}
        if odd := sorted(own.keys() & taken):
            raise SettingsError(f"--set {odd[0]}: the sweep itself has values for it; allowed are its other settings")
        self.common = read_defaults()
        for file in self.sweep.conf:
            self.common |= read_file(path.parent / file)
        self.common |= self.sweep.settings | own
        self._data_checked: set[tuple[object, ...]] = set()

        values = [dict(zip(self.sweep.grid, chosen, strict=True)) for chosen in product(*self.sweep.grid.values())]
        self._combinations: list[Own] = [case | chosen for case, chosen in product(self.sweep.cases, values)]
        self._trials: dict[Cell, dict[float, list[Job]]] = {}
        if tune := self.sweep.tune:
            reported = {own.get("seed", self.common["seed"]) for own in self._combinations}
            if both := sorted(reported & set(tune.seeds)):
                raise SettingsError(f"{path}: tune.seeds: {both[0]} is a seed to report; allowed are others")
            if self.common["evaluate_every"] == 0:
                raise SettingsError(
                    f"{path}: evaluate_every = 0: runs come to nothing that tells them apart; allowed is above 0"
                )
            cells = list(dict.fromkeys(map(self._cell, self._combinations)))
            if tune.by == "personal" and not all((self.common | dict(cell))["personal_every"] for cell in cells):
                raise SettingsError(f"{path}: personal_every = 0: tune.by = 'personal' needs it; allowed is above 0")
            for cell in cells:
                self._trials[cell] = {
                    lr: [self._job(TUNING_FOLDER, dict(cell) | {"lr": lr, "seed": seed}) for seed in tune.seeds]
                    for lr in self._rates(cell)
                }
        self.tuning = [job for by_lr in self._trials.values() for jobs in by_lr.values() for job in jobs]
        self._check(self.tuning)
        self.expected = self.runs({cell: next(iter(by_lr)) for cell, by_lr in self._trials.items()})

    @property
    def steps(self) -> int:
        """Optimizer steps of all clients in all runs, those that tune too."""
        return sum(job.steps for job in (*self.tuning, *self.expected))

    def runs(self, rates: Mapping[Cell, float]) -> list[Job]:
        """The runs to report, where the learning rate is tuned with that of their cell, or not at all without one."""
        chosen = []
        for own in self._combinations:
            if not self.sweep.tune:
                chosen.append(own)
            elif (cell := self._cell(own)) in rates:
                chosen.append(own | {"lr": rates[cell]})
        jobs = [self._job(RUNS_FOLDER, own) for own in chosen]
        self._check(jobs)
        return jobs

    def tuned(self) -> list[Tuned]:
        """What the runs of the tuning came to."""
        found = []
        for cell, by_lr in self._trials.items():
            task = TASKS[next(iter(by_lr.values()))[0].settings.task]
            target = self._target(next(iter(by_lr.values()))[0].settings)
            means = {lr: _mean([_final(job, target) for job in jobs]) for lr, jobs in by_lr.items()}
            good = [lr for lr, mean in means.items() if mean is not None]
            best = (max if task.higher_is_better else min)(good, key=lambda lr: means[lr] or 0.0, default=None)
            found.append(Tuned(cell, target, means, best))
        return found

    def _target(self, settings: Settings) -> str:
        """The metric that the tuning goes by."""
        target = TASKS[settings.task].target
        if not self.sweep.tune or self.sweep.tune.by == "global":
            return target
        own = CLIENT_METHODS[settings.method].take_up is not None
        return f"{wire.PERSONAL if own else wire.TUNED}_{target}"

    def _cell(self, own: Own) -> Cell:
        at = self.sweep.tune.at if self.sweep.tune else {}
        return tuple((key, at.get(key, value)) for key, value in own.items() if key != "seed")

    def _rates(self, cell: Cell) -> Sequence[float]:
        assert self.sweep.tune
        rates, config = self.sweep.tune.lr, self.common | dict(cell)
        if not isinstance(rates, dict):
            return rates
        if not isinstance(config["method"], str):
            raise SettingsError(
                f"{self.path}: method = {config['method']!r}: allowed is one of {', '.join(STRATEGIES)}"
            )
        method = CLIENT_METHODS.get(config["method"])
        family = method.family_with(config["local_optimizer"]) if method else ""
        if found := rates.get(config["method"]) or rates.get(family):
            return found
        raise SettingsError(
            f"{self.path}: tune.lr: neither {config['method']!r} nor its family, {family!r}, is there; allowed is a "
            f"list for each method or family, or one list for all"
        )

    def _job(self, kind: str, own: Own) -> Job:
        name = ",".join(f"{key}={show(value)}" for key, value in own.items())
        name = re.sub(r"[^\w.,=+-]", "-", name) or "run"
        if len(name) > LONGEST_NAME:
            name = f"{name[:LONGEST_NAME]}-{sha256(name.encode()).hexdigest()[:8]}"
        place = {"output": str(self.folder / kind), "name": name}
        try:
            settings = parse(self.common | own | place)
            relevant = tuple(getattr(settings, key) for key in ("task", "split", *TaskSettings.model_fields))
            settings = for_this_machine(
                settings, self.engine, with_data=self.looks and relevant not in self._data_checked
            )
            self._data_checked.add(relevant)
            settings, _ = with_budget(settings)
        except (SettingsError, BadData) as error:
            raise SettingsError(f"{self.path}: {name}: {error}") from None
        return Job(self.folder / kind / name, settings)

    def _check(self, jobs: Sequence[Job]) -> None:
        folders: set[Path] = set()
        for job in jobs:
            if job.folder in folders:
                raise SettingsError(f"{self.path}: {job.folder.name}: it has this run twice; allowed is once")
            folders.add(job.folder)
            if self.looks:
                job.check_folder()


def _final(job: Job, target: str) -> float | None:
    """None where the run failed, or clients whose part of the mean is missing: those left may be the easy ones."""
    record = job.record()
    if not record or record.status != COMPLETED or not record.final:
        return None
    if target != record.task.target and record.final.get(PERSONAL_FAILURES):
        return None
    return record.final.get(target)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None
