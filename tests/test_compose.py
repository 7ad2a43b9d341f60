"""The container demo, for real; `docker/test.sh` brings what this needs where it is missing."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedact_flwr.settings import PROJECT
from fedact_flwr.simulation import _free_port

BASE_IMAGE = "python:3.11-slim"
NODES = (1, 2, 3)
TRAINED = re.compile(r"round (\d+): partition (\d+) trained \d+ steps on \d+ examples, loss \d+\.\d+")

Compose = Callable[..., str]


def docker(*arguments: str, **environment: str) -> str:
    """What it prints; its output is in the error where it fails."""
    done = subprocess.run(
        ["docker", *arguments], cwd=PROJECT, env=os.environ | environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def why_not() -> str | None:
    try:
        docker("info")
        docker("image", "inspect", BASE_IMAGE)
    except (OSError, AssertionError) as error:
        return f"no Docker engine with {BASE_IMAGE} answers: {str(error)[:200]}"
    return None


REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@contextmanager
def stack(name: str, *overlays: str, **environment: str) -> Iterator[Compose]:
    """The services, built, up and healthy; afterwards nothing of them is left."""
    project = f"fedact-{name}-{os.getpid()}"
    environment |= {"FEDACT_PORT": str(_free_port())}
    files = [part for file in ("docker-compose.yml", *overlays) for part in ("-f", file)]

    def compose(*arguments: str) -> str:
        return docker("compose", "-p", project, *files, *arguments, **environment)

    try:
        compose("up", "--build", "-d", "--wait")
        yield compose
    finally:
        compose("--profile", "run", "down", "-v")  # also a `run` that goes on
    for kind in ("ps -aq", "volume ls -q", "network ls -q"):
        assert not docker(*kind.split(), "--filter", f"label=com.docker.compose.project={project}"), kind


@pytest.fixture(scope="module")
def demo() -> Iterator[Compose]:
    with stack("demo") as compose:
        yield compose


def record(compose: Compose, name: str, folder: Path) -> tuple[dict, list[dict]]:
    """The run's record, copied out of the volume as docs/docker.md says: its summary and rounds."""
    compose("cp", f"superexec:/records/{name}", str(folder / name))
    assert (folder / name / "model.safetensors").stat().st_size > 0
    rounds = (folder / name / "rounds.jsonl").read_text().splitlines()
    return json.loads((folder / name / "summary.json").read_text()), [json.loads(line) for line in rounds]


def test_a_run_learns_and_each_node_trains_its_own_partition(demo: Compose, tmp_path: Path) -> None:
    log = demo("run", "--rm", "-T", "run", "--set", "name=full")
    summary, rounds = record(demo, "full", tmp_path)
    assert summary["status"] == "completed", log[-3000:]
    assert rounds[0]["accuracy"] < 0.2
    assert rounds[-1]["accuracy"] > 0.75
    for node in NODES:
        trained = TRAINED.findall(demo("logs", f"superexec-{node}"))
        assert trained == [(str(r), str(node - 1)) for r in range(1, rounds[-1]["round"] + 1)]


def test_a_failed_run_fails_the_command(demo: Compose) -> None:
    """No client can answer within a millisecond."""
    sets = ["--set", "name=failed", "--set", "round_timeout=1e-3", "--set", "max_failed_rounds=1"]
    with pytest.raises(AssertionError, match=r"error: the run failed: .*round 1: 0 good replies"):
        demo("run", "--rm", "-T", "run", *sets)


def test_a_run_goes_on_without_a_killed_node(demo: Compose, tmp_path: Path) -> None:
    sets = ["--set", "name=killed", "--set", "rounds=3", "--set", "local_steps=5"]
    deadline = time.monotonic() + 300
    so_far = ("exec", "-T", "superexec", "sh", "-c", "cat /records/killed/rounds.jsonl || true")
    with ThreadPoolExecutor() as pool:
        run = pool.submit(demo, "run", "--rm", "-T", "run", *sets)
        while '"round": 1' not in demo(*so_far):
            assert time.monotonic() < deadline
            time.sleep(1)
        demo("kill", "supernode-3")
        run.result()
    summary, rounds = record(demo, "killed", tmp_path)
    assert summary["status"] == "completed"
    assert (rounds[1]["replies"], rounds[1]["failures"]) == (3, 0)
    assert "partition 2" in rounds[2]["failed"][0]
    for line in rounds[2:]:
        assert (line["replies"], line["failures"]) == (2, 1)


def test_a_run_over_tls_with_nodes_known_by_their_keys(tmp_path: Path) -> None:
    """And with a SuperLink that keeps its state, which knows the nodes again."""
    certificates = tmp_path / "certs"
    nodes = [part for node in NODES for part in ("--node", f"supernode-{node}")]
    certs = [sys.executable, "-m", "fedact_flwr", "certs", str(certificates), "--host", "superlink", *nodes]
    subprocess.run(certs, check=True, capture_output=True)
    whose = {"FEDACT_CERTS": str(certificates), "FEDACT_USER": f"{os.getuid()}:{os.getgid()}"}
    with stack("tls", "docker/tls.yml", "docker/state.yml", **whose) as compose:
        compose("run", "--rm", "-T", "run", "--set", "name=tls", "--set", "rounds=1", "--set", "local_steps=5")
        summary, rounds = record(compose, "tls", tmp_path)
        assert summary["status"] == "completed"
        assert rounds[1]["replies"] == 3
        assert "already in use" not in compose("logs", "register")
        compose("up", "-d", "--force-recreate", "--wait")
        assert "already in use" in compose("logs", "register")


@pytest.mark.parametrize("overlay", sorted(path.name for path in (PROJECT / "docker").glob("*.yml")))
def test_the_overlay_fits(overlay: str) -> None:
    docker("compose", "-f", "docker-compose.yml", "-f", f"docker/{overlay}", "config", "-q")
