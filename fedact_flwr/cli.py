"""The command `fedact`."""

import contextlib
import logging
import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import numpy as np
import tomli_w
import torch
import typer
from rich.console import Console
from rich.table import Table

from clients.local_optimizers import LOCAL_OPTIMIZERS
from clients.methods import CLIENT_METHODS
from fedact_flwr.budget import with_budget
from fedact_flwr.checkpoint import FOLDER as CHECKPOINTS
from fedact_flwr.progress import Follow
from fedact_flwr.record import (
    FAILED,
    INTERRUPTED,
    SETTINGS_FILE,
    SUMMARY_FILE,
    locked,
    make_folder,
    read_summary,
    record_to_resume,
    results,
    write_rounds,
    write_summary,
)
from fedact_flwr.settings import (
    AUTO,
    Settings,
    SettingsError,
    check_own_settings,
    dump,
    method_settings,
    parse,
    read_defaults,
    read_file,
    read_override,
)
from strategies import STRATEGIES, wire
from tasks import TASKS
from tasks.split import ImpossibleSplit

BAD_SETTINGS, RUN_FAILED, RUN_INTERRUPTED = 2, 1, 130
LOG_FILE = "run.log"
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GPU_SHARE = 0.25  # client_gpus = "auto"

app = typer.Typer(no_args_is_help=True, add_completion=False, help="FedACT on Flower.", pretty_exceptions_enable=False)


class Engine(StrEnum):
    """What carries the messages."""

    flower = "flower"
    inprocess = "inprocess"


Files = Annotated[
    list[Path] | None, typer.Argument(metavar="[CONF.toml ...]", help="Files of settings; pyproject.toml lists all.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; repeat for more.")
]


@app.command()
def run(
    files: Files = None,
    overrides: Overrides = None,
    engine: Annotated[
        Engine, typer.Option(help="Flower's simulation, or all clients in this process.")
    ] = Engine.flower,
    ray: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A Ray cluster for the simulation; docs/deploy.md.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with the run of this record; --set rounds=N for more.")
    ] = None,
) -> None:
    """Train: the defaults of pyproject.toml, then the files in order, then each --set."""
    console = Console()
    try:
        settings = read_settings(files or [], overrides or [], resume)
        settings = _for_this_machine(settings, engine, ray)
        settings, budget = with_budget(settings)
        before = _rounds_before(settings) if settings.resume else ()
        folder = record_to_resume(settings) if settings.resume else make_folder(settings)
        settings = settings.model_copy(update={"output": str(folder.parent), "name": folder.name})
    except SettingsError as error:
        _fail(str(error), BAD_SETTINGS)

    console.print(
        f"{settings.method} on {settings.task}: {settings.clients_per_round} of {settings.clients} clients a round, "
        f"{settings.rounds} rounds, engine {engine}",
        highlight=False,
        soft_wrap=True,
    )
    if budget:
        console.print(budget, highlight=False, soft_wrap=True)
    if note := CLIENT_METHODS[settings.method].note(settings):
        note += " (so are the paper's own settings; see docs/algorithm.md)"
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    if engine is Engine.flower:
        console.print("starting Flower's simulation, which takes about half a minute", highlight=False)
    for number in ENDING_SIGNALS:  # a plain kill or a closed terminal ends a run as cleanly as Ctrl-C
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    if before:
        console.print(f"goes on after round {before[-1]['round']}", highlight=False)
    follow = Follow(folder, settings.rounds, TASKS[settings.task].target, console, before)
    try:
        with follow:
            _engine(engine, settings, folder / LOG_FILE, ray)()
    except KeyboardInterrupt:
        so_far = results(follow.lines, TASKS[settings.task])
        write_summary(folder, INTERRUPTED, "interrupted", so_far)
        message = f"interrupted after {so_far['rounds']} of {settings.rounds} rounds; record: {folder}"
        if any((folder / CHECKPOINTS).glob("round-*")):
            message += f"; fedact run --resume {folder} goes on"
        _fail(message, RUN_INTERRUPTED)
    except Exception as error:
        summary = read_summary(folder)
        with contextlib.suppress(OSError):  # the disk may be full
            with (folder / LOG_FILE).open("a") as log:
                traceback.print_exc(file=log)
            if summary is None:  # the ServerApp had no chance to write one
                write_summary(folder, FAILED, str(error), results(follow.lines, TASKS[settings.task]))
        cause = summary["cause"] if summary else error
        _fail(f"the run failed: {cause}; log: {folder / LOG_FILE}", RUN_FAILED)
    with contextlib.suppress(OSError):  # nobody may be there to read it
        console.print(follow.table())
        console.print(f"record: {folder}", highlight=False, soft_wrap=True, markup=False)


@app.command("submit")
def run_on_superlink(
    connection: Annotated[str, typer.Argument(help="A SuperLink, by its name in Flower's config.toml.")],
    files: Files = None,
    overrides: Overrides = None,
) -> None:
    """Train on the nodes of a SuperLink; `output` is a folder of the machine on which the ServerApp runs."""
    from fedact_flwr.simulation import SimulationFailed
    from fedact_flwr.submit import submit

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        settings = read_settings(files or [], overrides or [])
        check_own_settings(settings)
        if not Path(settings.output).is_absolute():
            raise SettingsError(
                f"output = {settings.output!r}: allowed is an absolute path, of the machine on which the ServerApp runs"
            )
        submit(connection, settings)
    except SettingsError as error:
        _fail(str(error), BAD_SETTINGS)
    except SimulationFailed as error:
        _fail(f"the run failed: {error}", RUN_FAILED)
    except KeyboardInterrupt:
        _fail("interrupted; a run that has started goes on, `flwr ls` and `flwr stop` reach it", RUN_INTERRUPTED)


@app.command("settings")
def print_settings(files: Files = None, overrides: Overrides = None) -> None:
    """Print all settings of a run as a file that `flwr run . --run-config FILE` takes."""
    try:
        settings = read_settings(files or [], overrides or [])
        check_own_settings(settings)
    except SettingsError as error:
        _fail(str(error), BAD_SETTINGS)
    typer.echo(tomli_w.dumps(dump(settings)), nl=False)


@app.command()
def split(
    files: Files = None,
    overrides: Overrides = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it, client by class: .png, .svg, .pdf.")
    ] = None,
) -> None:
    """Show how a run's training data is split among its clients."""
    from fedact_flwr.server_app import check, client_labels

    try:
        settings = read_settings(files or [], overrides or [])
        check(settings)
        histograms = client_labels(settings)
        how = f"{settings.split} {settings.dirichlet_alpha:g}" if "dirichlet" in settings.split else settings.split
        title = f"{settings.task}, {how}, {settings.clients} clients, seed {settings.seed}"
        if picture:
            from fedact_flwr.pictures import draw_split

            try:
                draw_split(picture, histograms, title)
            except (OSError, ValueError) as error:
                raise SettingsError(f"--picture {picture}: {error}") from None
    except (SettingsError, ImpossibleSplit) as error:
        _fail(str(error), BAD_SETTINGS)

    console = Console(highlight=False, soft_wrap=True)
    console.print(title)
    sizes, classes = histograms.sum(1), (histograms > 0).sum(1)
    for what, values in (("examples", sizes), ("classes", classes)):
        console.print(f"{what} of a client: {values.min()} to {values.max()}, median {np.median(values):g}")
    share = (histograms.max(1) / sizes).mean()
    console.print(f"a client's most frequent class holds {100 * share:.0f} % of its examples, on average")


@app.command("generate")
def print_answer(
    record: Annotated[Path, typer.Argument(metavar="RUN", help="A run's record.")],
    prompt: Annotated[str, typer.Argument(help="What a user says; the task's template goes around it.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 128,
) -> None:
    """Print what the final model of a language task answers."""
    from fedact_flwr.generate import generate

    try:
        typer.echo(generate(record, prompt, max_tokens))
    except SettingsError as error:
        _fail(str(error), BAD_SETTINGS)


@app.command("certs")
def make_certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where they are, or will be.")],
    hosts: Annotated[
        list[str] | None, typer.Option("--host", metavar="NAME", help="Of the SuperLink, as nodes and users call it.")
    ] = None,
    nodes: Annotated[
        list[str] | None, typer.Option("--node", metavar="NAME", help="A SuperNode to make a key for.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the SuperLink's certificate holds.")] = 825,
) -> None:
    """Make the TLS certificate of a SuperLink, or renew it, and the keys by which it knows SuperNodes."""
    from fedact_flwr.certificates import write_certificates

    try:
        for path in write_certificates(folder, hosts or [], nodes or [], days):
            typer.echo(path)
    except SettingsError as error:
        _fail(str(error), BAD_SETTINGS)


@app.command()
def methods() -> None:
    """List the methods: what a client does, what travels each way, and their own settings. See docs/algorithm.md."""
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


@app.command()
def tasks() -> None:
    """List the tasks: data, models, their own settings, and what "auto" stands for by family or method."""
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


def read_settings(files: list[Path], overrides: list[str], resume: Path | None = None) -> Settings:
    """Defaults, then those of the record that is resumed, then files, then overrides. Raises `SettingsError`."""
    config = read_defaults()
    for path in [resume / SETTINGS_FILE, *files] if resume else files:
        config |= read_file(path)
    config |= dict(read_override(text) for text in overrides)
    if resume:  # where it is now, and not where it was when it was written
        folder = resume.expanduser().resolve()
        config |= {"resume": str(folder), "output": str(folder.parent), "name": folder.name}
    return parse(config)


def _rounds_before(settings: Settings) -> Sequence[Mapping[str, Any]]:
    """The lines of the rounds that a resumed run has behind it; the record loses what came after its checkpoint."""
    from fedact_flwr.server_app import to_resume

    record = record_to_resume(settings)
    with locked(record):
        lines = to_resume(settings)[1].rounds
        try:
            write_rounds(record, lines)
            (record / SUMMARY_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(f"resume = {settings.resume!r}: {error}; allowed is a folder to write to") from None
    return lines


def _for_this_machine(settings: Settings, engine: Engine, ray: str | None) -> Settings:
    """Resolve what depends on the machine, so that both engines and the record agree. Raises `SettingsError`."""
    from clients.device import UnavailableDevice, prepare_device, require_compiler
    from fedact_flwr.server_app import check

    if settings.split == "nodes":
        raise SettingsError(
            'split = "nodes": fedact run has no nodes with data of their own; use flwr run on a federation, see '
            "docs/deploy.md"
        )
    if ray:
        _check_cluster(ray, engine)
    check(settings)
    device = prepare_device(settings.device, settings.threads).type
    if settings.compile:
        try:
            require_compiler(device)
        except UnavailableDevice as error:
            raise SettingsError(str(error)) from None
    gpus = settings.client_gpus
    if gpus is None:
        gpus = GPU_SHARE if device == "cuda" else 0.0
    if engine is Engine.flower and not ray:
        _check_resources(settings.threads, device, gpus)
    if settings.resume:  # in all else it is what it was
        return settings.model_copy(update={"client_gpus": gpus})
    # the record repeats the run from wherever it is read
    paths = {key: Path(getattr(settings, key)).expanduser() for key in ("data", "tokenizer", "model")}
    if settings.model in TASKS[settings.task].models:
        del paths["model"]
    absolute = {key: str(path.resolve()) for key, path in paths.items() if path.exists()}
    return settings.model_copy(update={"device": device, "client_gpus": gpus, **absolute})


def _check_cluster(ray: str, engine: Engine) -> None:
    host, _, port = ray.rpartition(":")
    if engine is not Engine.flower:
        raise SettingsError(f"--ray {ray}: allowed with --engine flower")
    if not host or not (port.isascii() and port.isdecimal()):
        raise SettingsError(f"--ray {ray}: allowed is HOST:PORT, where ray start --head listens")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise SettingsError(f"--ray {ray}: no Ray cluster answers there: {error}") from None


def _check_resources(threads: int, device: str, gpus: float) -> None:
    """Ray waits for ever for what the machine does not have."""
    cpus, cuda = os.cpu_count() or 1, torch.cuda.device_count()
    if threads > cpus:
        raise SettingsError(f"threads = {threads}: allowed is 1 to {cpus}, the CPUs of this machine")
    if gpus > cuda:
        allowed = f"0 to {cuda}, the GPUs of this machine" if cuda else "0, since this machine has no CUDA GPU"
        raise SettingsError(f"client_gpus = {gpus}: allowed is {allowed}")
    if device == "cuda" and gpus == 0:
        raise SettingsError(f"client_gpus = {gpus}: with device = 'cuda' allowed is above 0, to {cuda}, or \"auto\"")


def _engine(engine: Engine, settings: Settings, log_path: Path, ray: str | None) -> Callable[[], None]:
    if engine is Engine.flower:
        from fedact_flwr.simulation import run_simulation

        return lambda: run_simulation(settings, log_path, ray)

    from fedact_flwr.client_app import app as client_app
    from fedact_flwr.inprocess import run_inprocess
    from fedact_flwr.server_app import app as server_app

    def run() -> None:
        logger = logging.getLogger("flwr")  # to where Flower's own processes write, so that the terminal stays ours
        terminal, file = logger.handlers, logging.FileHandler(log_path)
        logger.handlers = [file]
        try:
            run_inprocess(server_app, client_app, settings.clients, dump(settings))
        finally:
            logger.handlers = terminal
            file.close()

    return run


def _fail(message: str, code: int) -> None:
    Console(stderr=True).print(f"error: {message}", style="red", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the run. An impatient second Ctrl-C must not cut the cleaning up short."""
    for ended in ENDING_SIGNALS:
        signal.signal(ended, signal.SIG_IGN)
    raise KeyboardInterrupt
