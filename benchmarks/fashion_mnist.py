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
# one mark for each family of methods, one colour for each method
FIGURES = {
    "accuracy": ("accuracy", "test accuracy"),
    "consistency": ("direction_consistency", "direction consistency"),
    "positive_scores": ("positive_score_ratio", "positive score ratio"),
    "top_score_mass": ("top_score_mass", "top-10 % score mass"),
}

Line = Mapping[str, float]


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
    final_rounds(runs, output, workers)
    rounds = {c: [read_rounds(output / run_name(c, lr[c], seed)) for seed in SEEDS] for c in cells}

    print_table("final test accuracy %, mean ± sd", arguments.variants, lambda c: final_accuracy(rounds[c]))
    print_table(
        "learning rate, and accuracy % by rate on the tuning seed", arguments.variants, lambda c: tried(tuning[c])
    )
    for key, title in FIGURES.values():
        if key != "accuracy":
            print_table(
                f"{title}, mean over rounds", arguments.variants, lambda c, key=key: over_rounds(rounds[c], key)
            )
    if arguments.figures:
        arguments.figures.mkdir(parents=True, exist_ok=True)
        for figure, (key, title) in FIGURES.items():
            path = arguments.figures / f"fashion_mnist_{figure}.png"
            draw(path, key, title, arguments.variants, rounds)


def cell_settings(data: str, model: str, alpha: float, variant: str) -> Own:
    own = {"data": data, "model": model, "dirichlet_alpha": alpha}
    return read_file(CONF) | own | variant_settings(variant)


def cell_name(variant: str, model: str, alpha: float) -> str:
    return f"{model}-{alpha}-{variant}"


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / ROUNDS_FILE).read_text().splitlines()]


def print_table(title: str, variants, entry) -> None:
    print(f"\n{title}:\n")
    print("| method | " + " | ".join(f"{model}, Dir({alpha})" for model, alpha in CONDITIONS) + " |")
    print("|---" * (1 + len(CONDITIONS)) + "|")
    for variant in variants:
        entries = (entry(cell_name(variant, *condition)) for condition in CONDITIONS)
        print(f"| {variant} | " + " | ".join(entries) + " |")


def final_accuracy(runs: Sequence[Sequence[Line]]) -> str:
    return spread([100 * lines[-1]["accuracy"] for lines in runs])


def tried(by_lr: Mapping[float, float]) -> str:
    accuracies = ", ".join(f"{rate:g}: {mean:.1f}" for rate, mean in by_lr.items())
    return f"**{best(by_lr):g}** ({accuracies})"


def over_rounds(runs: Sequence[Sequence[Line]], key: str) -> str:
    values = [line[key] for lines in runs for line in lines if line.get(key) is not None]
    return f"{statistics.mean(values):.3f}" if values else ""


def draw(path: Path, key: str, title: str, variants, rounds) -> None:
    """One panel for each condition: the mean over seeds of ``key`` over rounds, and a band of one deviation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(11, 8), sharex=True, sharey="row", layout="constrained")
    colours = plt.get_cmap("tab20").colors
    for (model, alpha), axes in zip(CONDITIONS, panels.flat, strict=True):
        for colour, variant in zip(colours, variants, strict=False):
            runs = [
                {line["round"]: line[key] for line in lines if line.get(key) is not None}
                for lines in rounds[cell_name(variant, model, alpha)]
            ]
            if not runs[0]:
                continue
            at = sorted(set.intersection(*(set(run) for run in runs)))
            means = [statistics.mean(run[r] for run in runs) for r in at]
            deviations = [statistics.stdev(run[r] for run in runs) for r in at]
            axes.plot(at, means, label=variant, color=colour)
            axes.fill_between(
                at,
                [m - d for m, d in zip(means, deviations, strict=True)],
                [m + d for m, d in zip(means, deviations, strict=True)],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
        axes.set_title(f"{model}, Dirichlet({alpha})")
        axes.grid(alpha=0.3)
    figure.supxlabel("round")
    figure.supylabel(title)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
