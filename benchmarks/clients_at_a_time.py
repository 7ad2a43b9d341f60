"""What a round costs in Flower's simulation with more and more clients at a time on one GPU, and beside in-process.

    python benchmarks/clients_at_a_time.py [--device cuda] [--shares 1 0.5 0.25 0.125] [--model resnet18] [--rounds 6]

Runs FedACT on random images in CIFAR-10's format, 100 clients, 10 a round, 50 steps of 50, once in-process and once for
each share of a GPU per client. Prints one Markdown table: seconds per round without the first, and whether the final
model has the same bytes as in-process. On the CPU a client takes a core: --device cpu --shares 0.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from fedact_flwr.record import ROUNDS_FILE
from fedact_flwr.settings import PROJECT
from tasks.task import MODEL_FILE

IMAGES_PER_FILE, BYTES_PER_IMAGE = 10_000, 1 + 3 * 32 * 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.5, 0.25, 0.125])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_random_cifar10(folder / "cifar-10-batches-bin")
        own = [f"data={folder / 'cifar-10-batches-bin'}", f"output={folder}", f"device={arguments.device}"]
        own += [f"model={arguments.model}", f"rounds={arguments.rounds}", f"local_steps={arguments.steps}"]
        own += [f"evaluate_every={arguments.rounds}"]

        print(f"{arguments.model}, {arguments.device}, {arguments.rounds} rounds of {arguments.steps} steps\n")
        print("| engine | share of a GPU per client | seconds per round | same model |\n|---|---|---|---|")
        reference = run(folder / "inprocess", [*own, "name=inprocess"], "inprocess")
        print(f"| inprocess | | {reference[0]:.2f} | |", flush=True)
        for share in arguments.shares:
            name = f"flower-{share:g}"
            seconds, model = run(folder / name, [*own, f"name={name}", f"client_gpus={share}"], "flower")
            print(f"| flower | {share:g} | {seconds:.2f} | {model == reference[1]} |", flush=True)


def run(record: Path, settings: list[str], engine: str) -> tuple[float, bytes]:
    """Seconds per round after the first, and the bytes of the final model."""
    conf = PROJECT / "conf" / "paper" / "resnet18-cifar10-dir0.6.toml"
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "fedact_flwr", "run", str(conf), "--engine", engine, *sets]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rounds = [json.loads(line) for line in (record / ROUNDS_FILE).read_text().splitlines()]
    first, last = rounds[1], rounds[-1]
    return (last["seconds"] - first["seconds"]) / (last["round"] - first["round"]), (record / MODEL_FILE).read_bytes()


def write_random_cifar10(folder: Path) -> None:
    """The files of CIFAR-10's binary version, with random labels and pixels."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        data = generator.integers(0, 256, (IMAGES_PER_FILE, BYTES_PER_IMAGE), dtype=np.uint8)
        data[:, 0] %= 10
        (folder / name).write_bytes(data.tobytes())


if __name__ == "__main__":
    main()
