"""What a fresh client process costs before its first step: in deployment each message starts one.

    python benchmarks/cold_start.py [--set KEY=VALUE ...] [--cache FOLDER] [--repeat 5]

Prints a Markdown table: seconds by stage, medians over processes, of the run that the settings describe. FOLDER is what
`cache` is in a node's config. Flower's own share (the SuperNode's polling, the start of the process, the way of the
message) comes on top.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedact_flwr.settings import dump, parse, read_defaults, read_override

CHILD = """
import json, sys, time
started = float(sys.argv[1])
stages = {}
def stage(name):
    global started
    now = time.time()
    stages[name], started = now - started, now
stage("Python")
import flwr.clientapp, flwr.app
stage("import flwr")
import torch
stage("import torch")
from fedact_flwr import client_app
stage("import of the app")
from fedact_flwr.settings import parse
config = json.loads(sys.argv[2])
settings = parse(config)
client = client_app._workplace(settings, sys.argv[4]).client(0)
stage("data, split, model")
from clients.client import exchanged_state
from clients.methods import CLIENT_METHODS
from strategies import STRATEGIES, wire
state = {name: t.detach().numpy().copy() for name, t in exchanged_state(client.model).items()}
like = {name: 0 * a for name, a in state.items()}
message = {wire.MODEL: state} | {record: like for record in STRATEGIES[settings.method].broadcast}
stage("-")
client.fit(message, {wire.PARTITION: 0, wire.SEED: 1, wire.LR: 1e-3, wire.STEPS_DONE: 0, wire.ROUND: 1,
                     wire.FOLDED: 0, wire.STATE_FOLDER: sys.argv[3]})
stage("first step")
del stages["-"]
print(json.dumps(stages))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--cache", default="", metavar="FOLDER")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    own = dict(read_override(text) for text in arguments.overrides)
    settings = parse(read_defaults() | {"local_steps": 1, "device": "cpu", "diagnostics": False} | own)
    with tempfile.TemporaryDirectory() as folder:
        runs = [measure(json.dumps(dump(settings)), folder, arguments.cache) for _ in range(arguments.repeat)]
    print(
        f"{settings.task}, {settings.model}: median of {arguments.repeat} processes\n\n| stage | seconds |\n|---|---|"
    )
    for stage in runs[0]:
        print(f"| {stage} | {statistics.median(run[stage] for run in runs):.2f} |")
    print(f"| all | {statistics.median(sum(run.values()) for run in runs):.2f} |")


def measure(config: str, folder: str, cache: str) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, str(time.time()), config, folder, cache]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    return json.loads(result.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
