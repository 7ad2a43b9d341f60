"""The section on personalized evaluations: its numbers by hand, whom it draws, and what it leaves out."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedact_flwr.cli import app
from fedact_flwr.experiments import personal
from fedact_flwr.experiments.comparison import compare
from fedact_flwr.experiments.document import Block, Figure, Paragraph, Table
from fedact_flwr.experiments.personal import personalized, sorted_clients
from fedact_flwr.experiments.pictures import Curve
from fedact_flwr.experiments.runs import find_runs
from fedact_flwr.personal import PERSONAL_FILE, spread_over_clients, write_clients
from strategies import wire
from tasks import TASKS

Record = Callable[..., Path]
Panels = Mapping[str, Mapping[str, Curve]]


@pytest.fixture
def record(write_record: Record) -> Record:
    """A run of two rounds; after each all clients measure, after the last one these values of the models' target."""

    def write(
        folder: Path, task: str = "digits", models: Mapping[str, Sequence[float]] | None = None, **own: Any
    ) -> Path:
        target = TASKS[task].target
        lines: list[dict[str, Any]] = [{"round": r, target: 0.5, "loss": 1.0, "seconds": 1.0 * r} for r in range(3)]
        rounds: dict[int, list[dict[str, float]]] = {1: [], 2: []}
        for i, values in enumerate(zip(*(models or {}).values(), strict=True)):
            who = {wire.PARTITION: i, wire.NUM_EXAMPLES: 10 * (i + 1)}
            last = {f"{kind}_{target}": value for kind, value in zip(models or {}, values, strict=True)}
            rounds[1].append(who | dict.fromkeys(last, 0.01))
            rounds[2].append(who | last)
        for r, clients in rounds.items():
            lines[r] |= spread_over_clients(clients, TASKS[task])
        own = ({"personal_every": 1, "holdout": 0.2} if models else {}) | own
        write_record(folder, lines, task=task, **own)
        for r, clients in rounds.items():
            if clients:
                write_clients(folder, r, clients)
        return folder

    return write


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Panels]:
    """What the figures are made of."""
    panels: list[Panels] = []
    curves = personal.curves

    def watched(of: Panels, *arguments: Any) -> str:
        panels.append(of)
        return curves(of, *arguments)

    monkeypatch.setattr(personal, "curves", watched)
    return panels


def section(folder: Path) -> list[Block]:
    return personalized(compare(find_runs([folder])[0]))


def tables(blocks: Sequence[Block]) -> list[list[list[str]]]:
    """Their rows, with ** around what is bold."""
    return [
        [[f"**{x}**" if (i, j) in block.bold else x for j, x in enumerate(row)] for i, row in enumerate(block.rows)]
        for block in blocks
        if isinstance(block, Table)
    ]


def words(blocks: Sequence[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, Paragraph))


DITTO = {"global": [0.5, 0.3, 0.5, 0.3], "personal": [1.0, 0.8, 1.0, 0.8], "tuned": [0.65] * 4}
FEDAVG = [
    {"global": [0.4, 0.6, 0.4, 0.6], "tuned": [0.5, 0.7, 0.5, 0.7]},
    {"global": [0.9, 0.5, 0.5, 0.9], "tuned": [0.9, 0.7, 0.7, 0.9]},
]


@pytest.fixture
def runs(record: Record, tmp_path: Path) -> Path:
    """Two methods and two seeds at 0.1, and one run at 0.6."""
    for seed, fedavg in enumerate(FEDAVG, 1):
        record(tmp_path / f"a{seed}", models=fedavg, method="fedavg", seed=seed, dirichlet_alpha=0.1)
        record(tmp_path / f"b{seed}", models=DITTO, method="ditto", seed=seed, dirichlet_alpha=0.1)
    record(tmp_path / "c", models=DITTO, method="ditto", seed=1, dirichlet_alpha=0.6)
    return tmp_path


def test_the_tables(runs: Path) -> None:
    """Of fedavg, seeds: means 50 and 70, sd 10 and 20, the worst 40 and 50; tuned 60 and 80, 10 and 10, 50 and 70.

    The standard deviation of two seeds is their difference by sqrt 2. The worst of four clients is one.
    """
    blocks = section(runs)
    headers = [block.header for block in blocks if isinstance(block, Table)]
    assert headers == [
        ["condition", "method", "global: accuracy %", "personal: accuracy %", "tuned: accuracy %"],
        ["condition", "method", "global: sd", "personal: sd", "tuned: sd",
         "global: worst decile", "personal: worst decile", "tuned: worst decile"],
    ]  # fmt: skip
    means, apart = tables(blocks)
    assert means == [
        ["Dir(0.1)", "fedavg", "**60.0 ± 14.1**", "-", "**70.0 ± 14.1**"],
        ["Dir(0.1)", "ditto", "40.0 ± 0.0", "90.0 ± 0.0", "65.0 ± 0.0"],
        ["Dir(0.6)", "ditto", "40.0 (1)", "90.0 (1)", "65.0 (1)"],
    ]
    assert apart == [
        ["Dir(0.1)", "fedavg", "15.0 ± 7.1", "-", "10.0 ± 0.0", "**45.0 ± 7.1**", "-", "60.0 ± 14.1"],
        ["Dir(0.1)", "ditto", "10.0 ± 0.0", "10.0 ± 0.0", "0.0 ± 0.0", "30.0 ± 0.0", "80.0 ± 0.0", "**65.0 ± 0.0**"],
        ["Dir(0.6)", "ditto", "10.0 (1)", "10.0 (1)", "0.0 (1)", "30.0 (1)", "80.0 (1)", "65.0 (1)"],
    ]


def test_the_section_follows_the_results(runs: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(runs), "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "report.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")][:2] == ["## Results", "## Personalized"]
    assert "](figures/report-personal-accuracy.svg)" in text
    assert (tmp_path / "out" / "figures" / "report-personal-accuracy.svg").exists()


def test_where_less_is_better_the_lowest_is_the_best_and_the_highest_the_worst(
    record: Record, drawn: list[Panels], tmp_path: Path
) -> None:
    record(tmp_path / "a", "sft", {"global": [4.0, 2.0, 3.0], "tuned": [2.0, 3.0, 1.0]}, method="fedavg")
    record(tmp_path / "b", "sft", {"global": [5.0, 1.0, 6.0], "tuned": [2.0, 3.5, 3.5]}, method="local_adamw")
    means, apart = tables(section(tmp_path))
    assert [row[2:] for row in means] == [["**3.000**", "-", "**2.000**"], ["4.000", "-", "3.000"]]
    assert [row[5:] for row in apart] == [["**4.000**", "-", "**3.000**"], ["6.000", "-", "3.500"]]
    (panel,) = drawn[0].values()
    assert panel["fedavg"].mean.tolist() == [3.0, 2.0, 1.0]


def test_runs_without_such_an_evaluation_have_no_section_and_no_row(record: Record, tmp_path: Path) -> None:
    record(tmp_path / "a", method="fedavg")
    assert section(tmp_path) == []
    record(tmp_path / "b", models=DITTO, method="ditto")
    assert [[row[1] for row in table] for table in tables(section(tmp_path))] == [["ditto"], ["ditto"]]


def test_a_run_that_made_none_beside_some_that_did_is_not_counted_and_not_missed(
    record: Record, tmp_path: Path
) -> None:
    for seed in (1, 2):
        record(tmp_path / f"a{seed}", models=DITTO, method="ditto", seed=seed)
    record(tmp_path / "b", method="ditto", seed=3, holdout=0.2)
    blocks = section(tmp_path)
    assert tables(blocks)[0] == [["digits, vit", "ditto", "40.0 ± 0.0 (2)", "90.0 ± 0.0 (2)", "65.0 ± 0.0 (2)"]]
    assert "Not in the figure" not in words(blocks)


def test_the_clients_of_each_run_are_sorted_before_the_mean() -> None:
    """The worst are 20 and 40, the best 60 and 40."""
    up = sorted_clients([[0.6, 0.2], [0.4, 0.4]], higher_is_better=True, scale=100)
    assert up.x.tolist() == [50, 100]
    assert up.mean == pytest.approx([30, 50])
    assert up.deviation == pytest.approx([20 / math.sqrt(2)] * 2)
    down = sorted_clients([[6.0, 2.0, 4.0, 4.0]], higher_is_better=False, scale=1)
    assert down.x.tolist() == [25, 50, 75, 100]
    assert down.mean.tolist() == [6, 4, 4, 2]
    assert down.deviation.tolist() == [0, 0, 0, 0]


def test_the_figure_is_of_own_models_or_else_of_the_fine_tuned_one_after_the_last_round(
    runs: Path, drawn: list[Panels]
) -> None:
    blocks = section(runs)
    (panels,) = drawn
    assert {title: list(panel) for title, panel in panels.items()} == {
        "Dir(0.1)": ["fedavg", "ditto"], "Dir(0.6)": ["ditto"],
    }  # fmt: skip
    fedavg, ditto = panels["Dir(0.1)"].values()
    assert fedavg.mean == pytest.approx([60, 60, 80, 80])  # seeds: 50, 50, 70, 70 and 70, 70, 90, 90
    assert fedavg.deviation == pytest.approx([20 / math.sqrt(2)] * 4)
    assert ditto.mean == pytest.approx([80, 80, 100, 100])
    (figure,) = (block for block in blocks if isinstance(block, Figure))
    assert "each with its own model (ditto) or the fine-tuned global model (fedavg)" in figure.caption
    assert "Not in the figure" not in words(blocks)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no personal.csv with the tuned_accuracy of each client after the last round"),
        ("", "no personal.csv with"),
        ("round,client,tuned_accuracy\n1,0,0.5\n", "no personal.csv with"),
        ("round,client,global_accuracy\n2,0,0.5\n", "no personal.csv with"),
        ("round,client,tuned_accuracy\n2,0,nan\n", "no personal.csv with"),
        ("round,client,tuned_accuracy\n2,0,well\n", "personal.csv: not a table of numbers"),
        ("round,client,tuned_accuracy\n2,0\n", "personal.csv: not a table of numbers"),
        ("round,client\n2,0,0.5\n", "personal.csv: not a table of numbers"),
        ("\xff", "personal.csv: not a table of numbers"),
    ],
)
def test_a_file_of_clients_that_cant_be_read_is_said_and_breaks_nothing(
    runs: Path, drawn: list[Panels], text: str | None, reason: str
) -> None:
    before = tables(section(runs))
    (runs / "a1" / PERSONAL_FILE).unlink()
    if text is not None:
        (runs / "a1" / PERSONAL_FILE).write_text(text, encoding="latin-1")
    blocks = section(runs)
    assert f"Not in the figure of the clients, 1: `a1`: {reason}" in words(blocks)
    assert drawn[-1]["Dir(0.1)"]["fedavg"].mean == pytest.approx([70, 70, 90, 90])  # of the other seed
    assert tables(blocks) == before


def test_runs_that_lack_clients_are_named(record: Record, tmp_path: Path) -> None:
    ditto: dict[str, Any] = {"models": DITTO, "method": "ditto"}
    record(tmp_path / "whole", **ditto, seed=1)
    assert "Not of all clients" not in words(section(tmp_path))
    lines = record(tmp_path / "part", **ditto, seed=2) / "rounds.jsonl"
    rounds = [json.loads(line) for line in lines.read_text().splitlines()]
    rounds[-1] |= {"personal_failures": 3, "tuned_failures": 1}
    lines.write_text("".join(json.dumps(line) + "\n" for line in rounds))
    text = words(section(tmp_path))
    words_of = "clients without a good answer: 3, clients whose fine-tuning diverged: 1"
    assert f"Not of all clients, 1: `part`: {words_of}" in text


def test_runs_with_different_numbers_of_clients_make_no_curve(
    record: Record, drawn: list[Panels], tmp_path: Path
) -> None:
    record(tmp_path / "a", models={"global": [0.5, 0.5], "tuned": [0.5, 0.5]}, method="fedavg", seed=1)
    record(tmp_path / "b", models={"global": [0.5], "tuned": [0.5]}, method="fedavg", seed=2)
    blocks = section(tmp_path)
    assert "the clients, 1: fedavg, digits, vit: not as many clients in each run" in words(blocks)
    assert not drawn
    assert len(tables(blocks)) == 2


def test_methods_with_learning_rates_of_their_own_share_a_condition(record: Record, tmp_path: Path) -> None:
    """Also of fine-tuning, which follows; and with runs that measure less often, or are older than that setting."""
    record(tmp_path / "a", models=DITTO, method="ditto", lr=0.1, seed=1)
    record(tmp_path / "b", models=FEDAVG[0], method="local_adamw", lr=0.01, seed=1)
    record(tmp_path / "c", models=DITTO, method="ditto", lr=0.1, seed=2, personal_every=2)
    old = record(tmp_path / "d", models=FEDAVG[0], method="local_adamw", lr=0.01, seed=2) / "settings.toml"
    old.write_text(old.read_text().replace('finetune_lr = "auto"\n', ""))
    assert "finetune_lr" not in old.read_text()
    record(tmp_path / "e", models=DITTO, method="fedavg", lr=0.01, finetune_lr=0.1, seed=1)
    comparison = compare(find_runs([tmp_path])[0])
    assert len(comparison.columns) == 1
    assert [row.label for row in comparison.rows] == ["fedavg", "local_adamw", "ditto"]
    assert comparison.usual_seeds == 2


def test_learning_rates_of_fine_tuning_are_never_averaged(record: Record, tmp_path: Path) -> None:
    record(tmp_path / "a", models=DITTO, method="ditto", finetune_lr=0.3, seed=1)
    record(tmp_path / "b", models=DITTO, method="ditto", finetune_lr=0.2, seed=2)
    labels = [row.label for row in compare(find_runs([tmp_path])[0]).rows]
    assert labels == ["ditto, finetune_lr = 0.2", "ditto, finetune_lr = 0.3"]
