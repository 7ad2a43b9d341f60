"""Over the network: a SuperLink and SuperNodes as processes of their own."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import run_inprocess
from fedact_flwr.server_app import app as server_app
from fedact_flwr.settings import Settings, dump
from fedact_flwr.simulation import run_simulation
from strategies.seeds import derive_seed

SEED = 16  # samples partitions 0, 1, 0


def test_the_same_bits_from_every_engine(network: Any, make_settings: Callable[..., Settings]) -> None:
    """In this process, in Flower's simulation, and by a SuperLink and two SuperNodes."""
    small = {"clients": 2, "clients_per_round": 2, "rounds": 2, "local_steps": 3, "output": str(network.folder)}
    run_inprocess(server_app, client_app, 2, dump(make_settings(**small, name="inprocess")))
    run_simulation(make_settings(**small, name="simulation"), network.folder / "simulation.log")
    with (
        network.superlink(), network.supernode(0), network.supernode(1),
        network.submit(make_settings(**small, name="network")) as run,
    ):  # fmt: skip
        network.wait_for(lambda: run.poll() is not None)
    assert run.returncode == 0, network.log.read_text()[-3000:]

    records = [network.folder / engine for engine in ("inprocess", "simulation", "network")]
    models = [(record / "model.safetensors").read_bytes() for record in records]
    assert models[0] == models[1] == models[2]
    rounds = [[json.loads(line) for line in (r / "rounds.jsonl").read_text().splitlines()] for r in records]
    for line in (line for run_lines in rounds for line in run_lines):
        line["seconds"] = line["client_seconds"] = 0
    assert rounds[0] == rounds[1] == rounds[2]
    assert [line["failures"] for line in rounds[0][1:]] == [0, 0]


def test_what_a_client_keeps_survives_a_restarted_supernode(
    network: Any, make_settings: Callable[..., Settings]
) -> None:
    """Node 0 trains in rounds 1 and 3, and is killed and started anew in between: the same bits as in process."""
    sampled = [np.random.default_rng(derive_seed(SEED, r, "train", "sample")).choice(2, 1)[0] for r in (1, 2, 3)]
    assert sampled == [0, 1, 0]
    small = {"method": "scaffold", "seed": SEED, "clients": 2, "clients_per_round": 1, "rounds": 3, "local_steps": 3}
    rounds = network.folder / "network" / "rounds.jsonl"
    with (
        network.superlink(), network.supernode(1),
        network.submit(make_settings(**small, output=str(network.folder), name="network")) as run,
    ):  # fmt: skip
        with network.supernode(0):
            network.wait_for(lambda: rounds.exists() and rounds.read_text().count("\n") >= 2)
        with network.supernode(0):
            network.wait_for(lambda: run.poll() is not None)

    log = network.log.read_text()[-3000:]
    assert run.returncode == 0, log
    assert [p.name for p in (network.folder / "node0").rglob("round-*")] != []
    assert [json.loads(line).get("failures") for line in rounds.read_text().splitlines()] == [None, 0, 0, 0], log
    run_inprocess(server_app, client_app, 2, dump(make_settings(**small, output=str(network.folder), name="inprocess")))
    a, b = ((network.folder / name / "model.safetensors").read_bytes() for name in ("network", "inprocess"))
    assert a == b
