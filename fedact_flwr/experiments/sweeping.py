"""`fedact sweep`: the runs that tune, the runs to report, and what failed of them."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from rich.console import Console

from fedact_flwr.experiments.pool import Place, Progressing, carry_out
from fedact_flwr.experiments.runs import SWEEP_FILE
from fedact_flwr.experiments.sweep import CURRENT_FILE, TUNING_FILE, Job, Plan, Tuned
from fedact_flwr.failure import BAD_SETTINGS, RUN_FAILED, RUN_INTERRUPTED, fail
from fedact_flwr.files import write_whole
from fedact_flwr.record import locked
from fedact_flwr.run import Engine, interrupt_on_signals
from fedact_flwr.settings import SettingsError


def sweep(
    path: Path,
    overrides: Sequence[str],
    folder: Path | None,
    engine: Engine,
    cpus: int | None,
    gpus: int | None,
    per_gpu: int,
    retry: bool,
    dry_run: bool,
) -> None:
    """Carry a sweep out, or what is left of it; the arguments are those of the command."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    try:
        plan = Plan(path, folder or Path("runs") / path.stem, overrides, engine)
        runs = plan.expected
        places = _places([*plan.tuning, *runs], engine, cpus, gpus, per_gpu)
        tuning = f"{len(plan.tuning)} runs to tune the learning rate, then " if plan.tuning else ""
        console.print(f"{tuning}{len(runs)} runs; {plan.steps:,} steps of clients, {len(places)} runs at a time")
        if dry_run:
            for job in (*plan.tuning, *runs):
                console.print(str(job.folder.relative_to(plan.folder)))
            if plan.tuning:
                console.print("the last ones with the learning rates that are tuned")
            return
        with _folder(plan.folder):
            interrupt_on_signals()
            said = "".join(f"# --set {text}\n" for text in overrides)
            write_whole(plan.folder / SWEEP_FILE, said + path.read_text())
            try:
                missing = _carry_out(plan, places, retry, console)
            except KeyboardInterrupt:
                fail(f"interrupted; the same command goes on with {plan.folder}", RUN_INTERRUPTED)
    except SettingsError as error:
        fail(str(error), BAD_SETTINGS)
    except OSError as error:
        fail(f"--output {folder or plan.folder}: {error}; allowed is a folder to write to", BAD_SETTINGS)
    console.print(f"fedact report {plan.folder} shows the results")
    if missing:
        fail(f"{len(missing)} of the runs to report are missing; --retry makes those that failed again", RUN_FAILED)


def _carry_out(plan: Plan, places: Sequence[Place], retry: bool, console: Console) -> list[str]:
    """Make what is left, list what failed, now or before, and give what is missing of the runs to report."""
    later = sum(job.steps for job in plan.expected)
    failures = _make_left(plan, plan.tuning, "tuning", later, places, retry, console)
    tuned = plan.tuned()
    if tuned:
        write_whole(plan.folder / TUNING_FILE, json.dumps([_row(each) for each in tuned], indent=1) + "\n")
    runs = plan.runs({each.cell: each.best for each in tuned if each.best is not None})
    write_whole(plan.folder / CURRENT_FILE, json.dumps([job.folder.name for job in runs], indent=1) + "\n")
    failures |= _make_left(plan, runs, "runs", 0, places, retry, console)
    failed = [job for job in (*plan.tuning, *runs) if job.is_left(retry=True)]
    for job in failed:
        record = job.record()
        why = failures.get(job.folder) or (record and record.cause) or "it left no record"
        console.print(f"failed: {job.folder.relative_to(plan.folder)}: {why}", style="yellow")
    missing = [job.folder.name for job in failed if job in runs]
    for each in tuned:
        if each.best is None:
            missing.append(", ".join(f"{key} = {value}" for key, value in each.cell) or "all")
            console.print(f"failed: {missing[-1]}: no learning rate works", style="yellow")
    return missing


def _make_left(
    plan: Plan, jobs: Sequence[Job], what: str, later: int, places: Sequence[Place], retry: bool, console: Console
) -> dict[Path, str]:
    left = [job for job in jobs if job.is_left(retry)]
    if len(left) < len(jobs):
        console.print(f"{what}: {len(jobs) - len(left)} of {len(jobs)} are there already")
    with Progressing(left, later, console) as progress:
        return carry_out(left, plan.engine, places, progress)


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Make it, and keep other sweeps out. Raises `SettingsError` where one is in it, and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except SettingsError:
            raise SettingsError(f"--output {folder}: another sweep is at work there; allowed is another one") from None
        yield


def _row(tuned: Tuned) -> dict[str, object]:
    by_lr = [[lr, mean] for lr, mean in tuned.by_lr.items()]
    return {"cell": dict(tuned.cell), "target": tuned.target, "by_lr": by_lr, "best": tuned.best}


def _places(jobs: Sequence[Job], engine: Engine, cpus: int | None, gpus: int | None, per_gpu: int) -> list[Place]:
    """Where runs may go at a time. Raises `SettingsError` for more than the machine has."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(job.settings.threads for job in jobs)
    given = here if cpus is None else cpus
    if not threads <= given <= here:
        raise SettingsError(f"--cpus {given}: allowed is {threads}, the threads of a run, to {here}, what is here")
    side_by_side = given // threads if engine == "inprocess" else 1  # Flower's simulation takes the whole machine
    if all(job.settings.device != "cuda" for job in jobs):
        if gpus is not None or per_gpu > 1:
            raise SettingsError("--gpus, --per-gpu: allowed where device is cuda; these runs use none")
        return [None] * side_by_side
    cuda = torch.cuda.device_count()
    used = cuda if gpus is None else gpus
    if not 1 <= used <= cuda:
        raise SettingsError(f"--gpus {used}: allowed is 1 to {cuda}, what is here")
    if engine != "inprocess":
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(cuda)))).split(",")[:used]
    devices: list[Place] = [*visible * per_gpu]
    return devices[:side_by_side]
