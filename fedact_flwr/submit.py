"""A run on the nodes of a SuperLink that is there already, as people run it with `flwr run`, but with its outcome."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import tomli_w

from fedact_flwr.settings import PROJECT, Settings, dump
from fedact_flwr.simulation import BIN, SimulationFailed, raise_unless_completed


def submit(connection: str, settings: Settings) -> None:
    """Start the run on the connection of that name in Flower's config.toml, print its log, and wait for its end.

    Raises `SimulationFailed`, also where the log ended before the run.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text(tomli_w.dumps(dump(settings)))
        command = [str(BIN / "flwr"), "run", str(PROJECT), connection, "--run-config", str(config), "--format", "json"]
        started = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        answer = json.loads(started.stdout)
        run_id = str(answer["run-id"])
    except (ValueError, KeyError) as error:
        reason = started.stdout if isinstance(error, ValueError) else answer.get("error-message", answer)
        raise SimulationFailed(f"flwr run started no run: {reason}") from error
    subprocess.run([str(BIN / "flwr"), "log", run_id, connection, "--stream"], check=False)
    raise_unless_completed(connection, os.environ, "--run-id", run_id)
