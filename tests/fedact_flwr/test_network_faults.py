"""Processes that are killed, late, or started anew, in a network."""

import contextlib
import json
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from flwr.app import Error, Message

from fedact_flwr import server_app
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import InProcessGrid
from fedact_flwr.settings import Settings, dump
from strategies.seeds import derive_seed

SEED = 16  # samples partitions 0, 1, 0


def test_a_client_that_is_killed_and_one_that_is_late(network: Any, make_settings: Callable[..., Settings]) -> None:
    """Each is named and left out of its round, the late reply of the next one too, and both take part again.

    The model is the one of a run in one process in which those two answers failed.
    """
    small = {"clients": 2, "clients_per_round": 2, "rounds": 3, "local_steps": 3, "output": str(network.folder)}
    rounds = network.folder / "network" / "rounds.jsonl"

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in rounds.read_text().splitlines()] if rounds.exists() else []

    def client_in_round(server_round: int, node: subprocess.Popen[bytes]) -> psutil.Process:
        """The node's client process of this round, once it has taken its task: by then it has imported torch."""
        earlier: set[int] = set()
        found: list[psutil.Process] = []

        def look() -> bool:
            for process in psutil.Process(node.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "flwr-clientapp" not in "".join(process.cmdline()):
                        continue
                    if len(lines()) < server_round:
                        earlier.add(process.pid)
                    elif process.pid not in earlier and process.memory_info().rss > 150e6:
                        found.append(process)
            return bool(found)

        network.wait_for(look)
        return found[0]

    settings = make_settings(**small, name="network", round_timeout=60.0)
    with network.superlink(), network.supernode(0) as first, network.supernode(1) as second, network.submit(settings):
        late = client_in_round(2, second)
        client_in_round(2, first).kill()
        late.suspend()
        network.wait_for(lambda: len(lines()) == 3)
        late.resume()
        network.wait_for((network.folder / "network" / "summary.json").exists)

    failed = [line.get("failed", []) for line in lines()[1:]]
    assert [len(names) for names in failed] == [0, 2, 0], failed
    assert failed[1][0].startswith("partition 0, node ")
    assert failed[1][1].startswith("partition 1, node ")
    assert failed[1][1].endswith("no reply in time")

    class Failing(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            if message.metadata.group_id == "2":
                return Message(Error(0, "lost"), reply_to=message)
            return super()._answer(message)

    own = make_settings(**small, name="inprocess")
    server_app.run(own, Failing(client_app, 2, dump(own)))
    a, b = ((network.folder / name / "model.safetensors").read_bytes() for name in ("network", "inprocess"))
    assert a == b


def test_a_superlink_that_is_killed_loses_no_run(network: Any, make_settings: Callable[..., Settings]) -> None:
    """A new one, new nodes that find what their clients kept, and the run goes on to the bits of one process."""
    small = {"method": "scaffold", "clients": 2, "clients_per_round": 2, "rounds": 3, "local_steps": 3}
    record = network.folder / "network"
    settings = make_settings(**small, output=str(network.folder), name="network", checkpoint_every=1)
    with network.superlink() as superlink, network.supernode(0), network.supernode(1), network.submit(settings):
        network.wait_for((record / "checkpoints" / "round-1").exists)
        server = next(
            p
            for p in psutil.Process(superlink.pid).children(recursive=True)
            if "flwr-serverapp" in "".join(p.cmdline())
        )
        superlink.kill()
        superlink.wait()  # its children look for its process
        server.wait(60)
    assert json.loads((record / "summary.json").read_text())["status"] == "interrupted"
    settings = settings.model_copy(update={"resume": str(record)})
    with network.superlink(), network.supernode(0), network.supernode(1), network.submit(settings) as run:
        network.wait_for(lambda: run.poll() is not None)
    assert run.returncode == 0, network.log.read_text()[-3000:]
    own = make_settings(**small, output=str(network.folder), name="inprocess")
    server_app.run(own, InProcessGrid(client_app, 2, dump(own)))
    a, b = ((network.folder / name / "model.safetensors").read_bytes() for name in ("network", "inprocess"))
    assert a == b


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
    own = make_settings(**small, output=str(network.folder), name="inprocess")
    server_app.run(own, InProcessGrid(client_app, 2, dump(own)))
    a, b = ((network.folder / name / "model.safetensors").read_bytes() for name in ("network", "inprocess"))
    assert a == b
