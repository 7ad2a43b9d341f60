"""`fedact report`: what runs came to, as a page and as Markdown."""

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter
from rich.console import Console

from fedact_flwr.experiments.comparison import ROW_KEYS, Column, Comparison, Row, compare
from fedact_flwr.experiments.document import Block, Figure, Heading, Paragraph, Table, write_document
from fedact_flwr.experiments.paper import against_paper
from fedact_flwr.experiments.personal import personalized
from fedact_flwr.experiments.pictures import Curve, Grid, curves, maps, mean_curve, split_svg
from fedact_flwr.experiments.runs import (
    RUNS_FOLDER,
    SWEEP_FILE,
    Run,
    Unreadable,
    effective,
    find_runs,
    find_sweeps,
    show,
)
from fedact_flwr.experiments.sweep import CURRENT_FILE, TUNING_FILE, Sweep, read_sweep
from fedact_flwr.experiments.wording import scale_of, spread, target_words
from fedact_flwr.failure import BAD_SETTINGS, fail
from fedact_flwr.record import CLIENTS_FILE
from fedact_flwr.settings import Settings, SettingsError, dump, parse, read_defaults

CURVES = {  # keys of a round's line, and what they are; the target comes before them
    "loss": "loss on the test data",
    "train_loss": "training loss of the clients",
    "direction_consistency": "direction consistency",
    "positive_score_ratio": "positive score ratio",
    "top_score_mass": "top-p score mass",
}
OTHER_METRICS = (
    "accuracy", "perplexity", "preference_accuracy", "loss", "token_accuracy", "response_nll", "reward_margin",
    "policy_gap",
)  # fmt: skip
BASELINES = ("local_adamw", "fedavg")  # the first that is there
Cell = tuple[Row, Column]


def report(
    paths: Sequence[Path], output: Path, name: str, title: str | None, against_the_paper: bool, baseline: str | None,
    target: float | None, ignored: Sequence[str],
) -> None:  # fmt: skip
    """Write the report; the arguments are those of the command."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        if odd := [key for key in ignored if key not in Settings.model_fields]:
            raise SettingsError(f"--ignore {odd[0]}: allowed are settings, see pyproject.toml")
        if not re.fullmatch(r"[\w.-]+", name):
            raise SettingsError(f"--name {name}: allowed are letters, digits, '.', '-' and '_'")
        runs, unreadable = find_runs(paths, tuning=False)
        sweeps, failures = _read_sweeps(find_sweeps(paths))
        unreadable += failures
        current = [run for run in runs if _is_current(run, sweeps)]
        unreadable += [Unreadable(run.folder, "its sweep no longer has it") for run in runs if run not in current]
        comparison = compare(current, ignored)
        if not comparison.cells:
            raise SettingsError(
                f"{' '.join(map(str, paths))}: no run that completed; allowed are records, or folders of records"
            )
        methods = dict.fromkeys(row.method for row in comparison.rows)
        if baseline is not None and baseline not in methods:
            raise SettingsError(f"--baseline {baseline}: allowed is one of {', '.join(methods)}")
        if baseline is None and (target is not None or len(methods) > 1):
            baseline = next((m for m in BASELINES if m in methods), next(iter(methods)))
        own_title, about = _title(sweeps, comparison)
        blocks = [
            *map(Paragraph, about),
            *_overview(comparison, unreadable),
            *_results(comparison),
            *personalized(comparison),
            *(against_paper(comparison) if against_the_paper else []),
            *_tuning(sweeps),
            *_over_rounds(comparison),
            *_sensitivity(comparison),
            *(_rounds_to_target(comparison, baseline, target) if baseline else []),
            *_costs(comparison),
            *_splits(comparison),
            *_runs(comparison),
        ]
        files = write_document(output, name, title or own_title, blocks)
    except SettingsError as error:
        fail(str(error), BAD_SETTINGS)
    except OSError as error:
        fail(f"--output {output}: {error}; allowed is a folder to write to", BAD_SETTINGS)
    for folder, reason in _left_out(comparison, unreadable):
        console.print(f"left out: {folder}: {reason}", style="yellow", markup=False)
    for note in comparison.notes:
        console.print(note, markup=False)
    for file in files:
        console.print(str(file), markup=False)


class TunedCell(BaseModel):
    """A row of `TUNING_FILE`."""

    cell: dict[str, Any]
    target: str
    by_lr: Annotated[list[tuple[float, float | None]], Field(min_length=1)]
    best: float | None


@dataclass(frozen=True)
class SweepFolder:
    """A sweep that was carried out: its file, what its tuning came to, and the names of its runs."""

    folder: Path
    sweep: Sweep
    tuning: Sequence[TunedCell]
    current: Sequence[str] | None


def _read_sweeps(folders: Sequence[Path]) -> tuple[list[SweepFolder], list[Unreadable]]:
    """Those that can be read; of the others the runs are reported all the same."""
    sweeps, failures = [], []
    for folder in folders:
        try:
            tuning = _read(folder / TUNING_FILE, TypeAdapter(list[TunedCell])) or []
            current = _read(folder / CURRENT_FILE, TypeAdapter(list[str]))
            sweeps.append(SweepFolder(folder, read_sweep(folder / SWEEP_FILE), tuning, current))
        except (SettingsError, OSError, ValueError) as error:
            failures.append(Unreadable(folder, f"what the sweep left can't be read: {' '.join(str(error).split())}"))
    return sweeps, failures


def _read(path: Path, adapter: TypeAdapter) -> Any:
    return adapter.validate_json(path.read_bytes()) if path.exists() else None


def _is_current(run: Run, sweeps: Sequence[SweepFolder]) -> bool:
    """Whether it is none of those that a sweep had before its file or its rates changed."""
    of = next((each for each in sweeps if run.folder.parent == each.folder / RUNS_FOLDER), None)
    return of is None or of.current is None or run.folder.name in of.current


def _title(sweeps: Sequence[SweepFolder], comparison: Comparison) -> tuple[str, list[str]]:
    """That of a sweep, and what the sweeps say of themselves."""
    title = f"{sum(map(len, comparison.cells.values()))} runs"
    if len(sweeps) == 1:
        title = sweeps[0].sweep.title or sweeps[0].folder.name
    return title, [each.sweep.about.strip() for each in sweeps if each.sweep.about]


def _overview(comparison: Comparison, unreadable: Sequence[Unreadable]) -> list[Block]:
    runs = sum(len(cell) for cell in comparison.cells.values())
    seeds = sorted({len(cell) for cell in comparison.cells.values()})
    many = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    counts = f"Runs: {runs}. Methods and variants: {len(comparison.rows)}. Conditions: {len(comparison.columns)}. "
    meaning = f"Seeds of each: {many}. Numbers are means over seeds, ± their standard deviation."
    blocks: list[Block] = [Paragraph(counts + meaning)]
    blocks += [Paragraph(note) for note in comparison.notes]
    machines = dict.fromkeys(run.machine for cell in comparison.cells.values() for run in cell if run.machine)
    if machines:
        blocks.append(Paragraph(f"Made on {'; '.join(machines)}."))
    left_out = [f"`{folder.name}`: {reason}" for folder, reason in _left_out(comparison, unreadable)]
    if left_out:
        blocks.append(Paragraph(f"Left out, {len(left_out)}: " + "; ".join(left_out)))
    return blocks


def _left_out(comparison: Comparison, unreadable: Sequence[Unreadable]) -> list[tuple[Path, str]]:
    runs = [(each.run.folder, each.reason) for each in comparison.left_out]
    return [*runs, *((each.folder, each.reason) for each in unreadable)]


def _results(comparison: Comparison) -> list[Block]:
    """The table, and what its first places are worth."""
    winners = {column: comparison.ranking(column)[0] for column in comparison.columns}
    rows, bold = [], set()
    for i, row in enumerate(comparison.rows):
        entries = [row.label]
        for j, column in enumerate(comparison.columns):
            finals = list(comparison.finals(row, column).values())
            entries.append(spread(finals, column.task.target, comparison.usual_seeds))
            if winners[column] == row and len(comparison.ranking(column)) > 1:
                bold.add((i, j + 1))
        rows.append(entries)
    header = ["method", *(f"{column.label}: {_target(column)}" for column in comparison.columns)]
    blocks: list[Block] = [Heading("Results"), Paragraph("After the last round; the best mean of a condition in bold.")]
    blocks.append(Table(header, rows, frozenset(bold)))

    others = [
        [column.label, row.label, *(_metric(comparison.cells.get((row, column), ()), key) for key in OTHER_METRICS)]
        for column in comparison.columns
        for row in comparison.rows
        if (row, column) in comparison.cells
    ]
    there = [i for i in range(len(OTHER_METRICS)) if any(entries[i + 2] != "-" for entries in others)]
    if there:
        header = ["condition", "method", *(target_words(OTHER_METRICS[i]) for i in there)]
        blocks.append(Paragraph("What else was measured after the last round:"))
        blocks.append(Table(header, [[*entries[:2], *(entries[i + 2] for i in there)] for entries in others]))

    tests = []
    for column in comparison.columns:
        if test := comparison.paired_test(column):
            p = "-" if test.p is None else f"{test.p:.3f}" if test.p >= 0.001 else "below 0.001"
            difference = "-" if test.difference is None else f"{_scale(column) * test.difference:+.4g}"
            tests.append([column.label, test.best.label, test.other.label, difference, str(test.seeds), p])
    if tests:
        blocks.append(
            Paragraph(
                "The best against the runner-up: mean difference over the seeds that both have, and p of a two-sided "
                "paired t-test, not corrected for the choice of the two."
            )
        )
        blocks.append(Table(["condition", "best", "runner-up", "difference", "seeds", "p"], tests))
    return blocks


def _tuning(sweeps: Sequence[SweepFolder]) -> list[Block]:
    blocks: list[Block] = []
    for each in sweeps:
        if not each.tuning or not each.sweep.tune:
            continue
        rows = []
        for tuned in each.tuning:
            cell = ", ".join(f"{key} = {show(value)}" for key, value in tuned.cell.items()) or "all"
            scale = scale_of(tuned.target)
            ends = ("failed" if mean is None else f"{scale * mean:.4g}" for _, mean in tuned.by_lr)
            tried = ", ".join(f"{lr:g}: {end}" for (lr, _), end in zip(tuned.by_lr, ends, strict=True))
            rates = [lr for lr, _ in tuned.by_lr]
            edge = tuned.best in (min(rates), max(rates)) and len(rates) > 1
            best = "none" if tuned.best is None else f"{tuned.best:g}"
            rows.append([cell, best, "the edge of the grid" if edge else "", f"{target_words(tuned.target)}: {tried}"])
        seeds = ", ".join(map(str, each.sweep.tune.seeds))
        words = f"The best by the mean of the final target over the tuning seeds ({seeds}), and all that was tried."
        name = f", {each.sweep.title or each.folder.name}" if len(sweeps) > 1 else ""
        blocks += [Heading(f"Learning rates{name}"), Paragraph(words)]
        blocks.append(Table(["tuned for", "learning rate", "", "target by learning rate"], rows))
    return blocks


def _over_rounds(comparison: Comparison) -> list[Block]:
    blocks: list[Block] = []
    targets = dict.fromkeys(column.task.target for column in comparison.columns)
    labels = [row.label for row in comparison.rows]
    for key in dict.fromkeys((*targets, *CURVES)):
        panels: dict[str, dict[str, Curve]] = {}
        for column in comparison.columns:
            if key in targets and key not in CURVES and key != column.task.target:
                continue
            found = {
                row.label: curve
                for row in comparison.rows
                if (curve := _curve(comparison.cells.get((row, column), ()), key, scale_of(key))) is not None
            }
            if found:
                panels[column.label] = found
        if panels:
            what = target_words(key) if key in targets else CURVES[key]
            caption = f"{what[0].upper()}{what[1:]} over rounds: mean over seeds, band of one standard deviation."
            blocks.append(Figure(f"rounds-{key}", caption, curves(panels, "round", what, labels)))
    return [Heading("Over rounds"), *blocks] if blocks else []


def _curve(runs: Sequence[Run], key: str, scale: float) -> Curve | None:
    """Over the rounds that all of the runs have a value for."""
    by_run = [{line["round"]: line[key] for line in run.rounds if line.get(key) is not None} for run in runs]
    by_run = [values for values in by_run if values]  # not every run has what is only watched
    rounds = sorted(set.intersection(*(set(values) for values in by_run))) if by_run else []
    if not rounds:
        return None
    values = scale * np.array([[run[r] for r in rounds] for run in by_run])
    return mean_curve(np.array(rounds), values)


def _sensitivity(comparison: Comparison) -> list[Block]:
    """Of methods whose rows differ by one number a curve, and by two a map."""
    blocks: list[Block] = []
    for method in dict.fromkeys(row.method for row in comparison.rows):
        rows = [row for row in comparison.rows if row.method == method and row.own]
        keys = [key for key, _ in rows[0].own] if rows else []
        if not 1 <= len(keys) <= 2 or not all(_is_number(value) for row in rows for _, value in row.own):
            continue
        axes = [sorted({dict(row.own)[key] for row in rows}) for key in keys]
        at = {tuple(dict(row.own)[key] for key in keys): row for row in rows}
        if max(len(axis) for axis in axes) < 2:
            continue
        caption = f"{method}: the final target by {' and '.join(keys)}, mean over seeds."
        name = f"sensitivity-{method}-{'-'.join(keys)}"
        if len(keys) == 1:
            panels: dict[str, dict[str, Curve]] = {}
            for column in comparison.columns:
                spreads = {x: _scaled(comparison, at[(x,)], column) for x in axes[0]}
                known = {x: values for x, values in spreads.items() if values}
                if known:
                    mean = np.array([statistics.fmean(values) for values in known.values()])
                    deviation = np.array([statistics.stdev(v) if len(v) > 1 else 0.0 for v in known.values()])
                    panels[column.label] = {method: Curve(np.array(list(known)), mean, deviation)}
            svg = curves(panels, keys[0], "final target", [method])
        else:
            grids = {}
            for column in comparison.columns:
                values = np.full((len(axes[0]), len(axes[1])), np.nan)
                for (a, b), row in at.items():
                    if finals := _scaled(comparison, row, column):
                        values[axes[0].index(a), axes[1].index(b)] = statistics.fmean(finals)
                if np.isfinite(values).any():
                    grids[column.label] = Grid(values, *([show(value) for value in axis] for axis in axes))
            svg = maps(grids, keys[1], keys[0])
        blocks.append(Figure(name, caption, svg))
    return [Heading("Sensitivity"), *blocks] if blocks else []


def _rounds_to_target(comparison: Comparison, baseline: str, target: float | None) -> list[Block]:
    """On the curve that is the mean over seeds, so that a baseline comes to its own final mean."""
    rows = []
    for column in comparison.columns:
        base = next((row for row in comparison.ranking(column) if row.method == baseline), None)
        wanted = target
        if target is None:
            if base is None:
                continue
            wanted = statistics.fmean(_scaled(comparison, base, column))
        assert wanted is not None
        rounds = {row: _first_round(comparison, row, column, wanted) for row in comparison.ranking(column)}
        of_base = rounds[base] if base else None
        for row in comparison.rows:
            if row in rounds:
                own = rounds[row]
                saving = f"{of_base / own:.2f}" if of_base and own else "-"
                compared = base.label if base else "-"
                reached = "-" if own is None else str(own)
                rows.append([column.label, f"{wanted:.4g}", row.label, reached, saving, compared])
    if not rows:
        return []
    which = "the target that was given" if target is not None else f"what the best of {baseline} comes to in the end"
    return [
        Heading("Rounds to a target"),
        Paragraph(
            f"The first evaluated round at which the mean over seeds is at least as good as {which}, and how many "
            f"times fewer rounds that is than the baseline needs; - where it is never reached."
        ),
        Table(["condition", "target", "method", "rounds", "times fewer", "than"], rows),
    ]


def _first_round(comparison: Comparison, row: Row, column: Column, wanted: float) -> int | None:
    curve = _curve(comparison.cells[row, column], column.task.target, _scale(column))
    if curve is None:
        return None
    sign = 1 if column.task.higher_is_better else -1
    reached = curve.x[sign * curve.mean >= sign * wanted - 1e-12 * abs(wanted)]
    return int(reached[0]) if len(reached) else None


def _costs(comparison: Comparison) -> list[Block]:
    rows = []
    for column in comparison.columns:
        for row in comparison.rows:
            if runs := comparison.cells.get((row, column)):
                lines = [line for run in runs for line in run.rounds if line["round"] > 0]
                mean = {key: _mean_in(lines, key) for key in ("bytes_sent", "bytes_received", "client_seconds")}
                seconds = [a_round for run in runs if (a_round := _seconds_a_round(run)) is not None]
                megabytes = [_number(mean[key], 1e-6) for key in ("bytes_sent", "bytes_received")]
                median = statistics.median(seconds) if seconds else None
                times = [_number(value, 1.0) for value in (median, mean["client_seconds"])]
                rows.append([column.label, row.label, *megabytes, *times])
    return [
        Heading("Bytes and time"),
        Paragraph(
            "Of a round: megabytes to all of its clients and back, seconds of the whole, evaluation included (median "
            "over runs), and of one client's work. Times are those of the machine that made the runs, beside whatever "
            "else it did."
        ),
        Table(["condition", "method", "MB down", "MB up", "seconds", "seconds of a client"], rows),
    ]


def _seconds_a_round(run: Run) -> float | None:
    first, last = run.rounds[0], run.rounds[-1]
    rounds = last["round"] - first["round"]
    return (last["seconds"] - first["seconds"]) / rounds if rounds else None


def _splits(comparison: Comparison) -> list[Block]:
    """Of each condition that differs in it, of its first seed."""
    blocks: list[Block] = []
    drawn: set[str] = set()
    for i, column in enumerate(comparison.columns):
        for run in (run for row in comparison.rows for run in comparison.cells.get((row, column), ())):
            try:
                clients = json.loads((run.folder / CLIENTS_FILE).read_text())
                histograms = np.array([client["labels"] for client in clients], dtype=np.int64)
            except (OSError, ValueError, KeyError, TypeError, OverflowError):
                continue
            if histograms.ndim == 2 and histograms.size and histograms.min() >= 0 and histograms.max() > 0:
                if (known := histograms.tobytes().hex()) not in drawn:
                    drawn.add(known)
                    title = f"{column.label}, seed {run.settings['seed']}"
                    caption = f"Examples of each class of each client: {title}."
                    blocks.append(Figure(f"split-{i + 1}", caption, split_svg(histograms, title)))
                break
    return [Heading("The split"), *blocks] if blocks else []


def _runs(comparison: Comparison) -> list[Block]:
    """What it takes to make them again."""
    usual = effective(dump(parse(read_defaults() | {"task": comparison.columns[0].task_name})))
    own = {key: value for key, value in comparison.common.items() if value != usual.get(key) or key == "task"}
    common = ", ".join(f"{key} = {show(value)}" for key, value in own.items())
    runs = [(row, column, run) for (row, column), cell in comparison.cells.items() for run in cell]
    keys = [key for key in ROW_KEYS if key != "method" and len({run.effective.get(key) for _, _, run in runs}) > 1]
    root = os.path.commonpath([run.folder.parent for _, _, run in runs])
    rows = [
        [
            row.label,
            column.label,
            *(show(run.effective.get(key, "-")) for key in keys),
            str(run.settings["seed"]),
            f"`{run.folder.relative_to(root)}`",
        ]
        for row, column, run in runs
    ]
    return [
        Heading("Runs"),
        Paragraph(f"Settings that all share and that are not the defaults: {common}."),
        Table(["method", "condition", *keys, "seed", "record"], sorted(rows)),
    ]


def _scale(column: Column) -> float:
    """Shares in percent."""
    return scale_of(column.task.target)


def _target(column: Column) -> str:
    return target_words(column.task.target)


def _scaled(comparison: Comparison, row: Row, column: Column) -> list[float]:
    return [_scale(column) * value for value in comparison.finals(row, column).values()]


def _metric(runs: Sequence[Run], key: str) -> str:
    """Mean and standard deviation after the last evaluated round, of what is not the target."""
    finals = [run.final for run in runs if run.final and run.task.target != key]
    values = [scale_of(key) * final[key] for final in finals if final.get(key) is not None]
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    missing = f" ({len(values)} of {len(runs)})" if len(values) < len(runs) else ""
    return f"{statistics.fmean(values):.4g}{spread}{missing}"


def _mean_in(lines: Sequence[Mapping[str, float]], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return statistics.fmean(values) if values else None


def _number(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{scale * value:.3g}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
