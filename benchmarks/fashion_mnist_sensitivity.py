"""How FedACT's accuracy depends on rho, and on tau and gamma: Tables 9 and 4 of the paper on Fashion-MNIST.

    python benchmarks/fashion_mnist_sensitivity.py DATA --lr LR [--workers 2] [--output FOLDER] [--figures FOLDER]

DATA as for fashion_mnist.py; model small_vit, two Dirichlet splits, the paper's values of rho (two seeds), of tau and
gamma (one seed), everything else as in conf/fashion_mnist.toml. Prints Markdown tables. About 25 minutes on two cores;
if interrupted, it goes on where it was.
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from trials import final_rounds

from fedact_flwr.settings import PROJECT, read_file

CONF = PROJECT / "conf" / "fashion_mnist.toml"
ALPHAS = (0.6, 0.1)
SEEDS, MAP_SEEDS = (1, 2), (1,)
RHOS = (0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.8, 0.9)
TAUS = (0.3, 0.5, 0.7)
GAMMAS = (0.0, 0.1, 0.5, 0.9)

Point = tuple[float, float, float, float]  # Dirichlet alpha, rho, tau, gamma


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/fashion_mnist_sensitivity"))
    parser.add_argument("--figures", type=Path, help="folder for the figure")
    arguments = parser.parse_args()

    seeds: dict[Point, Sequence[int]] = {}
    seeds |= {(alpha, 0.5, tau, gamma): MAP_SEEDS for alpha, tau, gamma in product(ALPHAS, TAUS, GAMMAS)}
    seeds |= {(alpha, rho, 0.5, 0.5): SEEDS for alpha, rho in product(ALPHAS, RHOS)}
    common = read_file(CONF) | {"data": arguments.data, "lr": arguments.lr, "diagnostics": False}
    runs = {
        run_name(point, seed): common
        | {"dirichlet_alpha": point[0], "rho": point[1], "tau": point[2], "gamma": point[3], "seed": seed}
        for point in seeds
        for seed in seeds[point]
    }
    finals = final_rounds(runs, arguments.output, arguments.workers)
    by_seed = {p: [100 * finals[run_name(p, seed)]["accuracy"] for seed in seeds[p]] for p in seeds}
    accuracy = {point: statistics.mean(values) for point, values in by_seed.items()}
    first = {point: values[0] for point, values in by_seed.items()}

    for alpha in ALPHAS:
        print(f"\nDirichlet({alpha}), lr {arguments.lr:g}, accuracy % (by rho: mean over {len(SEEDS)} seeds):\n")
        print_row("rho", [f"{rho:g}" for rho in RHOS])
        print("|---" * (1 + len(RHOS)) + "|")
        print_row("accuracy", [f"{accuracy[alpha, rho, 0.5, 0.5]:.1f}" for rho in RHOS])
        print()
        print_row("tau \\ gamma", [f"{gamma:g}" for gamma in GAMMAS])
        print("|---" * (1 + len(GAMMAS)) + "|")
        for tau in TAUS:
            print_row(f"{tau:g}", [f"{first[alpha, 0.5, tau, gamma]:.1f}" for gamma in GAMMAS])
    if arguments.figures:
        arguments.figures.mkdir(parents=True, exist_ok=True)
        draw(arguments.figures / "fashion_mnist_sensitivity.png", accuracy, first)


def run_name(point: Point, seed: int) -> str:
    alpha, rho, tau, gamma = point
    return f"{alpha}-rho{rho:g}-tau{tau:g}-gamma{gamma:g}-s{seed}"


def print_row(head: str, entries: Sequence[str]) -> None:
    print(f"| {head} | " + " | ".join(entries) + " |")


def draw(path: Path, accuracy: dict[Point, float], first: dict[Point, float]) -> None:
    """Accuracy over rho, mean over seeds, and a map over tau and gamma for each split, of the first seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    curves, *maps = figure.subplots(1, 1 + len(ALPHAS))
    for alpha in ALPHAS:
        curves.plot(RHOS, [accuracy[alpha, rho, 0.5, 0.5] for rho in RHOS], marker="o", label=f"Dirichlet({alpha})")
    curves.set_xlabel("rho, at tau = gamma = 0.5")
    curves.set_ylabel("accuracy %")
    curves.grid(alpha=0.3)
    curves.legend()
    for alpha, axes in zip(ALPHAS, maps, strict=True):
        grid = [[first[alpha, 0.5, tau, gamma] for gamma in GAMMAS] for tau in TAUS]
        axes.imshow(grid, cmap="viridis", aspect="auto", vmin=min(map(min, grid)), vmax=max(map(max, grid)))
        axes.set_xticks(range(len(GAMMAS)), [f"{gamma:g}" for gamma in GAMMAS])
        axes.set_yticks(range(len(TAUS)), [f"{tau:g}" for tau in TAUS])
        axes.set_xlabel("gamma")
        axes.set_ylabel("tau, at rho = 0.5")
        axes.set_title(f"Dirichlet({alpha})")
        for (row, tau), (column, gamma) in product(enumerate(TAUS), enumerate(GAMMAS)):
            box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0}
            axes.text(column, row, f"{first[alpha, 0.5, tau, gamma]:.1f}", ha="center", va="center", bbox=box)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
