"""Runs as a table, methods by conditions: only runs that are alike in all but their seed share a cell."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scipy.stats import ttest_rel

from clients.local_optimizers import LOCAL_OPTIMIZERS
from fedact_flwr.experiments.runs import MACHINE, READ_BY, Run, show
from fedact_flwr.failure import COMPLETED
from fedact_flwr.settings import AUTO, Settings, method_settings
from strategies import STRATEGIES
from tasks import TASKS
from tasks.task import Task

# Settings of how one learns, and not of what is learned; rows differ by them. What follows from others comes first.
OF_EACH_METHOD = (
    "finetune_lr", "lr", "weight_decay", "server_lr", "beta1", "beta2", "alpha", "gamma", "method", "local_optimizer",
)  # fmt: skip
OF_ALL_METHODS = ("wire_delta", "aggregation", "trim", "weighting", "norm_gate", "norm_gate_factor", "clip_norm")
ROW_KEYS = tuple(
    dict.fromkeys(
        (
            *OF_EACH_METHOD,
            *(key for m in STRATEGIES for o in (AUTO, *LOCAL_OPTIMIZERS) for key in method_settings(m, o)),
            *OF_ALL_METHODS,
        )
    )
)
TOLD_BY = ("split", "dirichlet_alpha", "model", "task")  # of conditions, rather than by what follows from these
# Settings that change what is seen of a run, and not the run.
OBSERVING = (
    "evaluate_every", "client_evaluation", "personal_every", "diagnostics", "top_p", "tokens_per_parameter",
)  # fmt: skip

Values = Mapping[str, Any]  # of settings


@dataclass(frozen=True)
class Row:
    """A method, with those of its settings that tell it from others of its name."""

    method: str
    own: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        return ", ".join((self.method, *(f"{key} = {show(value)}" for key, value in self.own)))


@dataclass(frozen=True)
class Column:
    """A condition: the settings in which it differs from others; of a single one, what is learned."""

    own: tuple[tuple[str, Any], ...]
    task_name: str

    @property
    def task(self) -> Task:
        return TASKS[self.task_name]

    @property
    def label(self) -> str:
        values = dict(self.own)
        for key, splits in READ_BY.items():
            if values.get("split", splits[0]) not in splits:
                values.pop(key, None)
        names = [str(values.pop(key)) for key in ("task", "model") if key in values]
        if values.get("split", "dirichlet") == "dirichlet" and "dirichlet_alpha" in values:
            names.append(f"Dir({show(values.pop('dirichlet_alpha'))})")
            values.pop("split", None)
        return ", ".join((*names, *(f"{key} = {show(value)}" for key, value in values.items())))


Cells = Mapping[tuple[Row, Column], Sequence[Run]]


@dataclass(frozen=True)
class LeftOut:
    """A run that is in no cell, and why."""

    run: Run
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The table.

    Attributes
    ----------
    rows, columns : sequence
    cells : mapping of (Row, Column) to sequence of Run
        Each with at least one run, in the order of seeds; a pair that is not there has none.
    common : mapping
        The settings that all runs share, but for those of the machine.
    differing : sequence of str
        The settings in which conditions differ.
    left_out : sequence of LeftOut
    """

    rows: Sequence[Row]
    columns: Sequence[Column]
    cells: Cells
    common: Values
    differing: Sequence[str]
    left_out: Sequence[LeftOut]

    @cached_property
    def notes(self) -> list[str]:
        """In what the runs differ beside method and seed, in sentences."""
        notes = []
        if self.differing:
            notes.append(
                f"The runs differ in more than method and seed: in {', '.join(self.differing)}. Each combination is a "
                f"condition of its own; nothing is averaged over them."
            )
        for method in dict.fromkeys(row.method for row in self.rows):
            keys = list(dict.fromkeys(key for row in self.rows if row.method == method for key, _ in row.own))
            if keys:
                notes.append(f"Runs of {method} differ in {', '.join(keys)}: each value is a row of its own.")
        notes += [
            f"{key} is not the same in all rows or conditions: "
            + "; ".join(f"{method} {', '.join(map(show, values))}" for method, values in by_method.items())
            for key, by_method in self.unnamed.items()
        ]
        return notes

    @cached_property
    def unnamed(self) -> dict[str, dict[str, list[Any]]]:
        """Settings that differ and tell no row from another of its method, with their values by method.

        Not those that each method has a value of its own for, such as the learning rate.
        """
        runs = [(row, run) for (row, _), cell in self.cells.items() for run in cell]
        found: dict[str, dict[str, list[Any]]] = {}
        for key in (key for key in ROW_KEYS if key not in OF_EACH_METHOD):
            values: dict[str, dict[Any, None]] = {}
            for row, run in runs:
                reads = method_settings(row.method, run.settings["local_optimizer"])
                if key not in dict(row.own) and (key in reads or key in OF_ALL_METHODS):
                    values.setdefault(row.method, {})[run.effective.get(key)] = None
            if len({value for of_method in values.values() for value in of_method}) > 1:
                found[key] = {method: list(of_method) for method, of_method in values.items()}
        return found

    @property
    def usual_seeds(self) -> int:
        """How many runs most cells have."""
        return statistics.mode(len(cell) for cell in self.cells.values())

    def finals(self, row: Row, column: Column) -> dict[int, float]:
        """The target after the last evaluated round, by seed."""
        target = column.task.target
        return {run.settings["seed"]: run.final[target] for run in self.cells.get((row, column), ()) if run.final}

    def ranking(self, column: Column) -> list[Row]:
        """The rows that the column has, the best mean first."""
        means = {
            row: statistics.fmean(self.finals(row, column).values()) for row in self.rows if self.finals(row, column)
        }
        return sorted(means, key=lambda row: means[row], reverse=column.task.higher_is_better)

    def paired_test(self, column: Column) -> "PairedTest | None":
        """Of the best row against the next one; None where there is no second."""
        ranking = self.ranking(column)
        if len(ranking) < 2:
            return None
        best, other = ranking[:2]
        a, b = self.finals(best, column), self.finals(other, column)
        seeds = sorted(a.keys() & b.keys())
        differences = [a[seed] - b[seed] for seed in seeds]
        p = None
        if len(seeds) > 1 and len({round(difference, 12) for difference in differences}) > 1:
            p = float(ttest_rel([a[seed] for seed in seeds], [b[seed] for seed in seeds]).pvalue)
        return PairedTest(best, other, statistics.fmean(differences) if seeds else None, len(seeds), p)


@dataclass(frozen=True)
class PairedTest:
    """A paired t-test, two-sided, over the seeds that two rows share.

    ``p`` is None for fewer than two seeds and for differences that are all the same, ``difference`` without any.
    """

    best: Row
    other: Row
    difference: float | None
    seeds: int
    p: float | None


def compare(runs: Sequence[Run], ignored: Sequence[str] = ()) -> Comparison:
    """The table of these runs; ``ignored`` are settings that may differ within a cell, beside those of the machine."""
    left_out, good = [], []
    for run in runs:
        if run.status != COMPLETED:
            left_out.append(LeftOut(run, run.status + (f": {run.cause}" if run.cause else "")))
        elif run.final is None:
            evaluated = any(run.task.target in line for line in run.rounds)
            why = f"its {run.task.target} is no number in the end" if evaluated else "it was never evaluated"
            left_out.append(LeftOut(run, why))
        else:
            good.append(run)

    but = f", but for {', '.join(ignored)}," if ignored else ""
    ignored = (*ignored, *MACHINE, *OBSERVING, "seed")
    keys = [key for key in dict.fromkeys(key for run in good for key in run.settings) if key not in ignored]
    differing = _differing(good, [key for key in keys if key not in ROW_KEYS])
    told_by = sorted(differing, key=lambda key: TOLD_BY.index(key) if key in TOLD_BY else -1)
    column_keys = _telling([good], told_by) or ["task", "model"]
    columns: dict[Column, list[Run]] = {}
    for run in good:
        columns.setdefault(Column(_values(run, column_keys), run.settings["task"]), []).append(run)

    row_keys = [key for key in ROW_KEYS if key in keys and key != "method"]
    own = {
        method: _telling(
            [[run for run in column if run.settings["method"] == method] for column in columns.values()], row_keys
        )
        for method in dict.fromkeys(run.settings["method"] for run in good)
    }
    cells: dict[tuple[Row, Column], list[Run]] = {}
    for column, in_column in columns.items():
        for run in sorted(in_column, key=lambda run: (run.settings["seed"], run.folder)):
            row = Row(run.settings["method"], _values(run, own[run.settings["method"]]))
            cell = cells.setdefault((row, column), [])
            if cell and cell[-1].settings["seed"] == run.settings["seed"]:
                left_out.append(LeftOut(run, f"the same seed and settings{but} as {cell[-1].folder.name}"))
            else:
                cell.append(run)

    rows = sorted({row for row, _ in cells}, key=lambda row: (list(STRATEGIES).index(row.method), _sortable(row.own)))
    common = {key: good[0].effective.get(key) for key in keys} if good else {}
    shared = {key: value for key, value in common.items() if not _differing(good, [key])}
    return Comparison(rows, sorted(columns, key=lambda c: _sortable(c.own)), cells, shared, differing, left_out)


def _telling(groups: Sequence[Sequence[Run]], keys: Sequence[str]) -> list[str]:
    """The fewest of these settings that tell runs of a group apart, where they differ in any.

    A setting that follows from the others in each group, as a tuned learning rate does, is not needed.
    """
    needed = [key for key in keys if any(_differing(group, [key]) for group in groups)]
    for key in list(needed):
        rest = [other for other in needed if other != key]
        if all(_determined(group, rest, key) for group in groups):
            needed = rest
    order = list(Settings.model_fields)
    return sorted(needed, key=lambda key: order.index(key) if key in order else -1)


def _determined(runs: Sequence[Run], by: Sequence[str], key: str) -> bool:
    seen: dict[tuple[tuple[str, Any], ...], Any] = {}
    return all(seen.setdefault(_values(run, by), run.effective.get(key)) == run.effective.get(key) for run in runs)


def _differing(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    return [key for key in keys if len({run.effective.get(key) for run in runs}) > 1]


def _values(run: Run, keys: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, run.effective.get(key)) for key in keys)


def _sortable(own: Sequence[tuple[str, Any]]) -> list[tuple[str, float, str]]:
    """Numbers by size, before words."""
    return [
        (key, float(value), "") if isinstance(value, int | float) else (key, float("inf"), str(value))
        for key, value in own
    ]
