"""Through Flower's real simulation: SuperLink, `flwr run`, Ray."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from fedact_flwr.cli import app as cli
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import run_inprocess
from fedact_flwr.server_app import app as server_app
from fedact_flwr.settings import Settings, dump
from fedact_flwr.simulation import BIN, _end, _end_orphans, _free_port

SMALL = ["clients=4", "clients_per_round=3", "rounds=2", "local_steps=3", "device=cpu"]
FEDACT = [sys.executable, "-m", "fedact_flwr", "run"]


def sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that were started for runs under ``folder``."""
    marker = f"FEDACT_TEST={folder}"
    found = []
    for process in psutil.process_iter():
        try:
            if marker in (f"{k}={v}" for k, v in process.environ().items()):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"COLUMNS": "200", "FEDACT_TEST": str(folder)}


def test_the_same_bits_from_every_engine(tmp_path: Path, network: Any, make_settings: Callable[..., Settings]) -> None:
    """In this process, in Flower's simulation, which leaves nothing behind, and by a SuperLink and two SuperNodes."""
    small = {"clients": 2, "clients_per_round": 2, "rounds": 2, "local_steps": 3, "output": str(tmp_path)}
    small |= {"wire_delta": "int8", "wire_second_moment": "int8", "wire_correction": "bfloat16"}
    small |= {"method": "fedact_align", "holdout": 0.2, "personal_every": 2}  # whose clients keep something
    run_inprocess(server_app, client_app, 2, dump(make_settings(**small, name="inprocess")))

    own = sets(*(f"{key}={value}" for key, value in small.items()), "name=simulation", "device=cpu")
    result = subprocess.run(
        [*FEDACT, *own], capture_output=True, text=True, env=environment(tmp_path), timeout=180, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "round 2/2  accuracy" in result.stdout
    assert f"record: {tmp_path / 'simulation'}" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"inprocess", "simulation", "config.toml"}
    assert not processes_of(tmp_path)

    with (
        network.superlink(), network.supernode(0), network.supernode(1),
        network.submit(make_settings(**small, name="network")) as run,
    ):  # fmt: skip
        network.wait_for(lambda: run.poll() is not None)
    assert run.returncode == 0, network.log.read_text()[-3000:]

    records = [tmp_path / engine for engine in ("inprocess", "simulation", "network")]
    models = [(record / "model.safetensors").read_bytes() for record in records]
    assert models[0] == models[1] == models[2]
    clients = [(record / "personal.csv").read_text() for record in records]
    assert clients[0] == clients[1] == clients[2]
    assert len(clients[0].splitlines()) == 1 + 2
    rounds = [[json.loads(line) for line in (r / "rounds.jsonl").read_text().splitlines()] for r in records]
    for line in (line for run_lines in rounds for line in run_lines):
        line["seconds"] = line["client_seconds"] = 0
    assert rounds[0] == rounds[1] == rounds[2]
    assert [line["failures"] for line in rounds[0][1:]] == [0, 0]


def test_on_a_ray_cluster_of_two_nodes(tmp_path: Path, make_settings: Callable[..., Settings]) -> None:
    """One client at a time on each node; the bits are those of one process, and the cluster stays."""
    folder, port = Path(tempfile.mkdtemp(dir="/tmp")), _free_port()  # Ray's sockets have short paths
    marked = environment(tmp_path) | {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    start = [str(BIN / "ray"), "start", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=1"]
    nodes: list[subprocess.Popen[str]] = []

    def has_clients(node: subprocess.Popen[str]) -> bool:
        processes = psutil.Process(node.pid).children(recursive=True)
        return any("ClientAppActor" in "".join(process.cmdline()) for process in processes)

    try:
        for where in ([f"--port={port}", "--head", "--include-dashboard=false"], [f"--address=127.0.0.1:{port}"]):
            node = subprocess.Popen([*start, *where], env=marked, stdout=subprocess.PIPE, text=True)
            nodes.append(node)
            assert node.stdout
            assert any("Ray runtime started" in line for line in node.stdout)
        small = {"clients": 4, "clients_per_round": 3, "rounds": 2, "local_steps": 3}
        own = sets(*(f"{key}={value}" for key, value in small.items()), f"output={tmp_path}", "name=ray", "device=cpu")
        run = subprocess.Popen([*FEDACT, "--ray", f"127.0.0.1:{port}", *own], env=environment(tmp_path))
        trained: set[int] = set()
        while run.poll() is None:
            for node in nodes:
                with contextlib.suppress(psutil.Error):  # a process that has just ended
                    trained |= {node.pid} if has_clients(node) else set()
            time.sleep(0.1)
        assert run.returncode == 0
        assert trained == {node.pid for node in nodes}
        assert all(node.poll() is None for node in nodes)
    finally:
        for node in reversed(nodes):
            _end(node)
        shutil.rmtree(folder, ignore_errors=True)
    run_inprocess(server_app, client_app, 4, dump(make_settings(**small, output=str(tmp_path), name="inprocess")))
    ray, inprocess = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("ray", "inprocess"))
    assert ray == inprocess


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray", "127.0.0.1:1"], "--ray 127.0.0.1:1: no Ray cluster answers there"),
        (["--ray", "somewhere"], "--ray somewhere: allowed is HOST:PORT"),
        (["--ray", "127.0.0.1:1", "--engine", "inprocess"], "--ray 127.0.0.1:1: allowed with --engine flower"),
    ],
)
def test_a_wrong_cluster_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["run", *arguments, *sets(f"output={tmp_path}")])
    assert result.exit_code == 2
    assert message in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_exits_1_with_the_cause(tmp_path: Path) -> None:
    """No client can answer within a millisecond."""
    result = subprocess.run(
        [*FEDACT, *sets(*SMALL, f"output={tmp_path}", "name=run", "round_timeout=1e-3", "max_failed_rounds=1")],
        capture_output=True, text=True, env=environment(tmp_path), timeout=180,
    )  # fmt: skip
    assert result.returncode == 1
    assert "error: the run failed: RunFailed: round 1: 0 good replies" in result.stderr
    assert "no reply in time" in result.stderr
    assert not processes_of(tmp_path)


def test_a_process_whose_parent_is_gone_is_ended_by_its_home(tmp_path: Path) -> None:
    """As a client of Ray's, whose parents may end before it; a stranger's with another home goes on."""
    sleep = ["sh", "-c", f"{sys.executable} -c 'import time; time.sleep(60)' >/dev/null & echo $!"]
    homes = (tmp_path / "ours", tmp_path / "another")
    starts = [subprocess.run(sleep, env=os.environ | {"FLWR_HOME": str(h)}, stdout=subprocess.PIPE) for h in homes]
    ours, another = (psutil.Process(int(start.stdout)) for start in starts)
    try:
        _end_orphans(homes[0])
        assert not ours.is_running() or ours.status() == psutil.STATUS_ZOMBIE
        assert another.is_running()
    finally:
        another.kill()


@pytest.mark.parametrize(("sent", "rounds_first"), [(signal.SIGINT, 0), (signal.SIGTERM, 2)])
def test_a_signal_ends_all_that_was_started_and_the_run_can_go_on(
    sent: signal.Signals, rounds_first: int, tmp_path: Path
) -> None:
    """Before the start there is nothing to go on from; in the middle, the run ends in the bits of one process."""
    settings = sets(*SMALL, "rounds=10", "method=scaffold", "checkpoint_every=1000", f"output={tmp_path}")
    process = subprocess.Popen(
        [*FEDACT, *settings, *sets("name=run")],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(tmp_path),
    )  # fmt: skip
    record = tmp_path / "run"
    sign = record / ("rounds.jsonl" if rounds_first else "run.log")
    deadline = time.monotonic() + 120
    while not (sign.exists() and sign.read_text().count("\n") > rounds_first) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(tmp_path)
    process.send_signal(sent)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    summary = json.loads((record / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert f"error: interrupted after {summary['rounds']} of 10 rounds" in error
    assert not processes_of(tmp_path)
    if rounds_first:
        (checkpoint,) = (record / "checkpoints").iterdir()
        # a round may have ended beside the signal's handler
        assert checkpoint.name in (f"round-{summary['rounds']}", f"round-{summary['rounds'] - 1}")
        assert f"fedact run --resume {record} goes on" in error
        inprocess = ["run", "--engine", "inprocess"]
        assert CliRunner().invoke(cli, [*inprocess, "--resume", str(record)]).exit_code == 0
        assert CliRunner().invoke(cli, [*inprocess, *settings, *sets("name=straight")]).exit_code == 0
        models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "straight")]
        assert models[0] == models[1]
