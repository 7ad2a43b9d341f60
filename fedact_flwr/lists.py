"""What `fedact methods`, `fedact tasks` and `fedact split` print."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from clients.local_optimizers import LOCAL_OPTIMIZERS
from clients.methods import CLIENT_METHODS
from fedact_flwr.server_app import check, client_labels
from fedact_flwr.settings import AUTO, SettingsError, dump, method_settings, parse, read_defaults, read_settings
from strategies import STRATEGIES, wire
from tasks import TASKS
from tasks.split import ImpossibleSplit


def print_methods() -> None:
    """What a client does, what travels each way, and the methods' own settings."""
    defaults, console = read_defaults(), Console(highlight=False, soft_wrap=False)
    for name, strategy in STRATEGIES.items():
        client, values = CLIENT_METHODS[name], dump(parse(defaults | {"method": name}))
        compact = "second_moment" in strategy.settings_used
        console.print(f"[bold]{name}[/bold]  {strategy.source}")
        grid = Table.grid(padding=(0, 2))
        grid.add_row("  clients", client.local_step)
        grid.add_row("  family", client.family_with(AUTO))
        grid.add_row("  down", _records((wire.MODEL, *strategy.broadcast), compact))
        grid.add_row("  up", _records((wire.DELTA, *strategy.returned), compact))
        grid.add_row("  settings", _values(values, ("server_lr", *method_settings(name))))
        console.print(grid)
    console.print("\nlocal_optimizer, its family and settings:")
    grid = Table.grid(padding=(0, 2))
    values = dump(parse(defaults))
    for name, optimizer in LOCAL_OPTIMIZERS.items():
        grid.add_row(f"  {name}", optimizer.family, _values(values, optimizer.settings))
    console.print(grid)
    console.print("\nThe family chooses a task's learning rate and weight decay, see `fedact tasks`.")


def _records(names: tuple[str, ...], compact: bool) -> str:
    """What travels, and how much of it for each float32 parameter. A mean over a block is one number for many."""
    means = f", {4 * len(names) - 4} with tensor or block means" if compact else ""
    return f"{', '.join(names)}: {4 * len(names)} bytes per parameter{means}"


def _values(values: Mapping[str, object], keys: tuple[str, ...]) -> str:
    return " ".join(f"{key}={values[key]}" for key in keys)


def print_tasks() -> None:
    """Data, models, the tasks' own settings, and what "auto" stands for by family or method."""
    console = Console(highlight=False, soft_wrap=False)
    defaults = read_defaults()
    for name, task in TASKS.items():
        console.print(f"[bold]{name}[/bold]  {task.summary}")
        grid = Table.grid(padding=(0, 2))
        grid.add_row("  target", f"{task.target}, {'higher' if task.higher_is_better else 'lower'} is better")
        grid.add_row("  models", ", ".join(task.models))
        for who, values in task.defaults.items():
            grid.add_row(f"  {who}", " ".join(f"{key}={value:g}" for key, value in values.items()))
        grid.add_row("  settings", _values(defaults, tuple(task.settings_used)) or "none of its own")
        console.print(grid)


def print_split(files: Sequence[Path], overrides: Sequence[str], picture: Path | None) -> None:
    """How a run's training data is split among its clients. Raises `SettingsError`."""
    settings = read_settings(files, overrides)
    check(settings)
    try:
        histograms = client_labels(settings)
    except ImpossibleSplit as error:
        raise SettingsError(str(error)) from None
    how = f"{settings.split} {settings.dirichlet_alpha:g}" if "dirichlet" in settings.split else settings.split
    title = f"{settings.task}, {how}, {settings.clients} clients, seed {settings.seed}"
    if picture:
        from fedact_flwr.experiments.pictures import draw_split

        try:
            draw_split(picture, histograms, title)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--picture {picture}: {error}") from None

    console = Console(highlight=False, soft_wrap=True)
    console.print(title)
    sizes, classes = histograms.sum(1), (histograms > 0).sum(1)
    for what, values in (("examples", sizes), ("classes", classes)):
        console.print(f"{what} of a client: {values.min()} to {values.max()}, median {np.median(values):g}")
    share = (histograms.max(1) / sizes).mean()
    console.print(f"a client's most frequent class holds {100 * share:.0f} % of its examples, on average")
