"""Runs side by side, each a `fedact run` in a process of its own, within the CPUs and GPUs that are given."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType

import tomli_w
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedact_flwr.experiments.sweep import Job
from fedact_flwr.failure import BAD_SETTINGS, COMPLETED
from fedact_flwr.record import ROUNDS_FILE
from fedact_flwr.run import ENDS_WITH_PARENT, Engine
from fedact_flwr.settings import dump

POLL_SECONDS = 0.3

Place = str | None  # where a run goes: a CUDA device, by its number, or just the CPUs


@dataclass(frozen=True)
class Started:
    """A run that goes on; what it complains of goes to the file ``said``."""

    job: Job
    place: Place
    process: subprocess.Popen[bytes]
    said: Path


class Progressing:
    """Shows how far all of them are: a bar in a terminal, and a line for each run that has ended.

    ``jobs`` are those that are to be made, and ``later`` the optimizer steps of what comes after them; a run's share of
    the whole is that of its steps.
    """

    def __init__(self, jobs: Sequence[Job], later: int, console: Console) -> None:
        self._jobs, self._later, self._console = jobs, later, console
        self._ended: set[Path] = set()
        self._before, self._since = self._steps(), time.monotonic()
        columns = TextColumn("runs {task.fields[runs]}"), BarColumn(bar_width=20), TextColumn("{task.fields[left]}")
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._bar = self._progress.add_task("", total=sum(job.steps for job in jobs), runs="", left="")

    def __enter__(self) -> "Progressing":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def ended(self, job: Job, failure: str | None) -> None:
        self._ended.add(job.folder)
        record = job.record()
        words = [f"{len(self._ended)}/{len(self._jobs)}", job.folder.name]
        if failure:
            words.append(f"failed: {failure}")
        elif record and record.final:
            words.append(f"{record.task.target} {record.final[record.task.target]:.4f}")
        self._print("  ".join((*words, self._time_left())), "yellow" if failure else None)
        for report in record.reports if record else ():
            self._print(f"{job.folder.name}: {report}", "yellow")

    def _print(self, text: str, style: str | None) -> None:
        with contextlib.suppress(OSError):  # a terminal or a pipe that is gone ends no sweep
            self._console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    def update(self) -> None:
        if self._console.is_terminal:
            runs = f"{len(self._ended)}/{len(self._jobs)}"
            self._progress.update(self._bar, completed=self._steps(), runs=runs, left=self._time_left())

    def _steps(self) -> float:
        return sum(job.steps if job.folder in self._ended else job.steps * _share(job) for job in self._jobs)

    def _time_left(self) -> str:
        done, total = self._steps(), sum(job.steps for job in self._jobs) + self._later
        if done <= self._before or done >= total:
            return ""
        seconds = (time.monotonic() - self._since) * (total - done) / (done - self._before)
        if seconds < 90:
            return f"{seconds:.0f} s left"
        return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


def _share(job: Job) -> float:
    """Of its rounds, those that have ended."""
    try:
        lines = (job.folder / ROUNDS_FILE).read_bytes().count(b"\n")
    except OSError:
        return 0.0
    return max(0, lines - 1) / job.settings.rounds


def carry_out(jobs: Sequence[Job], engine: Engine, places: Sequence[Place], progress: Progressing) -> dict[Path, str]:
    """Make these runs, as many at a time as there are places, and give the folders of those that failed, and why.

    A run with checkpoints goes on from the newest. One that fails stops no other. Where this is interrupted, so are
    they, and write checkpoints.
    """
    waiting, free, failures, number = deque(jobs), list(places), dict[Path, str](), count()
    running: list[Started] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            while waiting or running:
                while waiting and free:
                    running.append(_start(waiting.popleft(), engine, free.pop(0), Path(scratch) / str(next(number))))
                for started in [each for each in running if each.process.poll() is not None]:
                    running.remove(started)
                    free.append(started.place)
                    failure = _failure(started)
                    if failure:
                        failures[started.job.folder] = failure
                    progress.ended(started.job, failure)
                progress.update()
                time.sleep(POLL_SECONDS)
        finally:
            for started in running:
                started.process.send_signal(signal.SIGINT)
            for started in running:
                started.process.wait()
    return failures


def _start(job: Job, engine: Engine, place: Place, scratch: Path) -> Started:
    scratch.mkdir()
    command = [sys.executable, "-m", "fedact_flwr", "run", "--engine", engine]
    if job.has_checkpoint():
        command += ["--resume", str(job.folder)]
    else:
        shutil.rmtree(job.folder, ignore_errors=True)  # of a run that did not get far enough to go on
        (scratch / "settings.toml").write_text(tomli_w.dumps(dump(job.settings)))
        command.append(str(scratch / "settings.toml"))
    own = {"OMP_NUM_THREADS": str(job.settings.threads), "PYTHONWARNINGS": "ignore", ENDS_WITH_PARENT: "1"}
    gpu = {"CUDA_VISIBLE_DEVICES": place} if place is not None else {}
    with (scratch / "said").open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
            env=os.environ | own | gpu, start_new_session=True,
        )  # fmt: skip
    return Started(job, place, process, scratch / "said")


def _failure(started: Started) -> str | None:
    record = started.job.record()
    if started.process.returncode == 0 and record and record.status == COMPLETED:
        return None
    if record and record.cause and started.process.returncode != BAD_SETTINGS:  # which is about what it went on from
        return record.cause
    lines = started.said.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else f"it ended with code {started.process.returncode}"
