"""`fedact presets`: the paper's tables and figures, the sweeps that reproduce them, and what those cost.

conf/sweeps/paper/NAME.toml is a preset, and conf/sweeps/laptop/NAME_laptop.toml the same in small.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from clients.device import OutOfMemory
from clients.training import NonFinite
from fedact_flwr.experiments.sweep import Plan
from fedact_flwr.experiments.trial import STEPS, device_name, seconds_per_step
from fedact_flwr.settings import PROJECT, Settings, SettingsError, read_defaults
from tasks import TaskSettings
from tasks.task import BadData, first_line

PAPER, LAPTOP = (PROJECT / "conf" / "sweeps" / which for which in ("paper", "laptop"))
DECISIVE = ("task", *TaskSettings.model_fields, "batch_size", "micro_batch_size", "precision", "compile")
WIDE = 160  # columns where no terminal sets a limit

# What they show, and over the runs of which tables. rounds.jsonl of each run has all of it.
FIGURES = {
    "figure_1": ("direction consistency, positive score ratio, top-p score mass over rounds, by method", ["table_1"]),
    "figure_2": ("accuracy over rounds, by method", ["table_1"]),
    "figure_3": ("direction consistency over rounds, by method", ["table_1"]),
    "figure_4": ("pre-training loss over rounds, by method", ["table_2"]),
    "figure_5": ("fine-tuning loss over rounds, by method", ["table_11_fedit", "table_11_fedva"]),
    "figure_6": ("fine-tuning loss over rounds, by method", ["table_11_fedit", "table_11_fedva"]),
    "figure_7": ("accuracy over rounds, by method", ["table_1", "table_10"]),
    "figure_8": ("accuracy over rounds, by method", ["table_1", "table_10"]),
    "figure_9": ("accuracy over rounds, by method", ["table_1", "table_10"]),
}

Kind = tuple[object, ...]  # what a step's time depends on


class Preset:
    """A table of the paper: its runs, and those of its version for a laptop. Raises `SettingsError`."""

    def __init__(self, name: str, overrides: Sequence[str]) -> None:
        self.name = name
        self.paper = Plan(PAPER / f"{name}.toml", Path("runs"), overrides, "inprocess", looks=False)
        self.laptop = Plan(LAPTOP / f"{name}_laptop.toml", Path("runs"), [], "inprocess", looks=False)

    def hours(self, seconds: dict[Kind, float]) -> str:
        """Of all its steps, where ``seconds`` are those of a step; "-" where one is not known."""
        steps = Counter[Kind]()
        for job in self.paper.expected:
            steps[_kind(job.settings)] += job.steps
        if steps.keys() - seconds.keys():
            return "-"
        return f"{sum(n * seconds[kind] for kind, n in steps.items()) / 3600:,.1f}"


def print_presets(name: str | None, overrides: Sequence[str], trial: bool) -> None:
    """All of them in a table, or one in full; with ``trial`` the hours it takes here. Raises `SettingsError`."""
    tables = sorted(
        (path.stem for path in PAPER.glob("*.toml")), key=lambda stem: (int(re.findall(r"\d+", stem)[0]), stem)
    )
    if name not in (None, *tables, *FIGURES):
        raise SettingsError(f"preset {name!r}: allowed is one of {', '.join((*tables, *FIGURES))}")
    wanted = tables if name is None else FIGURES[name][1] if name in FIGURES else [name]
    presets = [Preset(table, overrides) for table in wanted]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    device = device_name(presets[0].paper.expected[0].settings)
    seconds = _tried(presets, device, console) if trial else {}
    if name is None:
        _print_all(presets, seconds, device if trial else "", console)
    else:
        if name in FIGURES:
            console.print(f"{name}: {FIGURES[name][0]}; from rounds.jsonl of these runs:\n", soft_wrap=True)
        for preset in presets:
            _print_one(preset, f", {preset.hours(seconds)} hours on {device}" if trial else "", console)


def _kind(settings: Settings) -> Kind:
    return tuple(getattr(settings, key) for key in DECISIVE)


def _tried(presets: Sequence[Preset], device: str, console: Console) -> dict[Kind, float]:
    """Seconds of a step of each kind; those that can't be had are left out, and the reason is printed."""
    kinds: dict[Kind, Settings] = {}
    for preset in presets:
        for job in preset.paper.expected:
            if job.settings.method == "fedact":
                kinds.setdefault(_kind(job.settings), job.settings)
    console.print(f"{STEPS} steps of FedACT on random inputs, on {device}; seconds a step:", markup=False)
    seconds = {}
    for kind, s in kinds.items():
        try:
            seconds[kind], size = seconds_per_step(s)
            reckoned = f", reckoned from {size} of {s.batch_size} examples" if size < s.batch_size else ""
            words = f"{seconds[kind]:.3g}{reckoned}"
        except (BadData, ImportError, OutOfMemory, NonFinite) as error:
            words = f"no estimate: {first_line(error)}"
        console.print(f"  {s.task}, {s.model}, {s.precision}: {words}", markup=False, soft_wrap=True)
    console.print(
        "hours leave out evaluation, server and messages; text counts as long as max_length allows\n", soft_wrap=True
    )
    return seconds


def _print_all(presets: Sequence[Preset], seconds: dict[Kind, float], device: str, console: Console) -> None:
    table = Table("preset", "shows", box=None)
    for column in ("runs", "steps", f"hours on {device}" if device else "hours", "laptop runs", "steps"):
        table.add_column(column, justify="right")
    for preset in presets:
        paper, laptop = preset.paper, preset.laptop
        table.add_row(
            preset.name, paper.sweep.title, str(len(paper.expected)), f"{paper.steps:,}", preset.hours(seconds),
            str(len(laptop.expected)), f"{laptop.steps:,}",
        )  # fmt: skip
    for name, (shows, tables) in FIGURES.items():
        table.add_row(name, f"{shows}: the runs of {' and '.join(tables)}")
    console.print(table)
    for words in (
        "\nsteps are optimizer steps of all clients; --trial estimates hours on this machine",
        f"fedact sweep {os.path.relpath(PAPER)}/PRESET.toml makes the runs of a table",
        f"fedact sweep {os.path.relpath(LAPTOP)}/PRESET_laptop.toml makes them in small",
        "fedact presets PRESET says more",
    ):
        console.print(words, soft_wrap=True, markup=False)


def _print_one(preset: Preset, hours: str, console: Console) -> None:
    for plan, cost in ((preset.paper, hours), (preset.laptop, "")):
        sweep, defaults = plan.sweep, read_defaults()
        cases = [case for case in sweep.cases if case]
        own = {key: value for key, value in plan.common.items() if value != defaults[key]} | sweep.grid
        lines = [
            sweep.title,
            *([sweep.about.strip()] if sweep.about else []),
            f"{len(plan.expected)} runs, {plan.steps:,} steps of clients{cost}",
            *(f"  {key} = {json.dumps(value)}" for key, value in own.items() if not any(key in case for case in cases)),
            *("  " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in case.items()) for case in cases),
            f"fedact sweep {os.path.relpath(plan.path)}",
            "",
        ]
        console.print("\n".join(lines), soft_wrap=True, markup=False)
