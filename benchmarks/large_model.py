"""A round of a large model over the network: time, and the peak memory of each process.

    python benchmarks/large_model.py FOLDER [--model llama_250m] [--clients 2] [--set KEY=VALUE ...]

FOLDER is what language_data.py made. Starts a SuperLink and a SuperNode for each client on this machine, trains two
rounds of one step, and prints two Markdown tables. The second round's time is the one without the start.
"""

import argparse
import json
import subprocess
import tempfile
import threading
from collections import defaultdict
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import psutil
import tomli_w

from fedact_flwr.record import ROUNDS_FILE
from fedact_flwr.settings import PROJECT, dump, parse, read_defaults, read_override
from fedact_flwr.simulation import BIN, _end, _environment, _free_port, _wait_until_listening

KINDS = {  # what stands in the command line of a process, and what it is; the first that does
    "flwr-serverapp": "ServerApp (the strategy)",
    "flwr-clientapp": "ClientApp (training), each",
    "flower-superlink": "SuperLink",
    "flower-supernode": "SuperNode, each",
}
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--model", default="llama_250m")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary, ExitStack() as started:
        home = Path(temporary)
        own = {
            "task": "pretrain_c4", "model": arguments.model, "data": str(folder / "addresses.jsonl"),
            "tokenizer": str(folder / "tokenizer"), "max_length": 32, "max_train_rows": 20, "max_test_rows": 1,
            "split": "iid", "min_samples": 1, "clients": arguments.clients, "clients_per_round": arguments.clients,
            "rounds": 2, "local_steps": 1, "batch_size": 1, "evaluate_every": 0, "device": "cpu", "diagnostics": False,
            "output": str(home), "name": "run",
        }  # fmt: skip
        own |= dict(read_override(text) for text in arguments.overrides)
        settings = parse(read_defaults() | own)
        port, log = _free_port(), (home / "flower.log").open("ab")
        environment = _environment(home) | {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
        connection = {"superlink": {"network": {"address": f"127.0.0.1:{port}", "insecure": True}}}
        (home / "config.toml").write_text(tomli_w.dumps(connection))
        (home / "run.toml").write_text(tomli_w.dumps(dump(settings)))

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], env=environment, stdout=log, stderr=log, cwd=home
            )
            started.callback(_end, process)
            return process

        superlink = start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
        _wait_until_listening(port, superlink)
        for i in range(arguments.clients):
            node = f"partition-id={i} num-partitions={arguments.clients} cache='{home / 'cache'}'"
            address = ["--superlink", f"127.0.0.1:{port}", "--port", str(_free_port())]
            start("flower-supernode", "--insecure", *address, "--node-config", node)
        peaks: dict[str, int] = defaultdict(int)
        ended = threading.Event()
        watching = threading.Thread(target=watch, args=(peaks, ended))
        watching.start()
        run = start("flwr", "run", str(PROJECT), "network", "--stream", "--run-config", str(home / "run.toml"))
        run.wait()
        ended.set()
        watching.join()
        lines = [json.loads(line) for line in (home / "run" / ROUNDS_FILE).read_text().splitlines()]
        if len(lines) < 3 or any(line.get("failures", 0) for line in lines):
            raise SystemExit((home / "flower.log").read_text()[-5000:])

    array = lines[1]["bytes_received"] / lines[1]["replies"] / 2 / GIB  # delta and v
    each_round = f"{settings.clients_per_round} of {arguments.clients} clients a round"
    print(f"{arguments.model}, {each_round}; an array of the model is {array:.2f} GiB\n")
    print("| round | seconds | seconds in fit | GiB down | GiB up |\n|---|---|---|---|---|")
    for before, line in pairwise(lines):
        seconds = line["seconds"] - before["seconds"]
        down, up = line["bytes_sent"] / GIB, line["bytes_received"] / GIB
        print(f"| {line['round']} | {seconds:.0f} | {line['client_seconds']:.0f} | {down:.1f} | {up:.1f} |")
    print("\n| process | peak memory, GiB | in arrays |\n|---|---|---|")
    for kind in KINDS.values():
        print(f"| {kind} | {peaks[kind] / GIB:.1f} | {peaks[kind] / GIB / array:.1f} |")


def watch(peaks: dict[str, int], ended: threading.Event) -> None:
    """The largest resident memory of any process of each kind."""
    while not ended.wait(0.2):
        for process in psutil.process_iter(["cmdline", "memory_info"]):
            line = " ".join(process.info["cmdline"] or [])
            kind = next((kind for sign, kind in KINDS.items() if sign in line), None)
            if kind and process.info["memory_info"]:
                peaks[kind] = max(peaks[kind], process.info["memory_info"].rss)


if __name__ == "__main__":
    main()
