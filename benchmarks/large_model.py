"""A round of a large model over the network: time, and the peak memory of each process.

    python benchmarks/large_model.py FOLDER [--model llama_250m] [--clients 2] [--set KEY=VALUE ...]

FOLDER is what language_data.py made. Starts a SuperLink and a SuperNode for each client on this machine, trains two
rounds of one step, and prints two Markdown tables. The second round's time is the one without the start.
"""

import argparse
from itertools import pairwise
from pathlib import Path

from network import KINDS, run_on_network

from fedact_flwr.settings import read_override

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--model", default="llama_250m")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    own = {
        "task": "pretrain_c4", "model": arguments.model, "data": str(folder / "addresses.jsonl"),
        "tokenizer": str(folder / "tokenizer"), "max_length": 32, "max_train_rows": 20, "max_test_rows": 1,
        "split": "iid", "min_samples": 1, "clients": arguments.clients, "clients_per_round": arguments.clients,
        "rounds": 2, "local_steps": 1, "batch_size": 1, "evaluate_every": 0, "device": "cpu", "diagnostics": False,
    }  # fmt: skip
    own |= dict(read_override(text) for text in arguments.overrides)
    lines, peaks = run_on_network(own)

    array = lines[1]["bytes_received"] / lines[1]["replies"] / 2 / GIB  # delta and v
    each_round = f"{own['clients_per_round']} of {arguments.clients} clients a round"
    print(f"{arguments.model}, {each_round}; an array of the model is {array:.2f} GiB\n")
    print("| round | seconds | seconds in fit | GiB down | GiB up |\n|---|---|---|---|---|")
    for before, line in pairwise(lines):
        seconds = line["seconds"] - before["seconds"]
        down, up = line["bytes_sent"] / GIB, line["bytes_received"] / GIB
        print(f"| {line['round']} | {seconds:.0f} | {line['client_seconds']:.0f} | {down:.1f} | {up:.1f} |")
    print("\n| process | peak memory, GiB | in arrays |\n|---|---|---|")
    for kind in KINDS.values():
        print(f"| {kind} | {peaks[kind] / GIB:.1f} | {peaks[kind] / GIB / array:.1f} |")


if __name__ == "__main__":
    main()
