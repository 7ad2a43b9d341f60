"""Test accuracy on digits of methods (all, unless some are named), over seeds, with the learning rate tuned per method.

    python benchmarks/digits_accuracy.py [METHOD[:KEY=VALUE] ...] [--split dirichlet] [--workers 2] [--output FOLDER]

A method may carry a setting of its own, as in scaffold:local_optimizer=adamw.
Each method's learning rate is the best of a grid by mean final accuracy over the tuning seeds; then the reported seeds,
which are others, run with it. Both look at the same test set. Everything else is as in pyproject.toml. Prints two
Markdown tables: the result, with the bytes of the arrays that travel in a round to and from all its clients, and the
tuning.
"""

import argparse
import platform
from pathlib import Path

from trials import best, final_rounds, run_name, spread, tune, variant_settings

from clients.methods import CLIENT_METHODS
from fedact_flwr.settings import read_defaults
from strategies import STRATEGIES

TUNING_SEEDS = (11, 12)
SEEDS = (1, 2, 3, 4, 5)
ADAPTIVE = (1.5e-3, 3e-3, 6e-3, 12e-3, 24e-3)
GRID = {"adamw": ADAPTIVE, "adam": ADAPTIVE, "sgd": (0.03, 0.1, 0.3, 1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="METHOD[:KEY=VALUE]", default=list(STRATEGIES))
    parser.add_argument("--split", default="dirichlet")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/digits_accuracy"))
    arguments = parser.parse_args()
    split, output, workers = arguments.split, arguments.output, arguments.workers

    common = {"split": split, "evaluate_every": 10, "diagnostics": False}
    names = {variant: f"{split}-{variant}" for variant in arguments.variants}
    cells = {name: common | variant_settings(variant) for variant, name in names.items()}
    grids = {
        name: GRID[CLIENT_METHODS[cell["method"]].family_with(cell.get("local_optimizer", "auto"))]
        for name, cell in cells.items()
    }
    tuning = tune(cells, grids, TUNING_SEEDS, output, workers)
    lr = {name: best(by_lr) for name, by_lr in tuning.items()}
    runs = {run_name(c, lr[c], seed): cells[c] | {"lr": lr[c], "seed": seed} for c in cells for seed in SEEDS}
    finals = final_rounds(runs, output, workers)

    defaults = read_defaults()
    print(
        f"digits, {split} split (dirichlet_alpha {defaults['dirichlet_alpha']} where it applies), "
        f"{defaults['clients']} clients, {defaults['rounds']} rounds of {defaults['local_steps']} steps, "
        f"{len(SEEDS)} seeds, {platform.machine()} CPU\n"
    )
    print("| method | lr | test accuracy %, mean ± sd | by seed | MB a round, down + up |\n|---|---|---|---|---|")
    for variant, name in names.items():
        ends = [finals[run_name(name, lr[name], seed)] for seed in SEEDS]
        values = [100 * end["accuracy"] for end in ends]
        by_seed = ", ".join(f"{v:.1f}" for v in values)
        down, up = (ends[0].get(key, float("nan")) / 1e6 for key in ("bytes_sent", "bytes_received"))
        print(f"| {variant} | {lr[name]:g} | {spread(values)} | {by_seed} | {down:.2f} + {up:.2f} |")

    print(f"\nTuning, mean over {len(TUNING_SEEDS)} other seeds:\n\n| method | accuracy % by lr |\n|---|---|")
    for variant, name in names.items():
        print(f"| {variant} | " + ", ".join(f"{rate:g}: {mean:.1f}" for rate, mean in tuning[name].items()) + " |")


if __name__ == "__main__":
    main()
