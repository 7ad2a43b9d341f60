"""What a round costs, as a model: fitted to measured points, checked on others, carried to sizes nobody can run here.

    python benchmarks/cost_model.py DATA [--repeats 3]

DATA is a folder with the four idx files of Fashion-MNIST. Measures on this machine, one thread: the server (CPU and
memory of a round, with replies that are there already), a client (CPU of a round of an MLP), and the way between them
(a SuperLink and SuperNodes, all on this machine; seconds of a round less those of the clients). Each part is a sum of
terms with a cost each, found by least squares of the relative error; a term whose cost comes out negative is left out.
Prints Markdown tables: the fit, the check, and the extrapolation. Ten minutes on two cores.
"""

import argparse
import itertools
import logging
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from network import run_on_network

from clients.client import FedClient, exchanged_state, trainable_parameters
from clients.device import keep_freed_memory
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import InProcessGrid
from fedact_flwr.settings import Settings, dump, parse, read_defaults
from strategies import FedACT, wire
from tasks import TASKS

GB, GIB = 1e9, 2**30
TENSORS = 20  # of the server's measurement
Point = tuple[int, int]  # what a part depends on, besides its unit
Terms = dict[str, Callable[[float, float], float]]

# parameters, clients of a round
SERVER_FIT: list[Point] = [(10**5, 2), (10**5, 40), (10**6, 2), (10**6, 40), (10**7, 2), (10**7, 10)]
SERVER_CHECK: list[Point] = [(3 * 10**6, 20), (3 * 10**7, 5), (3 * 10**5, 100)]
SERVER_TERMS: Terms = {
    "a round": lambda p, s: 1,
    "a reply": lambda p, s: s,
    "a million parameters": lambda p, s: p / 1e6,
    "a million parameters of a reply": lambda p, s: p * s / 1e6,
}
# width of the MLP, local steps
CLIENT_FIT: list[Point] = [(100, 1), (100, 20), (1000, 1), (1000, 20), (2500, 2), (2500, 10)]
CLIENT_CHECK: list[Point] = [(400, 10), (1800, 5), (3500, 4)]
CLIENT_TERMS: Terms = {
    "a round": lambda p, k: 1,
    "a step": lambda p, k: k,
    "a million parameters": lambda p, k: p / 1e6,
    "a million parameters of a step": lambda p, k: p * k / 1e6,
}
# width of the MLP, clients of a round
NETWORK_FIT: list[Point] = [(100, 2), (100, 4), (1500, 2), (4500, 2)]
NETWORK_CHECK: list[Point] = [(3000, 2), (1000, 3)]
A_GB = "a GB, both ways together"
NETWORK_TERMS: Terms = {
    "a round": lambda b, s: 1,
    "a client": lambda b, s: s,
    A_GB: lambda b, s: b / GB,
}

COMMON = {
    "task": "fashion_mnist", "model": "mlp", "split": "iid", "batch_size": 50, "threads": 1, "device": "cpu",
    "augment": False, "evaluate_every": 0, "diagnostics": False, "checkpoint_every": 0, "rounds": 4,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    keep_freed_memory()
    common = COMMON | {"data": arguments.data}

    def a_client(width: int, steps: int) -> tuple[tuple[float, float], float]:
        return client_seconds(common, width, steps)

    print("| part | cost | of |\n|---|---|---|")
    server = Part("server", SERVER_TERMS, measured(server_seconds, SERVER_FIT, arguments.repeats))
    client = Part("client", CLIENT_TERMS, measured(a_client, CLIENT_FIT, arguments.repeats))
    network = Part("network", NETWORK_TERMS, [network_seconds(common, w, s) for w, s in NETWORK_FIT])
    memory = {(p, s): server_arrays(p, s) for p, s in ((10**6, 2), (10**6, 30), (10**7, 8))}
    arrays = statistics.mean(memory.values())
    for (p, s), a in memory.items():
        print(f"| server | {a:.2f} arrays of the model | memory at {p / 1e6:g} million parameters, {s} clients |")

    print("\n| part | point | measured, s | model, s | error |\n|---|---|---|---|---|")
    server.check(measured(server_seconds, SERVER_CHECK, arguments.repeats), "parameters", "clients")
    client.check(measured(a_client, CLIENT_CHECK, arguments.repeats), "parameters", "steps")
    network.check([network_seconds(common, w, s) for w, s in NETWORK_CHECK], "bytes", "clients")
    extrapolate(server, network, arrays)


class Part:
    """Seconds as a sum of terms, each with a cost; of its points, (x, y) and the seconds there."""

    def __init__(self, name: str, terms: Terms, points: Sequence[tuple[tuple[float, float], float]]) -> None:
        self.name, self.terms = name, dict(terms)
        while True:
            rows = np.array([[term(*at) / seconds for term in self.terms.values()] for at, seconds in points])
            costs = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
            if (costs >= 0).all():
                break
            del self.terms[list(self.terms)[int(costs.argmin())]]
        self.costs = dict(zip(self.terms, costs.tolist(), strict=True))
        for term, cost in self.costs.items():
            print(f"| {name} | {1e3 * cost:.3g} ms | {term} |", flush=True)

    def seconds(self, x: float, y: float) -> float:
        return sum(cost * self.terms[term](x, y) for term, cost in self.costs.items())

    def check(self, points: Sequence[tuple[tuple[float, float], float]], x: str, y: str) -> None:
        for at, seconds in points:
            model = self.seconds(*at)
            error = 100 * (model / seconds - 1)
            where = f"{at[0]:.3g} {x}, {at[1]} {y}"
            print(f"| {self.name} | {where} | {seconds:.3g} | {model:.3g} | {error:+.0f} % |", flush=True)


def measured(
    measure: Callable[[int, int], tuple[tuple[float, float], float]], points: Iterable[Point], repeats: int
) -> list[tuple[tuple[float, float], float]]:
    """Medians over repeats, the points in turns."""
    points = list(points)
    every = [[measure(*point) for point in points] for _ in range(repeats)]
    return [(each[0][0], statistics.median(seconds for _, seconds in each)) for each in zip(*every, strict=True)]


class Answering(InProcessGrid):
    """Gives a good reply for each partition, without a client: each in memory of its own, as those that arrive."""

    def __init__(self, settings: Settings, reply: dict[str, ArrayRecord]) -> None:
        super().__init__(client_app, 1, dump(settings))
        self.reply = reply

    def _answer(self, message: Message) -> Message:
        if message.metadata.message_type != "train":
            return super()._answer(message)
        partition = message.content[wire.CONFIG][wire.PARTITION]
        metrics = {wire.PARTITION: partition, wire.NUM_EXAMPLES: 10, wire.NUM_STEPS: 10, wire.TRAIN_LOSS: 1.0}
        reply = {name: wire.to_record(wire.from_record(record)) for name, record in self.reply.items()}
        return Message(RecordDict({**reply, wire.METRICS: MetricRecord(metrics)}), reply_to=message)


def a_server(parameters: int, clients: int) -> tuple[FedACT, Answering]:
    settings = parse(
        read_defaults() | {"clients": clients, "clients_per_round": clients, "rounds": 100, "split": "iid"}
    )
    shape = (parameters // TENSORS,)
    arrays = {f"layer.{i}.weight": np.full(shape, 1e-3, np.float32) for i in range(TENSORS)}
    record = wire.to_record(arrays)
    strategy = FedACT(settings)
    grid = Answering(settings, {wire.DELTA: record, wire.SECOND_MOMENT: record})
    strategy.model = {name: np.zeros(shape, np.float32) for name in arrays}
    return strategy, grid


def rounds(strategy: FedACT, grid: Answering, of: Iterable[int]) -> None:
    arrays = strategy._sent.get(wire.MODEL) or wire.to_record(strategy.model)
    for server_round in of:
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        answers = (next(iter(grid.send_and_receive([message]))) for message in messages)
        new, _ = strategy._fold_round(server_round, answers)
        assert new is not None
        arrays = new


def server_seconds(parameters: int, clients: int) -> tuple[tuple[float, float], float]:
    strategy, grid = a_server(parameters, clients)
    rounds(strategy, grid, [1])
    started = time.process_time()
    rounds(strategy, grid, [2, 3, 4])
    return (parameters, clients), (time.process_time() - started) / 3


def server_arrays(parameters: int, clients: int) -> float:
    """The server's peak memory, in float32 arrays of the model, with the reply's two."""
    strategy, grid = a_server(parameters, clients)
    rounds(strategy, grid, [1])
    tracemalloc.start()
    standing = 3  # x, Delta_G and v_bar, which are there before; the reply that is copied does not count
    rounds(strategy, grid, [2])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return standing + peak / (4 * parameters)


def client_seconds(common: dict[str, Any], width: int, steps: int) -> tuple[tuple[float, float], float]:
    settings = parse(read_defaults() | common | {"mlp_width": width, "local_steps": steps})
    task = TASKS[settings.task].configured(settings)
    examples = task.train_examples(np.arange(600))
    model = task.make_model(0)
    client = FedClient(task, model, examples, examples, settings)
    state = {name: t.detach().numpy().copy() for name, t in exchanged_state(model).items()}
    zeros = {name: np.zeros(p.shape, np.float32) for name, p in trainable_parameters(model)}
    parameters = sum(a.size for a in state.values())
    message = {wire.MODEL: state, wire.CORRECTION: zeros, wire.SECOND_MOMENT: zeros}
    with tempfile.TemporaryDirectory() as folder:
        config = {wire.PARTITION: 0, wire.SEED: 1, wire.LR: settings.lr, wire.ROUND: 1, wire.STATE_FOLDER: folder}
        config |= {wire.STEPS_DONE: 0.0, wire.FOLDED: 0}
        client.fit(message, config)
        started = time.process_time()
        for _ in range(3):
            returned, _, _ = client.fit(message, config)
            for vectors in returned.values():
                wire.to_record(vectors)
        return (parameters, steps), (time.process_time() - started) / 3


def network_seconds(common: dict[str, Any], width: int, clients: int) -> tuple[tuple[float, float], float]:
    """Of a round that is not the first, without the clients' own time."""
    own = common | {"mlp_width": width, "local_steps": 1, "clients": clients, "clients_per_round": clients, "rounds": 3}
    lines, _ = run_on_network(own)
    seconds = [b["seconds"] - a["seconds"] - b["client_seconds"] for a, b in itertools.pairwise(lines[1:])]
    moved = lines[-1]["bytes_sent"] + lines[-1]["bytes_received"]
    return (moved, clients), statistics.mean(seconds)


SCENARIOS = {  # parameters that travel, clients a round, seconds of local work (any device; an assumption)
    "5.5M ViT, 1,000 of 10,000 clients": (5.5e6, 1000, 60.0),
    "1B model in full, 20 clients": (1e9, 20, 600.0),
    "7B model by LoRA (r = 16: 40M), 20 clients": (40e6, 20, 600.0),
}
WIRES = {"float32": (12, 8), "int8 in all three": (6, 2)}  # bytes a parameter down, up; docs/wire.md
CLIENT_LINK, SERVER_LINK = 100e6 / 8, 10e9 / 8  # bytes a second: 100 Mbit/s and 10 Gbit/s, each way


def extrapolate(server: Part, network: Part, arrays: float) -> None:
    """Of the network the bytes alone: clients are on machines of their own, where their processes start together."""
    print(
        "\n| | wire | GB a round | held for the server, GB | server memory, GiB | server CPU, s | Flower's way, s "
        "| server link, s | client link, s | local work, s |\n" + "|---" * 10 + "|"
    )
    for (name, (p, s, work)), (form, (down, up)) in itertools.product(SCENARIOS.items(), WIRES.items()):
        moved = s * p * (down + up)
        link, clients_link = s * p * max(down, up) / SERVER_LINK, p * (down + up) / CLIENT_LINK
        flower = network.costs[A_GB] * moved / GB
        print(
            f"| {name} | {form} | {moved / GB:,.0f} | {s * p * up / GB:,.0f} | {4 * p * arrays / GIB:,.1f} "
            f"| {server.seconds(p, s):,.0f} | {flower:,.0f} | {link:,.0f} | {clients_link:,.0f} "
            f"| {work:,.0f} |"
        )


if __name__ == "__main__":
    main()
