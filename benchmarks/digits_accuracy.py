"""Test accuracy on digits of methods (all, unless some are named), over seeds, with the learning rate tuned per method.

    python benchmarks/digits_accuracy.py [METHOD[:KEY=VALUE] ...] [--split dirichlet] [--workers 2] [--output FOLDER]

A method may carry a setting of its own, as in scaffold:local_optimizer=adamw.
Each method's learning rate is the best of a grid by mean final accuracy over the tuning seeds; then the reported seeds,
which are others, run with it. Both look at the same test set. Everything else is as in pyproject.toml. Runs are
in-process, one torch thread each; a run whose record is complete and has the same settings is not repeated (remove the
output folder after a change of the code). Prints two Markdown tables: the result, with the bytes of the arrays that
travel in a round to and from all its clients, and the tuning.
"""

import argparse
import logging
import multiprocessing
import platform
import shutil
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from clients.methods import CLIENT_METHODS
from fedact_flwr.record import COMPLETED, SETTINGS_FILE, read_summary
from fedact_flwr.settings import dump, parse, read_defaults, read_file, read_override
from strategies import STRATEGIES, RunFailed

TUNING_SEEDS = (11, 12)
SEEDS = (1, 2, 3, 4, 5)
ADAPTIVE = (1.5e-3, 3e-3, 6e-3, 12e-3, 24e-3)
GRID = {"adamw": ADAPTIVE, "adam": ADAPTIVE, "sgd": (0.03, 0.1, 0.3, 1.0)}


def settings_of(variant: str) -> dict[str, Any]:
    """The settings that METHOD[:KEY=VALUE] stands for."""
    method, _, own = variant.partition(":")
    return {"method": method, **(dict([read_override(own)]) if own else {})}


def final_round(job: tuple[str, str, float, int, str]) -> dict[str, float]:
    """Run one job (variant, split, lr, seed, output) unless its record is complete, and give its last round's metrics.

    An accuracy of 0 for a run that diverged.
    """
    variant, split, lr, seed, output = job
    name = f"{split}-{variant.replace(':', '-')}-lr{lr:g}-s{seed}"
    folder = Path(output) / name
    own = settings_of(variant) | {"split": split, "lr": lr, "seed": seed, "output": output, "name": name}
    settings = parse(read_defaults() | own | {"device": "cpu", "evaluate_every": 10, "diagnostics": False})
    summary = read_summary(folder)
    if summary is None or summary["status"] != COMPLETED or read_file(folder / SETTINGS_FILE) != dump(settings):
        from fedact_flwr.client_app import app as client_app
        from fedact_flwr.inprocess import run_inprocess
        from fedact_flwr.server_app import app as server_app

        logging.getLogger("flwr").setLevel(logging.ERROR)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            run_inprocess(server_app, client_app, settings.clients, dump(settings))
        except RunFailed:  # every client's loss was nan: this learning rate is too large
            return {"accuracy": 0.0}
        summary = read_summary(folder)
        assert summary is not None
    return summary["final"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="METHOD[:KEY=VALUE]")
    parser.add_argument("--split", default="dirichlet")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", default="runs/digits_accuracy")
    arguments = parser.parse_args()
    output = str(Path(arguments.output).resolve())
    variants = arguments.variants or list(STRATEGIES)
    grids = {}
    for variant in variants:
        settings = settings_of(variant)
        grids[variant] = GRID[CLIENT_METHODS[settings["method"]].family_with(settings.get("local_optimizer", "auto"))]

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:

        def final_rounds(runs: list[tuple[str, float, int]]) -> list[dict[str, float]]:
            return list(pool.map(final_round, [(v, arguments.split, lr, s, output) for v, lr, s in runs]))

        trials = [(v, lr, s) for v in variants for lr in grids[v] for s in TUNING_SEEDS]
        tuning: dict[str, dict[float, list[float]]] = {}  # variant -> lr -> accuracies
        for (variant, lr, _), final in zip(trials, final_rounds(trials), strict=True):
            tuning.setdefault(variant, {}).setdefault(lr, []).append(100 * final["accuracy"])
        tuned = {v: max(by_lr, key=lambda lr, by_lr=by_lr: statistics.mean(by_lr[lr])) for v, by_lr in tuning.items()}
        reported = final_rounds([(v, tuned[v], seed) for v in variants for seed in SEEDS])

    defaults = read_defaults()
    print(
        f"digits, {arguments.split} split (dirichlet_alpha {defaults['dirichlet_alpha']} where it applies), "
        f"{defaults['clients']} clients, {defaults['rounds']} rounds of {defaults['local_steps']} steps, "
        f"{len(SEEDS)} seeds, {platform.machine()} CPU\n"
    )
    print("| method | lr | test accuracy %, mean ± sd | by seed | MB a round, down + up |\n|---|---|---|---|---|")
    for i, variant in enumerate(variants):
        finals = reported[i * len(SEEDS) : (i + 1) * len(SEEDS)]
        values = [100 * final["accuracy"] for final in finals]
        by_seed = ", ".join(f"{v:.1f}" for v in values)
        spread = f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
        down, up = (finals[0].get(key, float("nan")) / 1e6 for key in ("bytes_sent", "bytes_received"))
        print(f"| {variant} | {tuned[variant]:g} | {spread} | {by_seed} | {down:.2f} + {up:.2f} |")

    print(f"\nTuning, mean over {len(TUNING_SEEDS)} other seeds:\n\n| method | accuracy % by lr |\n|---|---|")
    for variant, by_lr in tuning.items():
        print(f"| {variant} | " + ", ".join(f"{lr:g}: {statistics.mean(a):.1f}" for lr, a in by_lr.items()) + " |")


if __name__ == "__main__":
    main()
