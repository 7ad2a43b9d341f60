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
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil
import tomli_w

from fedact_flwr.settings import PROJECT, Settings, dump

CONNECTION = "fedact"
START_TIMEOUT = 60.0
STOP_TIMEOUT = 10.0
BIN = Path(sys.executable).parent  # Flower's commands, in this very environment


class SimulationFailed(RuntimeError):
    """Flower could not carry the run; the message says why."""


def run_simulation(settings: Settings, log_path: Path) -> None:
    """Run the app through Flower's simulation and wait for its end; Flower's log goes to ``log_path``.

    One supernode per client, ``threads`` CPUs and ``client_gpus`` GPUs for each client that runs. Whatever ends
    this function, also Ctrl-C, everything that it started is gone when it returns. Raises `SimulationFailed`.
    """
    home = Path(tempfile.mkdtemp(prefix="fedact-flower-"))
    port = _free_port()
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": os.environ.get("FLWR_TELEMETRY_ENABLED", "0"),
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
    }
    (home / "config.toml").write_text(
        tomli_w.dumps({"superlink": {CONNECTION: {"address": f"127.0.0.1:{port}", "insecure": True}}})
    )
    (home / "run.toml").write_text(tomli_w.dumps(dump(settings)))
    resources = (
        f"num-supernodes={settings.clients} client-resources-num-cpus={settings.threads} "
        f"client-resources-num-gpus={settings.client_gpus}"
    )
    with log_path.open("ab") as log:
        superlink = _start(
            [
                "flower-superlink",
                "--insecure",
                "--simulation",
                "--disable-runtime-dependency-installation",
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            environment,
            log,
        )
        try:
            _wait_until_healthy(port, superlink)
            flwr_run = ["flwr", "run", str(PROJECT), CONNECTION, "--stream"]
            config = ["--run-config", str(home / "run.toml"), "--federation-config", resources]
            stream = _start([*flwr_run, *config], environment, log)
            try:
                if stream.wait() != 0:
                    raise SimulationFailed(f"flwr run could not submit the run; see {log_path}")
                _raise_unless_completed(environment, log_path)
            finally:
                _end(stream)
        finally:
            _end(superlink)
            shutil.rmtree(home, ignore_errors=True)


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


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all its descendants, politely first."""
    try:
        root = psutil.Process(process.pid)
        family = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        process.poll()
        return
    for member in family:
        _signal(member, signal.SIGTERM)
    _, alive = psutil.wait_procs(family, STOP_TIMEOUT)
    for member in alive:
        _signal(member, signal.SIGKILL)
    process.wait()


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _wait_until_healthy(port: int, superlink: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if superlink.poll() is not None:
            raise SimulationFailed(f"flower-superlink ended at once with code {superlink.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SimulationFailed(f"flower-superlink did not start within {START_TIMEOUT:.0f} seconds")


def _raise_unless_completed(environment: dict[str, str], log_path: Path) -> None:
    """`flwr run --stream` exits 0 also when the run failed; the SuperLink knows."""
    listing = subprocess.run(
        [str(BIN / "flwr"), "ls", CONNECTION, "--format", "json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        (run,) = json.loads(listing.stdout)["runs"]
    except (ValueError, KeyError) as error:
        raise SimulationFailed(f"flwr ls gave no run: {listing.stdout}{listing.stderr}") from error
    if run["status"] != "finished:completed":
        raise SimulationFailed(f"{run.get('status-details') or run['status']}; see {log_path}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
