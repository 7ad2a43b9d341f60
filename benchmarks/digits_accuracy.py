"""Test accuracy on digits of every method, over seeds, with the learning rate tuned per method.

    python benchmarks/digits_accuracy.py [--split dirichlet] [--workers 2] [--output runs/digits_accuracy]

Each method's learning rate is the best of a grid on one tuning seed (by final accuracy); then the reported seeds run
with it. Everything else is as in pyproject.toml. Runs are in-process, one torch thread each, and a run whose record is
complete is not repeated. Prints one Markdown table.
"""

import argparse
import json
import logging
import multiprocessing
import platform
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from clients.methods import CLIENT_METHODS
from fedact_flwr.record import COMPLETED, read_summary
from fedact_flwr.settings import dump, parse, read_defaults
from strategies import STRATEGIES

TUNING_SEED = 0
SEEDS = (1, 2, 3, 4, 5)
GRID = {"adamw": (1.5e-3, 3e-3, 6e-3, 12e-3), "sgd": (0.03, 0.1, 0.3)}


def final_accuracy(job: tuple[str, str, float, int, str]) -> float:
    """Run one job (method, split, lr, seed, output) unless its record is complete, and give its final accuracy."""
    method, split, lr, seed, output = job
    name = f"{split}-{method}-lr{lr:g}-s{seed}"
    folder = Path(output) / name
    summary = read_summary(folder)
    if summary is None or summary["status"] != COMPLETED:
        from fedact_flwr.client_app import app as client_app
        from fedact_flwr.inprocess import run_inprocess
        from fedact_flwr.server_app import app as server_app

        logging.getLogger("flwr").setLevel(logging.ERROR)
        (folder / "settings.toml").unlink(missing_ok=True)  # of a run that did not end
        own = {"method": method, "split": split, "lr": lr, "seed": seed, "output": output, "name": name}
        settings = parse(read_defaults() | own | {"device": "cpu", "evaluate_every": 10, "diagnostics": False})
        run_inprocess(server_app, client_app, settings.clients, dump(settings))
        summary = json.loads((folder / "summary.json").read_text())
    return summary["final"]["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="dirichlet")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", default="runs/digits_accuracy")
    arguments = parser.parse_args()
    output = str(Path(arguments.output).resolve())

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:

        def accuracies(runs: list[tuple[str, float, int]]) -> list[float]:
            return list(pool.map(final_accuracy, [(m, arguments.split, lr, s, output) for m, lr, s in runs]))

        trials = [(m, lr, TUNING_SEED) for m in STRATEGIES for lr in GRID[CLIENT_METHODS[m].family]]
        tuned: dict[str, tuple[float, float]] = {}  # method -> accuracy, lr
        for (method, lr, _), accuracy in zip(trials, accuracies(trials), strict=True):
            tuned[method] = max(tuned.get(method, (-1.0, 0.0)), (accuracy, lr))
        reported = accuracies([(m, tuned[m][1], seed) for m in STRATEGIES for seed in SEEDS])

    defaults = read_defaults()
    print(
        f"digits, {arguments.split} split (dirichlet_alpha {defaults['dirichlet_alpha']} where it applies), "
        f"{defaults['clients']} clients, {defaults['rounds']} rounds of {defaults['local_steps']} steps, "
        f"{len(SEEDS)} seeds, {platform.machine()} CPU\n"
    )
    print("| method | lr | test accuracy %, mean ± sd | by seed |\n|---|---|---|---|")
    for i, method in enumerate(STRATEGIES):
        values = [100 * a for a in reported[i * len(SEEDS) : (i + 1) * len(SEEDS)]]
        by_seed = ", ".join(f"{v:.1f}" for v in values)
        spread = f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
        print(f"| {method} | {tuned[method][1]:g} | {spread} | {by_seed} |")


if __name__ == "__main__":
    main()
