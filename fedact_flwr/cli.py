"""The command `fedact`. What a command needs is imported when it runs, so that help comes at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedact_flwr.failure import BAD_SETTINGS, RUN_FAILED, RUN_INTERRUPTED, fail

app = typer.Typer(no_args_is_help=True, add_completion=False, help="FedACT on Flower.", pretty_exceptions_enable=False)


class Engine(StrEnum):
    """What carries the messages."""

    flower = "flower"
    inprocess = "inprocess"


@contextmanager
def settings_errors_in_a_line() -> Iterator[None]:
    from fedact_flwr.settings import SettingsError

    try:
        yield
    except SettingsError as error:
        fail(str(error), BAD_SETTINGS)


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
    from fedact_flwr.run import run as run_here

    run_here(files or [], overrides or [], engine.value, ray, resume)


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
        with settings_errors_in_a_line():
            submit(connection, files or [], overrides or [])
    except SimulationFailed as error:
        fail(f"the run failed: {error}", RUN_FAILED)
    except KeyboardInterrupt:
        fail("interrupted; a run that has started goes on, `flwr ls` and `flwr stop` reach it", RUN_INTERRUPTED)


@app.command("settings")
def print_settings(files: Files = None, overrides: Overrides = None) -> None:
    """Print all settings of a run as a file that `flwr run . --run-config FILE` takes."""
    import tomli_w

    from fedact_flwr.settings import check_own_settings, dump, read_settings

    with settings_errors_in_a_line():
        settings = read_settings(files or [], overrides or [])
        check_own_settings(settings)
        typer.echo(tomli_w.dumps(dump(settings)), nl=False)


@app.command("sweep")
def run_sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="What runs there are; docs/sweeps.md.")],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the records; runs/NAME of NAME.toml if not given.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="In this engine each run is made.")] = Engine.inprocess,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPUs for all runs together; all if not given.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs, where device is cuda; all if not given.")] = None,
    per_gpu: Annotated[int, typer.Option(min=1, help="Runs at a time on each GPU.")] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Make runs that failed before once more.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, list the runs, make none.")] = False,
) -> None:
    """Make many runs: a grid of settings, methods and seeds, with tuned learning rates. Those that are done stay."""
    from fedact_flwr.experiments.sweeping import sweep

    sweep(file, overrides or [], output, engine.value, cpus, gpus, per_gpu, retry, dry_run)


@app.command("presets")
def show_presets(
    preset: Annotated[str | None, typer.Argument(metavar="[PRESET]", help="One of them in full.")] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Time 20 steps of each kind here, and estimate hours from them.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """List the paper's tables and figures: sweeps that reproduce them, what they cost, and versions for a laptop."""
    from fedact_flwr.experiments.presets import print_presets

    with settings_errors_in_a_line():
        print_presets(preset, overrides or [], trial)


Records = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[RUN ...]", help="Records, or folders of records; else runs."),
]


class Published(StrEnum):
    """Results that others published."""

    paper = "paper"


@app.command("report")
def write_report(
    records: Annotated[list[Path], typer.Argument(metavar="RUN ...", help="Records, sweeps, or folders of records.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder for NAME.html and NAME.md.")] = Path("report"),
    name: Annotated[str, typer.Option(help="Of these two files.")] = "report",
    title: Annotated[str | None, typer.Option(help="Of the page; else that of the sweep.")] = None,
    against: Annotated[
        Published | None, typer.Option(help="Beside the paper's numbers, where the condition is the same.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(metavar="METHOD", help="That rounds are saved over.")] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Count rounds to it, in the table's units, not to the baseline's end."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="A setting that may differ within a cell; repeat for more.")
    ] = None,
) -> None:
    """Write what runs came to: tables, curves, costs, as one page (HTML) and as Markdown."""
    from fedact_flwr.experiments.report import report

    report(records, output, name, title, against is Published.paper, baseline, target, ignore or [])


@app.command("list")
def list_runs(folders: Records = None) -> None:
    """List the runs in these folders: how they ended, and with what."""
    from fedact_flwr.experiments.show import print_runs

    with settings_errors_in_a_line():
        print_runs(folders or [Path("runs")])


@app.command("show")
def show_run(record: Annotated[Path, typer.Argument(metavar="RUN", help="A run's record.")]) -> None:
    """Show a run: settings, result, last rounds, failures."""
    from fedact_flwr.experiments.show import print_run

    with settings_errors_in_a_line():
        print_run(record)


@app.command("compare")
def compare_runs(
    one: Annotated[Path, typer.Argument(metavar="A", help="A run's record.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
) -> None:
    """Show in which settings two runs differ, and their results side by side."""
    from fedact_flwr.experiments.show import print_comparison

    with settings_errors_in_a_line():
        print_comparison([one, other])


@app.command()
def split(
    files: Files = None,
    overrides: Overrides = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it, client by class: .png, .svg, .pdf.")
    ] = None,
) -> None:
    """Show how a run's training data is split among its clients."""
    from fedact_flwr.lists import print_split

    with settings_errors_in_a_line():
        print_split(files or [], overrides or [], picture)


@app.command("generate")
def print_answer(
    record: Annotated[Path, typer.Argument(metavar="RUN", help="A run's record.")],
    prompt: Annotated[str, typer.Argument(help="What a user says; the task's template goes around it.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 128,
) -> None:
    """Print what the final model of a language task answers."""
    from fedact_flwr.generate import generate

    with settings_errors_in_a_line():
        typer.echo(generate(record, prompt, max_tokens))


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

    with settings_errors_in_a_line():
        for path in write_certificates(folder, hosts or [], nodes or [], days):
            typer.echo(path)


@app.command()
def methods() -> None:
    """List the methods: what a client does, what travels each way, and their own settings. See docs/algorithm.md."""
    from fedact_flwr.lists import print_methods

    print_methods()


@app.command()
def tasks() -> None:
    """List the tasks: data, models, their own settings, and what "auto" stands for by family or method."""
    from fedact_flwr.lists import print_tasks

    print_tasks()
