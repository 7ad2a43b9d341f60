"""A run over a network of Flower's processes on this machine, for benchmarks: its rounds, and each process's memory."""

import json
import subprocess
import tempfile
import threading
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from fedact_flwr.record import ROUNDS_FILE
from fedact_flwr.settings import PROJECT, dump, parse, read_defaults
from fedact_flwr.simulation import BIN, _end, _environment, _free_port, _wait_until_listening

KINDS = {  # what stands in the command line of a process, and what it is; the first that does
    "flwr-serverapp": "ServerApp (the strategy)",
    "flwr-clientapp": "ClientApp (training), each",
    "flower-superlink": "SuperLink",
    "flower-supernode": "SuperNode, each",
}


def run_on_network(own: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The lines of the rounds of a run with a SuperNode for each client, and the peak memory by `KINDS`, in bytes.

    ``own`` are settings; output and name are chosen here. Ends the program where a client fails.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary, ExitStack() as started:
        home = Path(temporary)
        settings = parse(read_defaults() | own | {"output": str(home), "name": "run"})
        port, log = _free_port(), (home / "flower.log").open("ab")
        environment = _environment(home) | {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}
        connection = {"superlink": {"network": {"address": f"127.0.0.1:{port}", "insecure": True}}}
        (home / "config.toml").write_text(tomli_w.dumps(connection))
        (home / "run.toml").write_text(tomli_w.dumps(dump(settings)))

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], env=environment, stdout=log, stderr=log, cwd=home
            )
            started.callback(_end, process)
            return process

        superlink = start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
        _wait_until_listening(port, superlink)
        for i in range(settings.clients):
            node = f"partition-id={i} num-partitions={settings.clients} cache='{home / 'cache'}'"
            address = ["--superlink", f"127.0.0.1:{port}", "--port", str(_free_port())]
            start("flower-supernode", "--insecure", *address, "--node-config", node)
        peaks: dict[str, int] = defaultdict(int)
        ended = threading.Event()
        watching = threading.Thread(target=_watch, args=(peaks, ended))
        watching.start()
        run = start("flwr", "run", str(PROJECT), "network", "--stream", "--run-config", str(home / "run.toml"))
        run.wait()
        ended.set()
        watching.join()
        path = home / "run" / ROUNDS_FILE
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if len(lines) < settings.rounds + 1 or any(line.get("failures", 0) for line in lines):
            raise SystemExit((home / "flower.log").read_text()[-5000:])
    return lines, peaks


def _watch(peaks: dict[str, int], ended: threading.Event) -> None:
    """The largest resident memory of any process of each kind."""
    while not ended.wait(0.2):
        for process in psutil.process_iter(["cmdline", "memory_info"]):
            line = " ".join(process.info["cmdline"] or [])
            kind = next((kind for sign, kind in KINDS.items() if sign in line), None)
            if kind and process.info["memory_info"]:
                peaks[kind] = max(peaks[kind], process.info["memory_info"].rss)
