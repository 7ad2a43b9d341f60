"""Over the network: a SuperLink and SuperNodes as processes of their own."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tomli_w
from flwr.app import Error, Message

from fedact_flwr import server_app as server_app_module
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import InProcessGrid, run_inprocess
from fedact_flwr.server_app import app as server_app
from fedact_flwr.settings import Settings, dump
from fedact_flwr.simulation import BIN, _end, _environment, _free_port, _wait_until_listening, run_simulation
from strategies.seeds import derive_seed

SEED = 6  # samples partitions 0, 1, 1, 0


class Network:
    """A SuperLink, whose SuperNodes and runs are processes that end with their `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.port = folder, folder / "flower.log", _free_port()
        self.environment = _environment(folder) | {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
        connection = {"address": f"127.0.0.1:{self.port}", "insecure": True}
        (folder / "config.toml").write_text(tomli_w.dumps({"superlink": {"network": connection}}))

    @contextmanager
    def process(self, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        with self.log.open("ab") as file:
            started = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], env=self.environment, stdout=file, stderr=file,
                start_new_session=True, cwd=self.folder,
            )  # fmt: skip
            try:
                yield started
            finally:
                _end(started)

    @contextmanager
    def superlink(self) -> Iterator[subprocess.Popen[bytes]]:
        options = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        with self.process("flower-superlink", *options) as started:
            _wait_until_listening(self.port, started)
            yield started

    def supernode(self, i: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
        node = f"partition-id={i} num-partitions=2 client-state='{self.folder / f'node{i}'}' cache='{self.folder}'"
        address = ["--superlink", f"127.0.0.1:{self.port}", "--port", str(_free_port())]
        return self.process("flower-supernode", "--insecure", *address, "--node-config", node)

    def submit(self, settings: Settings) -> AbstractContextManager[subprocess.Popen[bytes]]:
        (self.folder / "run.toml").write_text(tomli_w.dumps(dump(settings)))
        return self.process("fedact", "submit", "network", str(self.folder / "run.toml"))

    def wait_for(self, sign: Callable[[], bool], seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not sign():
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.2)


def test_the_same_bits_from_every_engine(tmp_path: Path, make_settings: Callable[..., Settings]) -> None:
    """In this process, in Flower's simulation, and by a SuperLink and two SuperNodes."""
    small = {"clients": 2, "clients_per_round": 2, "rounds": 2, "local_steps": 3, "output": str(tmp_path)}
    run_inprocess(server_app, client_app, 2, dump(make_settings(**small, name="inprocess")))
    run_simulation(make_settings(**small, name="simulation"), tmp_path / "simulation.log")
    network = Network(tmp_path)
    with (
        network.superlink(), network.supernode(0), network.supernode(1),
        network.submit(make_settings(**small, name="network")) as run,
    ):  # fmt: skip
        network.wait_for(lambda: run.poll() is not None)
    assert run.returncode == 0, network.log.read_text()[-3000:]

    records = [tmp_path / engine for engine in ("inprocess", "simulation", "network")]
    models = [(record / "model.safetensors").read_bytes() for record in records]
    assert models[0] == models[1] == models[2]
    rounds = [[json.loads(line) for line in (r / "rounds.jsonl").read_text().splitlines()] for r in records]
    for line in (line for run_lines in rounds for line in run_lines):
        line["seconds"] = line["client_seconds"] = 0
    assert rounds[0] == rounds[1] == rounds[2]
    assert [line["failures"] for line in rounds[0][1:]] == [0, 0]


def test_what_a_client_keeps_survives_a_restarted_supernode(
    tmp_path: Path, make_settings: Callable[..., Settings]
) -> None:
    """Node 0 trains in rounds 1 and 4, and is killed and started anew in between: the same bits as in process."""
    sampled = [np.random.default_rng(derive_seed(SEED, r, "train", "sample")).choice(2, 1)[0] for r in (1, 2, 3, 4)]
    assert sampled == [0, 1, 1, 0]
    small = {"method": "scaffold", "seed": SEED, "clients": 2, "clients_per_round": 1, "rounds": 4, "local_steps": 3}
    network, rounds = Network(tmp_path), tmp_path / "network" / "rounds.jsonl"
    with (
        network.superlink(), network.supernode(1),
        network.submit(make_settings(**small, output=str(tmp_path), name="network")) as run,
    ):  # fmt: skip
        with network.supernode(0):
            network.wait_for(lambda: rounds.exists() and rounds.read_text().count("\n") >= 2)
        with network.supernode(0):
            network.wait_for(lambda: run.poll() is not None)

    log = network.log.read_text()[-3000:]
    assert run.returncode == 0, log
    assert [p.name for p in (tmp_path / "node0").rglob("round-*")] != []
    assert [json.loads(line).get("failures") for line in rounds.read_text().splitlines()] == [None, 0, 0, 0, 0], log
    run_inprocess(server_app, client_app, 2, dump(make_settings(**small, output=str(tmp_path), name="inprocess")))
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("network", "inprocess"))
    assert a == b


def test_a_client_that_is_killed_and_one_that_is_late(tmp_path: Path, make_settings: Callable[..., Settings]) -> None:
    """Each is named and left out of its round, the late reply of the next one too, and both take part again.

    The model is the one of a run in one process in which those two answers failed.
    """
    small = {"clients": 2, "clients_per_round": 2, "rounds": 3, "local_steps": 3, "output": str(tmp_path)}
    network, rounds = Network(tmp_path), tmp_path / "network" / "rounds.jsonl"

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

    settings = make_settings(**small, name="network", round_timeout=45.0)
    with network.superlink(), network.supernode(0) as first, network.supernode(1) as second, network.submit(settings):
        late = client_in_round(2, second)
        client_in_round(2, first).kill()
        late.suspend()
        network.wait_for(lambda: len(lines()) == 3)
        late.resume()
        network.wait_for((tmp_path / "network" / "summary.json").exists)

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
    server_app_module.run(own, Failing(client_app, 2, dump(own)))
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("network", "inprocess"))
    assert a == b


def test_a_superlink_that_is_killed_loses_no_run(tmp_path: Path, make_settings: Callable[..., Settings]) -> None:
    """A new one, new nodes that find what their clients kept, and the run goes on to the bits of one process."""
    small = {"method": "scaffold", "clients": 2, "clients_per_round": 2, "rounds": 4, "local_steps": 3}
    network, record = Network(tmp_path), tmp_path / "network"
    settings = make_settings(**small, output=str(tmp_path), name="network", checkpoint_every=1)
    with network.superlink() as superlink, network.supernode(0), network.supernode(1), network.submit(settings):
        network.wait_for((record / "checkpoints" / "round-2").exists)
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
    run_inprocess(server_app, client_app, 2, dump(make_settings(**small, output=str(tmp_path), name="inprocess")))
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("network", "inprocess"))
    assert a == b
