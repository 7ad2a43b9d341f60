"""How a run ends, and how a command of `fedact` fails: one line, and an exit code."""

from typing import NoReturn

import typer
from rich.console import Console

BAD_SETTINGS, RUN_FAILED, RUN_INTERRUPTED = 2, 1, 130
COMPLETED, FAILED, INTERRUPTED = "completed", "failed", "interrupted"  # the status in a record's summary
RUNNING = "running"  # while there is none


def fail(message: str, code: int) -> NoReturn:
    Console(stderr=True).print(f"error: {message}", style="red", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(code)
