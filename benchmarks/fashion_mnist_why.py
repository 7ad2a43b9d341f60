"""What decides the order of the AdamW methods on Fashion-MNIST: learning rate, number of local steps, v_bar, scope.

    python benchmarks/fashion_mnist_why.py DATA [--workers 2] [--output FOLDER]

DATA as for fashion_mnist.py; small_vit at Dirichlet(0.1), two seeds, everything else as in conf/fashion_mnist.toml.
Prints a Markdown table of accuracy by learning rate for each variant, with 15 and with 50 local steps. About 25 minutes
on two cores; if interrupted, it goes on where it was.
"""

import argparse
from itertools import product
from pathlib import Path

from trials import final_rounds, run_name, spread, variant_settings

from fedact_flwr.settings import PROJECT, read_file

CONF = PROJECT / "conf" / "fashion_mnist.toml"
SEEDS = (1, 2)
RATES = {15: (3e-4, 1e-3, 3e-3), 50: (1e-3,)}  # by number of local steps
VARIANTS = {  # fedadamw with rho 0 is local_adamw that starts each round at v_bar
    15: (
        "local_adamw",
        "fedadamw:rho=0.0",
        "fedadamw",
        "fedact_local",
        "fedact",
        "fedact:scope=tensor",
    ),
    50: ("local_adamw", "fedadamw", "fedact"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/fashion_mnist_why"))
    arguments = parser.parse_args()
    common = read_file(CONF) | {"data": arguments.data, "dirichlet_alpha": 0.1}
    runs = {
        run_name(f"{steps}-{variant}", lr, seed): common
        | variant_settings(variant)
        | {"local_steps": steps, "lr": lr, "seed": seed}
        for steps in RATES
        for variant, lr, seed in product(VARIANTS[steps], RATES[steps], SEEDS)
    }
    finals = final_rounds(runs, arguments.output, arguments.workers)
    for steps, rates in RATES.items():
        print(f"\n{steps} local steps, accuracy %, {len(SEEDS)} seeds:\n")
        print("| method | " + " | ".join(f"lr {lr:g}" for lr in rates) + " |\n|---" + "|---" * len(rates) + "|")
        for variant in VARIANTS[steps]:
            cells = (
                spread([100 * finals[run_name(f"{steps}-{variant}", lr, seed)]["accuracy"] for seed in SEEDS])
                for lr in rates
            )
            print(f"| {variant} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
