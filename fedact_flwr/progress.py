"""What a run shows in the terminal: it follows the record, so it works with any engine."""

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from fedact_flwr.record import ROUNDS_FILE

POLL_SECONDS = 0.2
TABLE_ROWS = 12
BAR_WIDTH = 8
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 16


class Follow:
    """Shows each round of the record in ``folder`` as it is written, while the block runs.

    In a terminal a progress bar and a sparkline of the target, elsewhere one plain line per round. Of a run
    that goes on, ``lines`` are known.
    """

    def __init__(
        self, folder: Path, rounds: int, target: str, console: Console, lines: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.path = folder / ROUNDS_FILE
        self.rounds = rounds
        self.target = target
        self.console = console
        self.lines = [dict(line) for line in lines]
        self._resumed = len(self.lines)
        self._offset = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._progress = Progress(
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("", total=rounds, status="starting")

    def __enter__(self) -> "Follow":
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._progress.stop()

    def table(self) -> Table:
        """The rounds, thinned to about a dozen, the last among them."""
        table = Table("round", self.target, "loss", "train loss", "clients", "seconds so far")
        step = max(1, -(-len(self.lines) // TABLE_ROWS))
        for line in self.lines[(len(self.lines) - 1) % step :: step]:
            clients = str(line.get("replies", "")) + (f" ({line['failures']} failed)" if line.get("failures") else "")
            metrics = (_number(line.get(key)) for key in (self.target, "loss", "train_loss"))
            table.add_row(str(line["round"]), *metrics, clients, f"{line['seconds']:.1f}")
        return table

    def _loop(self) -> None:
        with contextlib.suppress(OSError):  # a terminal or a pipe that is gone ends no run
            while not self._ended.wait(POLL_SECONDS):
                self._read()
            self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break  # the writer is in the middle of it
                self._offset += len(raw)
                line = json.loads(raw)
                if not self.lines or line["round"] > self.lines[-1]["round"]:
                    self.lines.append(line)
                    self._show(line)

    def _show(self, line: dict[str, Any]) -> None:
        for failure in line.get("failed", ()):
            text = f"round {line['round']}, {failure}"
            self.console.print(text, style="yellow", highlight=False, soft_wrap=True, markup=False)
        for text in line.get("reports", ()):
            self.console.print(text, style="yellow", highlight=False, soft_wrap=True, markup=False)
        parts = [f"{key} {_number(line[key])}" for key in (self.target, "loss", "train_loss") if key in line]
        if self.console.is_terminal:
            parts = parts[:2]  # the sparkline needs the room of the third
        if line.get("failures"):
            parts.append(f"{line['failures']} failed")
        if len(self.lines) > self._resumed + 2:  # the first also pays for the start and tells nothing
            parts.append(f"{self._seconds_left():.0f} s left")
        status = "  ".join(parts)
        if self.console.is_terminal:
            rest = self.console.width - len(f"round {line['round']}/{self.rounds} ") - BAR_WIDTH - len(f" {status}  ")
            status += f"  {self._sparkline(min(rest, SPARKLINE_WIDTH))}"
            self._progress.update(self._bar, completed=line["round"], status=status)
        else:
            self.console.print(f"round {line['round']}/{self.rounds}  {status}", highlight=False, soft_wrap=True)

    def _sparkline(self, width: int) -> str:
        """The target's last values, as many as ``width``, between the least and the greatest of them."""
        values = [line[self.target] for line in self.lines if line.get(self.target) is not None][-max(width, 0) :]
        if width < 1 or not values or self.console.options.ascii_only:
            return ""
        low, span = min(values), max(values) - min(values) or 1.0
        return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in values)

    def _seconds_left(self) -> float:
        first, last = self.lines[self._resumed + 1], self.lines[-1]
        per_round = (last["seconds"] - first["seconds"]) / (last["round"] - first["round"])
        return per_round * (self.rounds - last["round"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
