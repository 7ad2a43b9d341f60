"""Flower's simulation for one run: a SuperLink of its own, `flwr run` as people use it, and a clean end.

The SuperLink that `flwr run` starts by itself outlives it, is shared by all runs of a user, and installs the app's
dependencies anew unless told otherwise. This one has its own home and port, installs nothing, and ends with the run.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil
import tomli_w

from fedact_flwr.settings import PROJECT, Settings, dump

CONNECTION = "fedact"
START_TIMEOUT = 60.0
STOP_TIMEOUT = 10.0
FINISH_TIMEOUT = 60.0  # to write a checkpoint
SERVER_PROCESS = "flwr-simulation"
BIN = Path(sys.executable).parent  # Flower's commands, in this very environment


class SimulationFailed(RuntimeError):
    """Flower could not carry the run; the message says why."""


def run_simulation(settings: Settings, log_path: Path, ray: str | None = None) -> None:
    """Run the app through Flower's simulation and wait for its end; Flower's log goes to ``log_path``.

    One supernode per client, ``threads`` CPUs and ``client_gpus`` GPUs for each client that runs, on the Ray cluster
    at the address ``ray``, or one of its own. Whatever ends this function, also Ctrl-C, everything that it started is
    gone when it returns. Raises `SimulationFailed`.
    """
    # In /tmp and not in TMPDIR, which may be too long: Ray makes sockets in it, whose paths have 107 bytes at most.
    home = Path(tempfile.mkdtemp(prefix="fedact-", dir="/tmp" if os.path.isdir("/tmp") else None))
    try:
        port = _free_port()
        environment = _environment(home, ray)
        (home / "config.toml").write_text(
            tomli_w.dumps({"superlink": {CONNECTION: {"address": f"127.0.0.1:{port}", "insecure": True}}})
        )
        (home / "run.toml").write_text(tomli_w.dumps(dump(settings)))
        with log_path.open("ab") as log:
            _run(settings, home, port, environment, log)
    finally:
        _end_orphans(home)
        shutil.rmtree(home, ignore_errors=True)


def _run(settings: Settings, home: Path, port: int, environment: dict[str, str], log: IO[bytes]) -> None:
    resources = (
        f"num-supernodes={settings.clients} client-resources-num-cpus={settings.threads} "
        f"client-resources-num-gpus={settings.client_gpus or 0.0}"
    )
    quietly = ["--insecure", "--simulation", "--disable-runtime-dependency-installation"]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    superlink = _start(["flower-superlink", *quietly, *address], environment, log)
    try:
        _wait_until_listening(port, superlink)
        config = ["--run-config", str(home / "run.toml"), "--federation-config", resources]
        stream = _start(["flwr", "run", str(PROJECT), CONNECTION, "--stream", *config], environment, log)
        try:
            if stream.wait() != 0:
                raise SimulationFailed(f"flwr run ended with code {stream.returncode}; the log says why")
            raise_unless_completed(CONNECTION, environment)
        except KeyboardInterrupt:
            _let_finish(superlink)
            raise
        finally:
            _end(stream)
    finally:
        _end(superlink)


def _environment(home: Path, ray: str | None = None) -> dict[str, str]:
    """The user's environment, without what would lead the run to other people's servers or another Ray cluster."""
    ours = {
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": os.environ.get("FLWR_TELEMETRY_ENABLED", "0"),
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
        # Flower has no setting for a cluster's address; a folder of its own keeps Ray from one that happens to run here
        **({"RAY_ADDRESS": ray} if ray else {"RAY_TMPDIR": str(home)}),
    }
    return {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | ours


def _start(command: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start one of Flower's commands. In a session of its own, so that Ctrl-C reaches us alone and we end it."""
    return subprocess.Popen(
        [str(BIN / command[0]), *command[1:]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _let_finish(superlink: subprocess.Popen[bytes]) -> None:
    """Have the process in which the ServerApp runs write its checkpoint and end."""
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(superlink.pid).children(recursive=True)
        running = [p for p in family if any(SERVER_PROCESS in part for part in p.cmdline())]
        for process in running:
            process.send_signal(signal.SIGINT)  # Ray has taken SIGTERM from Flower
        deadline = time.monotonic() + FINISH_TIMEOUT
        while time.monotonic() < deadline and any(p.status() != psutil.STATUS_ZOMBIE for p in running):
            time.sleep(0.1)  # Flower does not ask how its processes ended, so they stay as zombies


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all its descendants at once: none of them holds anything that outlives the run."""
    try:
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family[1:], STOP_TIMEOUT)
    process.wait()


def _end_orphans(home: Path) -> None:
    """End what is nobody's descendant any more: a client of Ray's outlives the process that started it for a while."""
    deadline = time.monotonic() + STOP_TIMEOUT
    while (orphans := _processes_with(home)) and time.monotonic() < deadline:
        for orphan in orphans:
            with contextlib.suppress(psutil.Error):
                orphan.kill()
        psutil.wait_procs(orphans, STOP_TIMEOUT)


def _processes_with(home: Path) -> list[psutil.Process]:
    """The processes that were started with this home, known by their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or gone by now
            if process.environ().get("FLWR_HOME") == str(home):
                found.append(process)
    return found


def _wait_until_listening(port: int, superlink: subprocess.Popen[bytes]) -> None:
    """Wait for this very process to listen: another server on the port must not get our run."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if superlink.poll() is not None:
            raise SimulationFailed(f"flower-superlink ended at once with code {superlink.returncode}; the log says why")
        with contextlib.suppress(psutil.Error):
            connections = psutil.Process(superlink.pid).net_connections(kind="tcp")
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
                return
        time.sleep(0.1)
    raise SimulationFailed(f"flower-superlink did not start within {START_TIMEOUT:.0f} seconds; the log may say why")


def raise_unless_completed(connection: str, environment: Mapping[str, str], *run_id: str) -> None:
    """`flwr run --stream` exits 0 also when the run failed; the SuperLink knows. ``run_id`` where it has had others."""
    listing = subprocess.run(
        [str(BIN / "flwr"), "ls", connection, *run_id, "--format", "json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        (run,) = json.loads(listing.stdout)["runs"]
        status = run["status"]
    except (ValueError, KeyError) as error:
        raise SimulationFailed(f"flwr ls gave no run: {listing.stdout}{listing.stderr}") from error
    if status != "finished:completed":
        raise SimulationFailed(f"{status}: {run.get('status-details') or 'no details'}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
