"""What `fedact list`, `fedact show` and `fedact compare` print of records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedact_flwr.experiments.runs import Run, Unreadable, find_runs, run_in
from fedact_flwr.settings import SettingsError, dump, parse, read_defaults

LAST_ROUNDS = 10
LAST_FAILURES = 10
WIDE = 240  # columns where no terminal sets a limit
RESULT_KEYS = ("loss", "train_loss", "replies", "failures", "bytes_sent", "bytes_received", "client_seconds")


def print_runs(folders: Sequence[Path]) -> None:
    """One line a run, and below the folders that can't be read. Raises `SettingsError` where there is neither."""
    runs, unreadable = find_runs(folders)
    if not runs and not unreadable:
        where = " ".join(map(str, folders))
        raise SettingsError(f"{where}: no records; allowed is the folder of a record, or one with such folders")
    console = _console()
    table = Table("run", "status", "method", "task", "seed", "rounds", "final", "best", "seconds", box=None)
    for run in runs:
        done = run.rounds[-1] if run.rounds else {"round": 0, "seconds": 0.0}
        table.add_row(
            _path(run.folder), run.status, run.settings["method"], run.settings["task"], str(run.settings["seed"]),
            f"{done['round']}/{run.settings['rounds']}", _target(run, run.final), _target(run, run.best),
            f"{done['seconds']:.0f}",
        )  # fmt: skip
    console.print(table)
    print_unreadable(console, unreadable)


def print_unreadable(console: Console, unreadable: Sequence[Unreadable]) -> None:
    for folder in unreadable:
        console.print(f"left out: {_path(folder.folder)}: {folder.reason}", style="yellow", markup=False)


def print_run(folder: Path) -> None:
    """Its settings, its result, its last rounds and its failures. Raises `SettingsError`."""
    run = run_in(folder)
    console, target = _console(), run.task.target
    console.print(f"{_path(run.folder)}: {run.status}" + (f", {run.cause}" if run.cause else ""), markup=False)

    usual = dump(parse(read_defaults() | {key: run.settings[key] for key in ("task", "method")}))
    console.print("\nsettings that are not the defaults of task and method:")
    grid = Table.grid(padding=(0, 2))
    for key in ("task", "method", *run.differing(usual, ("output", "name"))):
        grid.add_row(f"  {key}", _value(run.settings[key]))
    console.print(grid)

    if run.rounds:
        console.print(f"\n{target}: final {_target(run, run.final)}, best {_target(run, run.best)}")
        table = Table("round", target, "loss", "train loss", "clients", "MB down + up", "seconds so far", box=None)
        for line in run.rounds[-LAST_ROUNDS:]:
            traffic = " + ".join(f"{line[key] / 1e6:.2f}" for key in ("bytes_sent", "bytes_received") if line.get(key))
            metrics = [_number(line.get(key)) for key in (target, "loss", "train_loss", "replies")]
            table.add_row(str(line["round"]), *metrics, traffic, f"{line['seconds']:.1f}")
        console.print(table)
    failed = [f"round {line['round']}, {text}" for line in run.rounds for text in line.get("failed", ())]
    if failed:
        last = f", the last {LAST_FAILURES}" if len(failed) > LAST_FAILURES else ""
        console.print(f"\n{len(failed)} failed replies{last}:")
        for text in failed[-LAST_FAILURES:]:
            console.print(f"  {text}", markup=False)


def print_comparison(folders: Sequence[Path]) -> None:
    """Of two runs the settings in which they differ, and the results side by side. Raises `SettingsError`."""
    a, b = runs = [run_in(folder) for folder in folders]
    console = _console()
    table = Table("setting", _path(a.folder), _path(b.folder), box=None)
    for key in a.differing(b.settings, ("output", "name")):
        table.add_row(key, *(_value(run.settings[key]) if key in run.settings else "-" for run in runs))
    console.print(table if table.row_count else "no setting differs")

    table = Table("result", _path(a.folder), _path(b.folder), box=None)
    table.add_row("status", *(run.status for run in runs))
    table.add_row("rounds", *(str(run.rounds[-1]["round"] if run.rounds else 0) for run in runs))
    for target in dict.fromkeys(run.task.target for run in runs):
        for which in ("final", "best"):
            lines = [run.final if which == "final" else run.best for run in runs]
            table.add_row(f"{which} {target}", *(_number(line.get(target) if line else None) for line in lines))
    for key in RESULT_KEYS:
        table.add_row(f"last {key}", *(_number(run.rounds[-1].get(key) if run.rounds else None) for run in runs))
    table.add_row("seconds", *(f"{run.rounds[-1]['seconds']:.1f}" if run.rounds else "-" for run in runs))
    console.print(table)


def _console() -> Console:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


def _path(folder: Path) -> str:
    """As it is seen from here."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _target(run: Run, line: Mapping[str, Any] | None) -> str:
    return f"{run.task.target} {line[run.task.target]:.4g} in round {line['round']}" if line else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value:.0f}"


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
