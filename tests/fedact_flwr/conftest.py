"""A network of processes on this machine, for the tests that need one."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedact_flwr.record import ROUNDS_FILE, SUMMARY_FILE
from fedact_flwr.settings import SETTINGS_FILE, Settings, dump, parse, read_defaults
from fedact_flwr.simulation import BIN, _end, _environment, _free_port, _wait_until_listening


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


@pytest.fixture
def network(tmp_path: Path) -> Network:
    return Network(tmp_path)


@pytest.fixture(scope="session")
def write_record() -> Callable[..., Path]:
    """Writes a record as a run would, of these lines, with these settings."""

    def write(folder: Path, lines: list[dict[str, Any]], status: str = "completed", **own: Any) -> Path:
        folder.mkdir(parents=True)
        rounds = {"rounds": lines[-1]["round"]} if lines and lines[-1].get("round") else {}
        own = rounds | own
        (folder / SETTINGS_FILE).write_text(tomli_w.dumps(dump(parse(read_defaults() | own))))
        (folder / ROUNDS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
        if status != "unfinished":
            cause = None if status == "completed" else "RunFailed: round 2"
            (folder / SUMMARY_FILE).write_text(json.dumps({"status": status, "cause": cause}))
        return folder

    return write
