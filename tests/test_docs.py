"""The code in the docs runs as it stands there."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clients.methods import CLIENT_METHODS, ClientMethod
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import run_inprocess
from fedact_flwr.server_app import app as server_app
from fedact_flwr.settings import PROJECT, Settings, dump
from strategies import STRATEGIES
from tasks import TASKS


def run_code_of(page: str, **names: Any) -> dict[str, Any]:
    """Run the page's Python blocks one after another; gives the names that they define."""
    blocks = re.findall(r"```python\n(.*?)```", (PROJECT / "docs" / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, names)
    return names


def test_every_test_that_the_table_of_faults_names_is_there() -> None:
    rows = re.findall(r"^\| .*\|$", (PROJECT / "docs" / "reliability.md").read_text(), re.MULTILINE)[2:]
    tests = "".join(path.read_text() for path in (PROJECT / "tests").rglob("test_*.py"))
    for row in rows:
        names = re.findall(r"`(test_\w+)`", row)
        assert names, row
        assert all(f"def {name}(" in tests for name in names), row


def losses(settings: Settings) -> list[float]:
    run_inprocess(server_app, client_app, settings.clients, dump(settings))
    lines = (Path(settings.output) / settings.name / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_the_task(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "breast_cancer", run_code_of("add-a-task.md")["BreastCancer"]())
    run = losses(make_settings(task="breast_cancer", dirichlet_alpha=0.5, rounds=5, name="run"))
    assert run[-1] < 0.7 * run[0]


def test_the_method(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    halves: dict[str, dict[str, Any]] = {"CLIENT_METHODS": {}, "STRATEGIES": {}}
    run_code_of("add-a-method.md", ClientMethod=ClientMethod, **halves)
    monkeypatch.setitem(CLIENT_METHODS, "fedavgm", halves["CLIENT_METHODS"]["fedavgm"])
    monkeypatch.setitem(STRATEGIES, "fedavgm", halves["STRATEGIES"]["fedavgm"])
    run = losses(make_settings(method="fedavgm", lr=0.001, split="iid", rounds=6, name="run"))
    assert run[-1] < 0.9 * run[0]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(p.name for p in (PROJECT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    path = PROJECT / page if (PROJECT / page).exists() else PROJECT / "docs" / page
    for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target
