"""All methods on Fashion-MNIST: accuracy, direction consistency, positive score ratio and top-p score mass over rounds.

    python benchmarks/fashion_mnist.py DATA [METHOD[:KEY=VALUE] ...] [--workers 2] [--output FOLDER] [--figures FOLDER]

DATA is a folder with the four idx files, or "auto" for the Hugging Face hub. Two models, two Dirichlet splits, three
seeds; everything else as in conf/fashion_mnist.toml. Each method's learning rate is tuned for each model on one other
seed, at Dirichlet(0.1). Prints Markdown tables. An hour and a quarter on two cores; if interrupted, it goes on where it
was.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from trials import Own, best, final_rounds, run_name, spread, tune, variant_settings

from clients.methods import CLIENT_METHODS
from fedact_flwr.record import ROUNDS_FILE
from fedact_flwr.settings import PROJECT, read_file
from strategies import STRATEGIES

CONF = PROJECT / "conf" / "fashion_mnist.toml"
MODELS = ("small_vit", "small_cnn")
ALPHAS = (0.6, 0.1)
CONDITIONS = tuple(product(MODELS, ALPHAS))
TUNING_SEED, TUNING_ALPHA = 11, 0.1
SEEDS = (1, 2, 3)
ADAPTIVE = (3e-4, 1e-3, 3e-3, 1e-2)
GRID = {"adamw": ADAPTIVE, "adam": ADAPTIVE, "sgd": (0.01, 0.03, 0.1, 0.3)}
FIGURES = {  # keys of a round's line, and their titles
    "accuracy": "test accuracy",
    "direction_consistency": "direction consistency",
    "positive_score_ratio": "positive score ratio",
    "top_score_mass": "top-10 % score mass",
}

Rounds = Sequence[Mapping[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("variants", nargs="*", metavar="METHOD[:KEY=VALUE]", default=list(STRATEGIES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/fashion_mnist"))
    parser.add_argument("--figures", type=Path, help="folder for the figures")
    arguments = parser.parse_args()
    output, workers = arguments.output, arguments.workers

    cells: dict[str, Own] = {}  # by name
    for variant, (model, alpha) in product(arguments.variants, CONDITIONS):
        cells[cell_name(variant, model, alpha)] = cell_settings(arguments.data, model, alpha, variant)
    grids = {
        name: GRID[CLIENT_METHODS[cell["method"]].family_with(cell.get("local_optimizer", "auto"))]
        for name, cell in cells.items()
    }
    tuning = tune({c: cells[c] for c in cells if f"-{TUNING_ALPHA}-" in c}, grids, (TUNING_SEED,), output, workers)
    lr = {}
    for variant, (model, alpha) in product(arguments.variants, CONDITIONS):
        lr[cell_name(variant, model, alpha)] = best(tuning[cell_name(variant, model, TUNING_ALPHA)])
    runs = {run_name(c, lr[c], seed): cells[c] | {"lr": lr[c], "seed": seed} for c in cells for seed in SEEDS}
    finals = final_rounds(runs, output, workers)
    rounds = {c: [read_rounds(output / run_name(c, lr[c], seed)) for seed in SEEDS] for c in cells}

    print("\nfinal test accuracy %, mean ± sd over seeds " + ", ".join(map(str, SEEDS)) + ":\n")
    print_head([f"{model}, Dir({alpha})" for model, alpha in CONDITIONS])
    for variant in arguments.variants:
        names = [cell_name(variant, *condition) for condition in CONDITIONS]
        values = ([100 * finals[run_name(c, lr[c], seed)]["accuracy"] for seed in SEEDS] for c in names)
        print(f"| {variant} | " + " | ".join(map(spread, values)) + " |")

    print(f"\naccuracy % by learning rate at Dirichlet({TUNING_ALPHA}), seed {TUNING_SEED}; bold: the one reported:\n")
    print_head(list(MODELS))
    for variant in arguments.variants:
        by_lrs = (tuning[cell_name(variant, model, TUNING_ALPHA)] for model in MODELS)
        print(f"| {variant} | " + " | ".join(map(tried, by_lrs)) + " |")

    print("\nmean over rounds and seeds of direction consistency / positive score ratio / top-10 % score mass:\n")
    print_head([f"{model}, Dir({alpha})" for model, alpha in CONDITIONS])
    for variant in arguments.variants:
        names = [cell_name(variant, *condition) for condition in CONDITIONS]
        print(f"| {variant} | " + " | ".join(diagnostics(rounds[c]) for c in names) + " |")

    if arguments.figures:
        arguments.figures.mkdir(parents=True, exist_ok=True)
        for key, title in FIGURES.items():
            draw(arguments.figures / f"fashion_mnist_{key}.png", key, title, arguments.variants, rounds)


def cell_settings(data: str, model: str, alpha: float, variant: str) -> Own:
    own = {"data": data, "model": model, "dirichlet_alpha": alpha}
    return read_file(CONF) | own | variant_settings(variant)


def cell_name(variant: str, model: str, alpha: float) -> str:
    return f"{model}-{alpha}-{variant}"


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / ROUNDS_FILE).read_text().splitlines()]


def print_head(columns: Sequence[str]) -> None:
    print("| method | " + " | ".join(columns) + " |")
    print("|---" * (1 + len(columns)) + "|")


def tried(by_lr: Mapping[float, float]) -> str:
    accuracies = ", ".join(f"{rate:g}: {mean:.1f}" for rate, mean in by_lr.items())
    return f"**{best(by_lr):g}** ({accuracies})"


def diagnostics(runs: Sequence[Rounds]) -> str:
    """Those that the method has."""
    over_rounds = (
        [line[key] for lines in runs for line in lines if key in line] for key in FIGURES if key != "accuracy"
    )
    return " / ".join(f"{statistics.mean(values):.2f}" for values in over_rounds if values)


def draw(path: Path, key: str, title: str, variants: Sequence[str], rounds: Mapping[str, Sequence[Rounds]]) -> None:
    """One panel for each condition: the mean over seeds of ``key`` over rounds, and a band of one deviation."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey="row").flat
    colours = [*colormaps["tab10"].colors, "black"]
    for (model, alpha), axes in zip(CONDITIONS, panels, strict=True):
        for i, variant in enumerate(variants):
            runs = rounds[cell_name(variant, model, alpha)]
            at = [line["round"] for line in runs[0] if key in line]
            values = np.array([[line[key] for line in lines if key in line] for lines in runs])  # seeds x rounds
            if not at:
                continue
            mean, deviation = values.mean(0), values.std(0, ddof=1)
            colour = colours[i % len(colours)]
            axes.plot(at, mean, label=variant, color=colour)
            axes.fill_between(at, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(f"{model}, Dirichlet({alpha})")
        axes.grid(alpha=0.3)
    figure.supxlabel("round")
    figure.supylabel(title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
