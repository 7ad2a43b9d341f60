"""docs/deploy.md, command by command, on the loopback: SuperLink, SuperNodes and users as processes of their own."""

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from flwr.app.user_config import UserConfig
from PIL import Image

from fedact_flwr import server_app
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import InProcessGrid
from fedact_flwr.settings import PROJECT, dump, parse, read_file
from fedact_flwr.simulation import BIN, _end, _environment, _free_port, _wait_until_listening

PAGE = (PROJECT / "docs" / "deploy.md").read_text()
SITES = {"site-a": 30, "site-b": 45}  # and how many images each has


def blocks(language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)


class Federation:
    """The page's hosts as folders, and its commands, which are taken one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.link = folder, folder / "link"
        self.port = _free_port()
        self.commands = [line.strip() for block in blocks("sh") for line in block.splitlines() if line.strip()]
        self.environment = _environment(folder) | {"COLUMNS": "300"}
        self.log = folder / "processes.log"
        self.processes = ExitStack()

    def take(self, start: str, host: str = "link", **known: str) -> list[str]:
        """The next command that starts so, as it is typed here."""
        line = next(line for line in self.commands if line.startswith(start))
        self.commands.remove(line)
        return shlex.split(self.here(line, host, **known))

    def here(self, text: str, host: str, **known: str) -> str:
        for there, here in {
            "link.example.org": "localhost", "0.0.0.0": "127.0.0.1", "8000": str(self.port), "'cuda'": "'cpu'",
            "/srv/fedact": str(self.folder / host), "/home/fedact": str(self.link), **known,
        }.items():  # fmt: skip
            text = text.replace(there, here)
        return text

    def start(self, command: list[str], cwd: Path, log: Path | None = None) -> subprocess.Popen[bytes]:
        with (log or self.log).open("ab") as file:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], cwd=cwd, env=self.environment, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        self.processes.callback(_end, process)
        return process

    def run(self, command: list[str]) -> str:
        result = subprocess.run(
            [str(BIN / command[0]), *command[1:]], cwd=self.link, env=self.environment, text=True, timeout=60,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout
        return result.stdout

    def listed(self, *what: str) -> list[dict[str, Any]]:
        """The runs, or the nodes, that the SuperLink knows."""
        (found,) = (
            v
            for v in json.loads(self.run(["flwr", *what, "federation", "--format", "json"])).values()
            if isinstance(v, list)
        )
        return found

    def wait_for(self, sign: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not sign():
            assert time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.3)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A SuperLink that is up, `flwr` that knows it, and two sites with their data, keys and certificate."""
    f = Federation(tmp_path_factory.mktemp("deploy"))
    for y in range(10):
        for split in ("train", "test"):
            (f.link / "held-out" / split / str(y)).mkdir(parents=True)
        Image.new("L", (28, 28), 40 + 150 * (y % 2)).save(f.link / "held-out" / "test" / str(y) / "0.png")
    with f.processes:
        f.run(f.take("fedact certs"))
        for site, n in SITES.items():
            images = [Image.fromarray(np.full((28, 28), 40 + 150 * (i % 2) + i, np.uint8)) for i in range(n)]
            rows = Dataset.from_dict({"image": images, "label": [i % 2 for i in range(n)]})
            rows.save_to_disk(str(f.folder / site / "data"))
            for name in ("ca.crt", f"{site}.key"):
                shutil.copy(f.link / "certs" / name, f.folder / site)
        superlink = f.start(f.take("flower-superlink"), f.link)
        (config,) = blocks("toml")
        (f.folder / "config.toml").write_text(f.here(config, "link"))
        _wait_until_listening(f.port, superlink)
        yield f


def test_the_page(federation: Federation) -> None:
    f = federation
    nodes = {}
    for site in SITES:
        f.run(f.take("flwr supernode register"))
        nodes[site] = f.take("flower-supernode", site)
        f.start([*nodes[site], "--port", str(_free_port())], f.folder / site)
    unit = next(line for line in blocks("ini")[0].splitlines() if line.startswith("ExecStart="))
    assert shlex.split(f.here(unit, "site-a"))[1:] == nodes["site-a"][1:]
    f.wait_for(lambda: [node["status"] for node in f.listed("supernode", "list")] == ["online"] * 2)
    assert f.run(f.take("flwr supernode list")).count("online") == 2

    # a run, and the same in this process
    run = f.take("fedact submit")
    assert f.start([*run, "--set", "rounds=2"], PROJECT).wait(180) == 0
    record = f.link / "runs" / "first"
    assert json.loads((record / "summary.json").read_text())["status"] == "completed", f.log.read_text()[-5000:]
    lines = [json.loads(line) for line in (record / "rounds.jsonl").read_text().splitlines()]
    assert [(line["failures"], line["num_examples"]) for line in lines[1:]] == [(0, sum(SITES.values()))] * 2
    settings = parse(read_file(record / "settings.toml") | {"name": "inprocess"})
    grid = InProcessGrid(client_app, 2, dump(settings))
    for i, (site, context) in enumerate(zip(SITES, grid._contexts.values(), strict=True)):
        data = str(f.folder / site / "data")
        context.node_config = UserConfig({"partition-id": i, "data": data, "device": "cpu"})
    server_app.run(settings, grid)
    model, other = (f.link / "runs" / name / "model.safetensors" for name in ("first", "inprocess"))
    assert model.read_bytes() == other.read_bytes()

    # a longer one is watched, and stopped
    f.start([*run, "--set", "name=second", "--set", "rounds=100"], PROJECT)
    f.wait_for(lambda: any(r["status"] == "running" for r in f.listed("list")))
    (run_id,) = (str(r["run-id"]) for r in f.listed("list") if r["status"] == "running")
    second = f.link / "runs" / "second"
    f.wait_for(lambda: (second / "rounds.jsonl").exists() and (second / "rounds.jsonl").read_text().count("\n") > 1)
    assert run_id in f.run(f.take("flwr list"))
    assert "record: " in f.run(f.take("flwr log", RUN_ID=run_id))
    f.run(f.take("flwr stop", RUN_ID=run_id))
    f.wait_for(lambda: all(r["status"].startswith("finished") for r in f.listed("list")))
    f.wait_for(lambda: (second / "summary.json").exists() and "interrupted" in (second / "summary.json").read_text())
    assert list((second / "checkpoints").glob("round-*"))

    # a node more, and one less
    f.run(f.take("fedact certs"))
    before = {node["node-id"] for node in f.listed("supernode", "list")}
    f.run(f.take("flwr supernode register"))
    (new,) = {node["node-id"] for node in f.listed("supernode", "list")} - before
    f.run(f.take("flwr supernode unregister", NODE_ID=str(new)))
    assert f.commands == []


def test_nodes_that_may_not_join_say_why(federation: Federation) -> None:
    """Each ends, or with plain text tries on; the SuperLink goes on."""
    f = federation
    f.run(["fedact", "certs", "other", "--host", "localhost", "--node", "stranger"])
    for key in ("stranger.key", "superlink.key", "ca.crt"):
        shutil.copy(f.link / "other" / key, f.folder / f"other-{key}")
    shutil.copy(f.link / "certs" / "ca.crt", f.folder)
    cases = {
        "--root-certificates other-ca.crt": ["Exit Code: 305", "certificate verify failed"],
        "--root-certificates ca.crt --auth-supernode-private-key other-stranger.key": ["2004", "Failed to activate"],
        "--root-certificates ca.crt": ["SuperNode authentication is enabled. All SuperNodes must be registered"],
        "--root-certificates ca.crt --auth-supernode-private-key other-superlink.key": ["Unable to parse the private"],
        "--insecure --max-retries 1": ["Connection attempt failed, retrying"],
    }
    processes = {}
    for i, options in enumerate(cases):
        node = ["flower-supernode", "--superlink", f"localhost:{f.port}", "--port", str(_free_port())]
        processes[options] = f.start(
            [*node, *options.split(), "--node-config", "partition-id=7"], f.folder, f.folder / f"{i}.log"
        )
    for i, (options, messages) in enumerate(cases.items()):
        assert processes[options].wait(60) != 0, options
        for message in messages:
            assert message in (f.folder / f"{i}.log").read_text(), options
    f.run(["flwr", "list", "federation"])

    config = f.folder / "config.toml"
    good = config.read_text()
    try:
        for bad in (
            good.replace("certs/ca.crt", "other/ca.crt"),
            re.sub("root-certificates.*", "insecure = true", good),
        ):
            config.write_text(bad)
            with pytest.raises(AssertionError, match="Connection to the SuperLink is unavailable"):
                f.run(["flwr", "list", "federation"])
    finally:
        config.write_text(good)
