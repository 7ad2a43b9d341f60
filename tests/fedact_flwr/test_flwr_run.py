"""Flower's own command, as people use it."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import tomli_w
from typer.testing import CliRunner

from fedact_flwr.cli import app as cli
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import run_inprocess
from fedact_flwr.server_app import app as server_app
from fedact_flwr.settings import PROJECT, Settings, dump
from fedact_flwr.simulation import BIN, _free_port


def test_flwr_run_itself(tmp_path: Path, make_settings: Callable[..., Settings]) -> None:
    """No wrapper: Flower's own background SuperLink and its two default supernodes, some runs in a row.

    The first, by overrides, of a method whose clients keep state, ends in the same bits as in process, and so when it
    goes on, by a file.
    """
    home = tmp_path / "home"
    flower = os.environ | {
        "COLUMNS": "200",
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(_free_port()),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }

    def flwr_run(config: str) -> str:
        command = ["flwr", "run", str(PROJECT), "--stream", "--run-config", config]
        result = subprocess.run(command, cwd=tmp_path, env=flower, capture_output=True, text=True, timeout=180)
        assert result.returncode == 0, result.stderr
        return result.stdout

    try:
        flwr_run("method='scaffold' rounds=2 local_steps=2 device='cpu' name='overrides'")
        overrides = tmp_path / "runs" / "overrides"
        summary = json.loads((overrides / "summary.json").read_text())
        assert summary["status"] == "completed"
        assert summary["final"]["replies"] == 10  # ten partitions on two supernodes
        assert 'method = "scaffold"' in (overrides / "settings.toml").read_text()
        settings = make_settings(method="scaffold", rounds=2, local_steps=2, output=str(tmp_path), name="inprocess")
        run_inprocess(server_app, client_app, 3, dump(settings))
        ours = tmp_path / "inprocess" / "model.safetensors"
        assert (overrides / "model.safetensors").read_bytes() == ours.read_bytes()

        more = {"resume": str(overrides), "method": "scaffold", "rounds": 3, "local_steps": 2, "device": "cpu"}
        (tmp_path / "more.toml").write_text(tomli_w.dumps(more))
        flwr_run(str(tmp_path / "more.toml"))
        assert json.loads((overrides / "summary.json").read_text())["rounds"] == 3
        resume = ["run", "--engine", "inprocess", "--resume", str(ours.parent), "--set", "rounds=3"]
        assert CliRunner().invoke(cli, resume).exit_code == 0
        assert (overrides / "model.safetensors").read_bytes() == ours.read_bytes()

        assert "rounds = 'x': allowed is a whole number above 0" in flwr_run("rounds='x'")
    finally:
        for process in psutil.process_iter():
            try:
                if process.environ().get("FLWR_HOME") == str(home):
                    process.kill()
            except psutil.Error:
                continue
