"""How long a user waits: for help, and for the end of the first round of a run in one process.

    python benchmarks/start_up.py [--repeats 5] [--set KEY=VALUE ...]

Beside the run stands what it can't do without: Python, the import of PyTorch, and the task's data, loaded by a process
that does nothing else. Prints a Markdown table: medians over processes, in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fedact_flwr.record import ROUNDS_FILE
from fedact_flwr.settings import dump, parse, read_defaults, read_override

FEDACT = [sys.executable, "-m", "fedact_flwr"]
FLOOR = """
import json, sys
import torch
torch.set_num_threads(1)
from tasks import TASKS
from types import SimpleNamespace
settings = SimpleNamespace(**json.loads(sys.argv[1]))
task = TASKS[settings.task].configured(settings)
labels = task.train_labels()
import numpy as np
task.train_examples(np.arange(len(labels)))
task.test_examples()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args()
    settings = dump(parse(read_defaults() | dict(read_override(text) for text in arguments.overrides)))
    parts: dict[str, Callable[[], float]] = {
        "fedact --help": lambda: seconds([*FEDACT, "--help"]),
        "Python, PyTorch and the data": lambda: seconds([sys.executable, "-c", FLOOR, json.dumps(settings)]),
        "fedact run --engine inprocess, to the end of round 1": lambda: to_round_1(arguments.overrides),
    }
    times: dict[str, list[float]] = {what: [] for what in parts}
    for _ in range(arguments.repeats):
        for what, measure in parts.items():
            times[what].append(measure())
    print(f"{settings['task']}, {os.cpu_count()} cores\n\n| what | seconds |\n|---|---|")
    for what, values in times.items():
        print(f"| {what} | {statistics.median(values):.2f} |")


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def to_round_1(overrides: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        own = ["rounds=1", f'output="{folder}"', "name=run", *overrides]
        command = [*FEDACT, "run", "--engine", "inprocess", *(part for text in own for part in ("--set", text))]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        lines = Path(folder) / "run" / ROUNDS_FILE
        while not lines.exists() or lines.read_bytes().count(b"\n") < 2:
            if process.poll() is not None:
                raise SystemExit("the run ended too soon")
            time.sleep(0.002)
        took = time.perf_counter() - started
        process.wait()
        return took


if __name__ == "__main__":
    main()
