"""Over the network: a SuperLink and SuperNodes as processes of their own."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tomli_w

from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import run_inprocess
from fedact_flwr.server_app import app as server_app
from fedact_flwr.settings import Settings, dump
from fedact_flwr.simulation import BIN, _end, _environment, _free_port, _wait_until_listening
from strategies.seeds import derive_seed

SEED = 6  # samples partitions 0, 1, 1, 0


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as file:
        started = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]], env=environment, stdout=file, stderr=file, start_new_session=True,
            cwd=log.parent,
        )  # fmt: skip
        try:
            yield started
        finally:
            _end(started)


def wait_for(sign: Callable[[], bool], log: Path, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not sign():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)


def test_what_a_client_keeps_survives_a_restarted_supernode(
    tmp_path: Path, make_settings: Callable[..., Settings]
) -> None:
    """Node 0 trains in rounds 1 and 4, and is killed and started anew in between: the same bits as in process."""
    sampled = [np.random.default_rng(derive_seed(SEED, r, "train", "sample")).choice(2, 1)[0] for r in (1, 2, 3, 4)]
    assert sampled == [0, 1, 1, 0]
    small = {"method": "scaffold", "seed": SEED, "clients": 2, "clients_per_round": 1, "rounds": 4, "local_steps": 3}
    settings = make_settings(**small, output=str(tmp_path), name="network")
    port, log = _free_port(), tmp_path / "flower.log"
    environment = _environment(tmp_path) | {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
    connection = {"address": f"127.0.0.1:{port}", "insecure": True}
    (tmp_path / "config.toml").write_text(tomli_w.dumps({"superlink": {"network": connection}}))
    (tmp_path / "run.toml").write_text(tomli_w.dumps(dump(settings)))

    def supernode(i: int) -> list[str]:
        node = f"partition-id={i} num-partitions=2 client-state='{tmp_path / f'node{i}'}' cache='{tmp_path}'"
        address = ["--superlink", f"127.0.0.1:{port}", "--port", str(_free_port())]
        return ["flower-supernode", "--insecure", *address, "--node-config", node]

    rounds = tmp_path / "network" / "rounds.jsonl"
    superlink = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    run = ["fedact", "submit", "network", str(tmp_path / "run.toml")]
    with (
        process(superlink, environment, log) as server,
        process(supernode(1), environment, log),
    ):
        _wait_until_listening(port, server)
        with process(run, environment, log) as submit:
            with process(supernode(0), environment, log):
                wait_for(lambda: rounds.exists() and rounds.read_text().count("\n") >= 2, log)
            with process(supernode(0), environment, log):
                wait_for(lambda: submit.poll() is not None, log)

    assert submit.returncode == 0, log.read_text()[-3000:]
    assert [p.name for p in (tmp_path / "node0").rglob("round-*")] != []
    own = make_settings(**small, output=str(tmp_path), name="inprocess")
    run_inprocess(server_app, client_app, 2, dump(own))
    network, inprocess = (tmp_path / name for name in ("network", "inprocess"))
    assert '"failures": 0' in rounds.read_text(), log.read_text()[-3000:]
    assert '"failures": 1' not in rounds.read_text(), log.read_text()[-3000:]
    assert (network / "model.safetensors").read_bytes() == (inprocess / "model.safetensors").read_bytes()
