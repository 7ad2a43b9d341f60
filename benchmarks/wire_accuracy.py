"""What fewer bits on the wire cost: test accuracy of FedACT over seeds, on digits and on Fashion-MNIST.

    python benchmarks/wire_accuracy.py DATA [--workers 2] [--output FOLDER]

DATA is a folder with the four idx files of Fashion-MNIST, or "auto" for the hub. Prints a Markdown table, with
the bytes per parameter that the last round moved to and from each client, of which 128 a tensor are its header; a
difference is to float32, seed by seed. Digits as in pyproject.toml, all ten clients in each round; Fashion-MNIST as in
conf/fashion_mnist.toml at Dirichlet(0.1), ten of a hundred. A quarter of an hour on two cores; if interrupted, it goes
on where it was.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from trials import final_rounds, spread

from clients.client import trainable_parameters
from fedact_flwr.settings import PROJECT, parse, read_defaults, read_file
from tasks import TASKS

SEEDS = (1, 2, 3, 4, 5)


def formats(delta: str, correction: str, second_moment: str) -> dict[str, Any]:
    """Settings; a second moment may be "block"."""
    v = {"second_moment": "block"} if second_moment == "block" else {"wire_second_moment": second_moment}
    return {"wire_delta": delta, "wire_correction": correction, **v}


VARIANTS = {
    " / ".join(three): formats(*three)
    for three in (
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("int8", "int8", "int8"),
        ("int8", "derived", "int8"),
        ("float32", "derived", "block"),
        ("bfloat16", "bfloat16", "block"),
        ("int8", "int8", "block"),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/wire_accuracy"))
    arguments = parser.parse_args()
    tasks = {
        "digits": {"lr": 0.0015, "evaluate_every": 10, "diagnostics": False},
        "fashion_mnist": read_file(PROJECT / "conf" / "fashion_mnist.toml")
        | {"data": arguments.data, "dirichlet_alpha": 0.1, "lr": 1e-3, "evaluate_every": 25, "diagnostics": False},
    }
    runs = {
        f"{task}-{variant.replace(' / ', '-')}-s{seed}": common | own | {"method": "fedact", "seed": seed}
        for task, common in tasks.items()
        for variant, own in VARIANTS.items()
        for seed in SEEDS
    }
    finals = final_rounds(runs, arguments.output, arguments.workers)

    print("| delta / Delta_G / v |" + "".join(f" {task}: down + up | accuracy % | difference |" for task in tasks))
    print("|---" * (1 + 3 * len(tasks)) + "|")
    for variant in VARIANTS:
        cells = []
        for task, common in tasks.items():
            settings = parse(read_defaults() | common)
            model = TASKS[settings.task].configured(settings).make_model(seed=0)
            moved = settings.clients_per_round * sum(p.numel() for _, p in trainable_parameters(model))
            ends, plain = (
                [finals[f"{task}-{v.replace(' / ', '-')}-s{seed}"] for seed in SEEDS]
                for v in (variant, next(iter(VARIANTS)))
            )
            values = [100 * end["accuracy"] for end in ends]
            differences = [value - 100 * end["accuracy"] for value, end in zip(values, plain, strict=True)]
            down, up = (ends[0].get(key, float("nan")) / moved for key in ("bytes_sent", "bytes_received"))
            cells += [f"{down:.2f} + {up:.2f}", spread(values), f"{statistics.mean(differences):+.1f}"]
        print(f"| {variant} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
