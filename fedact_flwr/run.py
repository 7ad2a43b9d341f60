"""`fedact run`: a run on this machine, from its settings to the table at its end."""

import contextlib
import logging
import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from rich.console import Console

from clients.device import UnavailableDevice, prepare_device, require_compiler
from clients.methods import CLIENT_METHODS
from fedact_flwr.budget import with_budget
from fedact_flwr.checkpoint import FOLDER as CHECKPOINTS
from fedact_flwr.failure import BAD_SETTINGS, FAILED, INTERRUPTED, RUN_FAILED, RUN_INTERRUPTED, fail
from fedact_flwr.orphan import end_with_parent
from fedact_flwr.personal import in_words
from fedact_flwr.progress import Follow
from fedact_flwr.record import (
    LOG_FILE,
    SUMMARY_FILE,
    locked,
    make_folder,
    read_summary,
    record_to_resume,
    results,
    write_rounds,
    write_summary,
)
from fedact_flwr.server_app import check, to_resume
from fedact_flwr.settings import Settings, SettingsError, check_own_settings, dump, read_settings
from tasks import TASKS

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDS_WITH_PARENT = "FEDACT_ENDS_WITH_PARENT"  # in the environment of a sweep's runs
GPU_SHARE = 0.25  # client_gpus = "auto"

Engine = Literal["flower", "inprocess"]  # what carries the messages


def run(files: Sequence[Path], overrides: Sequence[str], engine: Engine, ray: str | None, resume: Path | None) -> None:
    """Train, and show how it goes; the arguments are those of the command."""
    console = Console()
    try:
        settings = read_settings(files, overrides, resume)
        settings = for_this_machine(settings, engine, ray)
        settings, budget = with_budget(settings)
        before = _rounds_before(settings) if settings.resume else ()
        folder = record_to_resume(settings) if settings.resume else make_folder(settings)
        settings = settings.model_copy(update={"output": str(folder.parent), "name": folder.name})
    except SettingsError as error:
        fail(str(error), BAD_SETTINGS)

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
    if engine == "flower":
        console.print("starting Flower's simulation, which takes about half a minute", highlight=False)
    interrupt_on_signals()
    if os.environ.get(ENDS_WITH_PARENT):
        end_with_parent()
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
        fail(message, RUN_INTERRUPTED)
    except Exception as error:
        summary = read_summary(folder)
        with contextlib.suppress(OSError):  # the disk may be full
            with (folder / LOG_FILE).open("a") as log:
                traceback.print_exc(file=log)
            if summary is None:  # the ServerApp had no chance to write one
                write_summary(folder, FAILED, str(error), results(follow.lines, TASKS[settings.task]))
        cause = summary["cause"] if summary else error
        fail(f"the run failed: {cause}; log: {folder / LOG_FILE}", RUN_FAILED)
    with contextlib.suppress(OSError):  # nobody may be there to read it
        console.print(follow.table())
        if follow.lines and (personal := in_words(follow.lines[-1], TASKS[settings.task])):
            console.print(personal, highlight=False, soft_wrap=True)
        console.print(f"record: {folder}", highlight=False, soft_wrap=True, markup=False)


def _rounds_before(settings: Settings) -> Sequence[Mapping[str, Any]]:
    """The lines of the rounds that a resumed run has behind it; the record loses what came after its checkpoint."""
    record = record_to_resume(settings)
    with locked(record):
        lines = to_resume(settings)[1].rounds
        try:
            write_rounds(record, lines)
            (record / SUMMARY_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(f"resume = {settings.resume!r}: {error}; allowed is a folder to write to") from None
    return lines


def for_this_machine(settings: Settings, engine: Engine, ray: str | None = None, with_data: bool = True) -> Settings:
    """Resolve what depends on the machine, so that both engines and the record agree. Raises `SettingsError`.

    Not ``with_data``, the data is not looked at, which takes a while.
    """
    if settings.split == "nodes":
        raise SettingsError(
            'split = "nodes": fedact run has no nodes with data of their own; use flwr run on a federation, see '
            "docs/deploy.md"
        )
    if ray:
        _check_cluster(ray, engine)
    if with_data:
        check(settings)
    else:
        check_own_settings(settings)
    device = prepare_device(settings.device, settings.threads).type
    if settings.compile:
        try:
            require_compiler(device)
        except UnavailableDevice as error:
            raise SettingsError(str(error)) from None
    gpus = settings.client_gpus
    if gpus is None:
        gpus = GPU_SHARE if device == "cuda" else 0.0
    if engine == "flower" and not ray:
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
    if engine != "flower":
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
    if engine == "flower":
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


def interrupt_on_signals() -> None:
    """Have a plain kill and a closed terminal end this process as cleanly as Ctrl-C, by a KeyboardInterrupt."""
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the run. An impatient second Ctrl-C must not cut the cleaning up short."""
    for ended in ENDING_SIGNALS:
        signal.signal(ended, signal.SIG_IGN)
    raise KeyboardInterrupt
