"""`fedact submit` where no run starts; test_simulation.py has one that ends well, test_compose.py one that fails."""

import os
import subprocess
import sys
from pathlib import Path


def submit(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedact_flwr", "submit", "nowhere", *arguments]
    environment = os.environ | {"FLWR_HOME": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_a_connection_that_is_not_there_exits_1_with_the_cause(tmp_path: Path) -> None:
    result = submit(tmp_path, "--set", f"output={tmp_path}")
    assert result.returncode == 1
    assert "SuperLink connection 'nowhere' not found" in result.stderr


def test_a_relative_output_exits_2(tmp_path: Path) -> None:
    result = submit(tmp_path)
    assert result.returncode == 2
    assert "error: output = 'runs': allowed is an absolute path" in result.stderr


def test_a_wrong_setting_exits_2(tmp_path: Path) -> None:
    result = submit(tmp_path, "--set", "method=fedavg", "--set", "mu=0.5")
    assert result.returncode == 2
    assert "error: mu = 0.5: fedavg " in result.stderr
