"""A run on the nodes of a SuperLink that is there already, as people run it with `flwr run`, but with its outcome."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from fedact_flwr.settings import PROJECT, SettingsError, check_own_settings, dump, read_settings
from fedact_flwr.simulation import BIN, SimulationFailed, raise_unless_completed


def submit(connection: str, files: Sequence[Path], overrides: Sequence[str]) -> None:
    """Start the run on the connection of that name in Flower's config.toml, print its log, and wait for its end.

    Raises `SettingsError`, and `SimulationFailed`, also where the log ended before the run.
    """
    settings = read_settings(files, overrides)
    check_own_settings(settings)
    if not Path(settings.output).is_absolute():
        raise SettingsError(
            f"output = {settings.output!r}: allowed is an absolute path, of the machine on which the ServerApp runs"
        )
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
