"""The language tasks on small real data: pre-training on addresses by president, SFT and DPO of SmolLM2-135M.

    python benchmarks/language_accuracy.py FOLDER [pretrain] [sft] [dpo] [--workers 2] [--output OUTPUT]

FOLDER is what language_data.py made. Prints a Markdown table for each task: the metrics on held-out rows before
training (round 0) and after some rounds, mean and standard deviation over seeds. If interrupted, it goes on where it
was.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trials import final_rounds, variant_settings

from fedact_flwr.record import ROUNDS_FILE

ADAMW_FAMILY = (
    "local_adamw", "fedprox:local_optimizer=adamw", "scaffold:local_optimizer=adamw", "fedlada:lr=1e-2", "fadamgc",
    "fedadamw", "fedact_local", "fedact",
)  # fmt: skip
TUNED = ("local_adamw", "fedadamw", "fedact")
EXPERIMENTS: dict[str, tuple[Sequence[str], Sequence[int], Sequence[str], dict[str, Any]]] = {
    # methods, seeds, metrics, settings
    "pretrain": (
        ADAMW_FAMILY,
        (1, 2),
        ("perplexity",),
        {
            "task": "pretrain_c4", "model": "llama_5m", "max_length": 128, "max_test_rows": 6, "lr": 1e-3,
            "split": "natural", "partition_column": "president", "min_samples": 1, "clients": 43,
            "clients_per_round": 4, "rounds": 20, "local_steps": 5, "batch_size": 8, "evaluate_every": 5,
        },
    ),
    "sft": (
        TUNED,
        (1, 2),
        ("loss", "token_accuracy"),
        {
            "task": "sft", "max_length": 192, "lr": 1e-3, "precision": "bfloat16", "base_precision": "bfloat16",
            "split": "iid", "clients": 4, "clients_per_round": 4, "rounds": 3, "local_steps": 4, "batch_size": 2,
            "evaluate_every": 3, "max_test_rows": 25,
        },
    ),
    "dpo": (
        TUNED,
        (1, 2),
        ("loss", "preference_accuracy", "reward_margin"),
        {
            "task": "dpo", "max_length": 192, "lr": 5e-4, "precision": "bfloat16", "base_precision": "bfloat16",
            "split": "iid", "clients": 4, "clients_per_round": 4, "rounds": 3, "local_steps": 2, "batch_size": 2,
            "evaluate_every": 3,
        },
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", default=list(EXPERIMENTS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/language_accuracy"))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    places = {
        "pretrain": {"data": str(folder / "addresses.jsonl"), "tokenizer": str(folder / "tokenizer")},
        "sft": {"data": str(folder / "sft"), "model": str(folder / "smollm2")},
        "dpo": {"data": str(folder / "dpo"), "model": str(folder / "smollm2")},
    }
    for experiment in arguments.experiments:
        variants, seeds, metrics, settings = EXPERIMENTS[experiment]
        common = settings | places[experiment] | {"diagnostics": False}
        runs = {
            f"{experiment}-{variant.replace(':', '-')}-s{seed}": common | variant_settings(variant) | {"seed": seed}
            for variant in variants
            for seed in seeds
        }
        final_rounds(runs, arguments.output, arguments.workers)
        print(f"\n{experiment}, {len(seeds)} seeds:\n")
        evaluated = evaluations(arguments.output / next(iter(runs)), metrics[0])
        heads = [f"{metric}, round {line['round']}" for metric in metrics for line in evaluated]
        print("| method | " + " | ".join(heads) + " |\n|---" + "|---" * len(heads) + "|")
        for variant in variants:
            lines = [
                evaluations(arguments.output / f"{experiment}-{variant.replace(':', '-')}-s{seed}", metrics[0])
                for seed in seeds
            ]
            cells = [spread([run[i][metric] for run in lines]) for metric in metrics for i in range(len(evaluated))]
            print(f"| {variant} | " + " | ".join(cells) + " |")


def evaluations(record: Path, metric: str) -> list[dict[str, Any]]:
    """The lines of the rounds that were evaluated."""
    lines = (json.loads(line) for line in (record / ROUNDS_FILE).read_text().splitlines())
    return [line for line in lines if metric in line]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


if __name__ == "__main__":
    main()
