"""What a round of FedACT costs beside a plain PyTorch loop: CPU time, by engine.

    python benchmarks/round_cost.py DATA [--rounds 5] [--repeats 3] [--engines inprocess flower] [--cases NAME ...]

DATA is a folder with the four idx files of Fashion-MNIST. 100 clients, ten a round, batches of 50, one thread, no
evaluation in between. The floor is a loop in this process that does the same number of steps on the same kind of
batches with torch.optim.AdamW (fused), and nothing else: no clients, no messages, no trust modulation. An engine's
cost is the CPU time, user and system, of all its processes from the end of the second round to the end of the last.
Prints one Markdown table: medians over repeats, floor and engines in turns.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from clients.training import batches, train
from fedact_flwr.record import ROUNDS_FILE
from fedact_flwr.settings import parse, read_defaults
from tasks import TASKS

COMMON = {
    "task": "fashion_mnist", "split": "iid", "clients": 100, "clients_per_round": 10, "batch_size": 50, "threads": 1,
    "augment": False, "evaluate_every": 0, "diagnostics": False, "checkpoint_every": 0, "device": "cpu",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "137k CNN, K = 10": {"model": "small_cnn", "cnn_width": 64, "local_steps": 10},
    "137k CNN, K = 1": {"model": "small_cnn", "cnn_width": 64, "local_steps": 1},
    "41 MB MLP, K = 1": {"model": "mlp", "mlp_width": 2834, "local_steps": 1},
    "141k MLP, K = 10": {"model": "mlp", "mlp_width": 150, "local_steps": 10},
    "141k MLP, K = 1": {"model": "mlp", "mlp_width": 150, "local_steps": 1},
}
WARM_UP = 2  # rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=["inprocess", "flower"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()

    print("| case | plain AdamW, CPU-s a round | " + " | ".join(f"{e} (ratio)" for e in arguments.engines) + " |")
    print("|---" * (2 + len(arguments.engines)) + "|", flush=True)
    for case in arguments.cases:
        own = COMMON | CASES[case] | {"data": str(Path(arguments.data).resolve())}
        measured: dict[str, list[float]] = {who: [] for who in ("floor", *arguments.engines)}
        for _ in range(arguments.repeats):
            measured["floor"].append(floor(own, arguments.rounds))
            for engine in arguments.engines:
                measured[engine].append(cost(own, engine, arguments.rounds))
        least, *others = (statistics.median(values) for values in measured.values())
        ratios = " | ".join(f"{seconds:.3f} ({seconds / least:.2f})" for seconds in others)
        print(f"| {case} | {least:.3f} | {ratios} |", flush=True)


def floor(own: dict[str, Any], rounds: int) -> float:
    """CPU-seconds of as many steps as a round has, from `rounds` rounds."""
    settings = parse(read_defaults() | own)
    torch.set_num_threads(settings.threads)
    task = TASKS[settings.task].configured(settings)
    examples = task.train_examples(torch.arange(600).numpy())  # of one client
    model = task.make_model(0)
    adamw = torch.optim.AdamW(model.parameters(), settings.lr, weight_decay=settings.weight_decay, fused=True)
    stream = batches(examples, settings.batch_size, torch.Generator().manual_seed(0))
    steps = settings.local_steps * settings.clients_per_round
    train(model, task.loss, stream, adamw, steps)
    started = time.process_time()
    train(model, task.loss, stream, adamw, rounds * steps)
    return (time.process_time() - started) / rounds


def cost(own: dict[str, Any], engine: str, rounds: int) -> float:
    """CPU-seconds of a round, of all processes."""
    with tempfile.TemporaryDirectory() as folder:
        settings = own | {"rounds": rounds + WARM_UP + 1, "output": folder, "name": "run"}
        overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={toml(value)}")]
        command = [sys.executable, "-m", "fedact_flwr", "run", "--engine", engine, *overrides]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = Path(folder) / "run" / ROUNDS_FILE
        try:
            before = cpu_after_round(WARM_UP, lines, process)
            return (cpu_after_round(rounds + WARM_UP, lines, process) - before) / rounds
        finally:
            process.communicate()


def cpu_after_round(server_round: int, lines: Path, process: subprocess.Popen[str]) -> float:
    """CPU-seconds of the process and all that it started, as soon as that round, which may be 0, is recorded."""
    while not lines.exists() or lines.read_bytes().count(b"\n") < server_round + 1:
        if process.poll() is not None:
            raise SystemExit(f"the run ended too soon: {process.stdout.read() if process.stdout else ''}")
        time.sleep(0.002)
    parent = psutil.Process(process.pid)
    times = [p.cpu_times() for p in (parent, *parent.children(recursive=True)) if p.is_running()]
    return sum(t.user + t.system for t in times)


def toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    main()
