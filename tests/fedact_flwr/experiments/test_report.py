"""`fedact report`: what shares a cell, what is worked out from it, and that all of it is on the page."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedact_flwr.cli import app
from fedact_flwr.experiments.comparison import compare
from fedact_flwr.experiments.document import Figure, Paragraph, Table, to_html, to_markdown
from fedact_flwr.experiments.paper import _values, values_for
from fedact_flwr.experiments.runs import Run, find_runs, read_run
from fedact_flwr.record import CLIENTS_FILE
from fedact_flwr.settings import PROJECT, read_file

Record = Callable[..., Path]


@pytest.fixture
def record(write_record: Record) -> Record:
    """A run whose rounds 0, 1, 2, ... end with these accuracies, 2 seconds each; its clients hold two classes."""

    def write(folder: Path, accuracies: Sequence[float], status: str = "completed", **own: Any) -> Path:
        lines: list[dict[str, Any]] = [
            {"round": r, "loss": 1 - a, "accuracy": a, "seconds": 2.0 * r} for r, a in enumerate(accuracies)
        ]
        for line in lines[1:]:
            line |= {"bytes_sent": 3e6, "bytes_received": 1e6, "client_seconds": 0.25, "train_loss": 0.5}
            line |= {"direction_consistency": 0.5, "positive_score_ratio": 0.6, "top_score_mass": 0.7}
        write_record(folder, lines, status, rounds=len(accuracies) - 1, **own)
        clients = [{"client": 0, "examples": 3, "labels": [1, 2]}, {"client": 1, "examples": 4, "labels": [0, 4]}]
        (folder / CLIENTS_FILE).write_text(json.dumps(clients))
        return folder

    return write


def report(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *(str(argument) for argument in arguments)])
    return result.exit_code, result.output


def rows_of(markdown: str, heading: str, table: int = 0) -> list[list[str]]:
    """The rows of a table below a heading, without the header."""
    section = markdown[markdown.index(f"\n## {heading}\n") + 4 :].split("\n## ")[0]
    lines = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[table].splitlines()[2:]
    return [[entry.strip() for entry in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def runs(record: Record, tmp_path: Path) -> Path:
    """Two methods, two conditions, three seeds; fedact is 0.1, 0.2 and 0.3 better at 0.1, and worse at 0.6."""
    for seed, (ours, theirs) in enumerate([(0.6, 0.5), (0.7, 0.5), (0.8, 0.5)], 1):
        record(tmp_path / f"a{seed}", [0.1, 0.55, ours], method="fedact", seed=seed, dirichlet_alpha=0.1)
        record(tmp_path / f"b{seed}", [0.1, 0.3, theirs], method="local_adamw", seed=seed, dirichlet_alpha=0.1)
        record(tmp_path / f"c{seed}", [0.1, 0.2, 0.4], method="fedact", seed=seed, dirichlet_alpha=0.6)
        record(tmp_path / f"d{seed}", [0.1, 0.2, 0.9], method="local_adamw", seed=seed, dirichlet_alpha=0.6)
    return tmp_path


def test_the_tables(runs: Path, tmp_path: Path) -> None:
    """By hand: 70 and sd 10; t = 0.2 / (0.1 / sqrt 3), so with two degrees of freedom p = 1 - t / sqrt(2 + t^2)."""
    code, output = report(runs, "--output", tmp_path / "out")
    assert code == 0, output
    assert "The runs differ in more than method and seed: in dirichlet_alpha." in output
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| method | Dir(0.1): accuracy % | Dir(0.6): accuracy % |" in text
    assert rows_of(text, "Results") == [
        ["local_adamw", "50.0 ± 0.0", "**90.0 ± 0.0**"], ["fedact", "**70.0 ± 10.0**", "40.0 ± 0.0"],
    ]  # fmt: skip
    assert rows_of(text, "Results", 1)[:2] == [
        ["Dir(0.1)", "local_adamw", "0.5 ± 0"], ["Dir(0.1)", "fedact", "0.3 ± 0.1"],
    ]  # fmt: skip
    assert rows_of(text, "Results", 2) == [
        ["Dir(0.1)", "fedact", "local_adamw", "+20", "3", "0.074"],
        ["Dir(0.6)", "local_adamw", "fedact", "+50", "3", "-"],
    ]  # fmt: skip
    assert rows_of(text, "Rounds to a target") == [
        ["Dir(0.1)", "50", "local_adamw", "2", "1.00", "local_adamw"],
        ["Dir(0.1)", "50", "fedact", "1", "2.00", "local_adamw"],
        ["Dir(0.6)", "90", "local_adamw", "2", "1.00", "local_adamw"],
        ["Dir(0.6)", "90", "fedact", "-", "-", "local_adamw"],
    ]
    assert rows_of(text, "Bytes and time")[0] == ["Dir(0.1)", "local_adamw", "3", "1", "2", "0.25"]
    assert len(rows_of(text, "Runs")) == 12
    assert "rounds = 2, task = digits" in text


def test_a_given_target_and_baseline(runs: Path, tmp_path: Path) -> None:
    assert report(runs, "--output", tmp_path / "out", "--target", 55, "--baseline", "fedact")[0] == 0
    rows = rows_of((tmp_path / "out" / "report.md").read_text(), "Rounds to a target")
    assert rows[0] == ["Dir(0.1)", "55", "local_adamw", "-", "-", "fedact"]
    assert rows[1] == ["Dir(0.1)", "55", "fedact", "1", "1.00", "fedact"]
    assert rows[2] == ["Dir(0.6)", "55", "local_adamw", "2", "-", "fedact"]


def test_the_baseline_is_its_best_row_and_its_mean_curve_reaches_its_end(record: Record, tmp_path: Path) -> None:
    """Finals .5 and .7 have a mean of .6, which one of the two runs never reaches, but their mean does, in round 2."""
    for seed, end in ((1, 0.5), (2, 0.7)):
        record(tmp_path / f"a{seed}", [0.1, 0.2, end], method="local_adamw", seed=seed, lr=1e-3)
        record(tmp_path / f"b{seed}", [0.1, 0.2, 0.3], method="local_adamw", seed=seed, lr=1e-4)
        record(tmp_path / f"c{seed}", [0.1, 0.65, 0.8], method="fedact", seed=seed)
    assert report(tmp_path, "--output", tmp_path / "out")[0] == 0
    assert rows_of((tmp_path / "out" / "report.md").read_text(), "Rounds to a target") == [
        ["digits, vit", "60", "local_adamw, lr = 0.0001", "-", "-", "local_adamw, lr = 0.001"],
        ["digits, vit", "60", "local_adamw, lr = 0.001", "2", "1.00", "local_adamw, lr = 0.001"],
        ["digits, vit", "60", "fedact", "1", "2.00", "local_adamw, lr = 0.001"],
    ]


def test_differences_that_are_all_the_same_have_no_p(record: Record, tmp_path: Path) -> None:
    """0.6 - 0.5 and 0.7 - 0.6 are not the same floats. Without a common seed there is no difference either."""
    for seed, ours in enumerate((0.6, 0.7, 0.8), 1):
        record(tmp_path / f"a{seed}", [0.1, ours], method="fedact", seed=seed)
        record(tmp_path / f"b{seed}", [0.1, ours - 0.1], method="fedavg", seed=seed)
        record(tmp_path / f"c{seed}", [0.1, ours], method="fedact", seed=seed, clients=20)
        record(tmp_path / f"d{seed}", [0.1, ours - 0.1], method="fedavg", seed=seed + 9, clients=20)
    assert report(tmp_path, "--output", tmp_path / "out")[0] == 0
    rows = rows_of((tmp_path / "out" / "report.md").read_text(), "Results", 2)
    assert [row[3:] for row in rows] == [["+10", "3", "-"], ["-", "0", "-"]]


def test_a_setting_that_tells_no_row_from_another_is_said_all_the_same(record: Record, tmp_path: Path) -> None:
    record(tmp_path / "a", [0.1, 0.5], method="fedact", clip_norm=1.0, rho=0.1, dirichlet_alpha=0.1)
    record(tmp_path / "b", [0.1, 0.5], method="fedact", clip_norm=1.0, dirichlet_alpha=0.6)
    record(tmp_path / "c", [0.1, 0.5], method="local_adamw", dirichlet_alpha=0.1, lr=0.1)
    notes = compare(find_runs([tmp_path])[0]).notes
    assert "clip_norm is not the same in all rows or conditions: fedact 1; local_adamw 0" in notes
    assert "rho is not the same in all rows or conditions: fedact 0.1, 0.5" in notes
    assert len(notes) == 3
    assert report(tmp_path, "--output", tmp_path / "out")[0] == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| method | condition | lr | rho | clip_norm | seed | record |" in text


def test_a_run_that_diverged_in_the_end_is_left_out(record: Record, tmp_path: Path) -> None:
    record(tmp_path / "a", [0.1, 0.5, 0.6])
    folder = record(tmp_path / "b", [0.1, 0.9, 0.9], seed=1)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    lines[-1]["accuracy"] = None
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, output = report(tmp_path, "--output", tmp_path / "out")
    assert code == 0
    assert f"left out: {folder}: its accuracy is no number in the end" in output
    assert rows_of((tmp_path / "out" / "report.md").read_text(), "Results") == [["fedact", "60.0"]]


def test_of_a_sweep_the_runs_that_it_has_now_and_none_that_tuned(record: Record, tmp_path: Path) -> None:
    sweep = tmp_path / "all" / "sweep"
    for name in ("now", "before"):
        record(sweep / "runs" / name, [0.1, 0.5], seed=1, rho=0.1 if name == "now" else 0.2)
    record(sweep / "tuning" / "t", [0.1, 0.9], seed=2, rho=0.1)
    (sweep / "sweep.toml").write_text("title = 'Of two'\n[tune]\nlr = [0.1, 0.2]\nseeds = [2]\n")
    (sweep / "runs.json").write_text('["now"]')
    tuned = [{"cell": {"method": "fedact"}, "target": "accuracy", "by_lr": [[0.1, 0.9], [0.2, None]], "best": 0.1}]
    (sweep / "tuning.json").write_text(json.dumps(tuned))
    for given in (sweep, tmp_path / "all"):
        code, output = report(given, "--output", tmp_path / "out")
        assert code == 0
        assert f"left out: {sweep / 'runs' / 'before'}: its sweep no longer has it" in output
        text = (tmp_path / "out" / "report.md").read_text()
        assert text.startswith("# Of two\n")
        assert rows_of(text, "Results") == [["fedact", "50.0"]]
        assert rows_of(text, "Learning rates") == [
            ["method = fedact", "0.1", "the edge of the grid", "accuracy %: 0.1: 90, 0.2: failed"],
        ]  # fmt: skip

    (sweep / "tuning.json").write_text("[{")
    code, output = report(sweep, "--output", tmp_path / "out")
    assert code == 0
    assert f"left out: {sweep}: what the sweep left can't be read: " in output


def test_a_record_that_ends_too_soon_is_left_out(record: Record, tmp_path: Path) -> None:
    record(tmp_path / "good", [0.1, 0.5])
    folder = record(tmp_path / "torn", [0.1, 0.5, 0.6])
    text = (folder / "rounds.jsonl").read_text()
    (folder / "rounds.jsonl").write_text(text[:-5])
    assert (
        f"left out: {folder}: rounds.jsonl: it ends at round 1 of 2" in report(tmp_path, "--output", tmp_path / "o")[1]
    )


def test_dollars_in_values_are_no_formula(record: Record, tmp_path: Path) -> None:
    for name in ("$x^2$", "$\\foo{$"):
        record(tmp_path / name.strip("$").replace("\\", ""), [0.1, 0.5], task="fashion_mnist", data=name)
    assert report(tmp_path, "--output", tmp_path / "out")[0] == 0
    assert "data = $x^2$" in (tmp_path / "out" / "report.html").read_text()


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, Mapping[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def count(self, tag: str) -> int:
        return [name for name, _ in self.tags].count(tag)


def test_all_of_it_is_on_a_page_that_needs_nothing_else(record: Record, runs: Path, tmp_path: Path) -> None:
    for tau in (0.3, 0.7):
        for gamma in (0.1, 0.9):
            own = {"tau": tau, "gamma": gamma, "dirichlet_alpha": 0.1, "seed": 1}
            record(runs / f"map-{tau}-{gamma}", [0.1, 0.2, tau], method="fedact", **own)
    assert report(runs, "--output", tmp_path / "out")[0] == 0
    html, text = ((tmp_path / "out" / name).read_text() for name in ("report.html", "report.md"))
    page = Page(html)
    figures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert figures == [
        *(f"figures/report-rounds-{key}.svg" for key in (
            "accuracy", "loss", "train_loss", "direction_consistency", "positive_score_ratio", "top_score_mass",
        )),
        "figures/report-sensitivity-fedact-tau-gamma.svg", "figures/report-split-1.svg",
    ]  # fmt: skip
    assert page.count("figure") == page.count("svg") == len(figures)
    assert all((tmp_path / "out" / figure).read_text().startswith("<?xml") for figure in figures)
    tables = len(re.findall(r"^\|---", text, re.MULTILINE))
    assert page.count("table") == tables == 6
    assert page.count("h2") == len(re.findall(r"^## ", text, re.MULTILINE))
    for tag, attributes in page.tags:  # nothing is fetched
        assert tag not in ("script", "link", "img", "iframe")
        links = [attributes.get("href") or "", attributes.get("xlink:href") or "", attributes.get("src") or ""]
        assert all(link == "" or link.startswith(("#", "data:")) for link in links)
    assert "url(http" not in html
    assert "color-scheme: light dark" in html
    assert "currentColor" in html
    assert not any("currentColor" in (tmp_path / "out" / figure).read_text() for figure in figures)


def test_the_same_runs_give_the_same_report(runs: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert report(runs, "--output", tmp_path / "out" / name)[0] == 0
    first, second = (tmp_path / "out" / name / "report.html" for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()


def labels(folder: Path) -> dict[str, list[str]]:
    """The names of the runs in each cell."""
    comparison = compare(find_runs([folder])[0])
    return {
        f"{row.label} | {column.label}": [run.folder.name for run in cell]
        for (row, column), cell in comparison.cells.items()
    }


def test_a_learning_rate_that_follows_from_the_condition_makes_no_rows(record: Record, tmp_path: Path) -> None:
    record(tmp_path / "a", [0.1, 0.5], lr=0.1, dirichlet_alpha=0.1)
    record(tmp_path / "b", [0.1, 0.5], lr=0.2, dirichlet_alpha=0.6)
    assert labels(tmp_path) == {"fedact | Dir(0.1)": ["a"], "fedact | Dir(0.6)": ["b"]}


def test_one_that_follows_from_a_setting_of_the_method_makes_none_either(record: Record, tmp_path: Path) -> None:
    record(tmp_path / "a", [0.1, 0.5], lr=0.1, rho=0.1, seed=1)
    record(tmp_path / "b", [0.1, 0.5], lr=0.1, rho=0.1, seed=2)
    record(tmp_path / "c", [0.1, 0.5], lr=0.2, rho=0.2, seed=1)
    assert labels(tmp_path) == {"fedact, rho = 0.1 | digits, vit": ["a", "b"], "fedact, rho = 0.2 | digits, vit": ["c"]}


def test_what_differs_in_more_than_the_seed_is_never_averaged(record: Record, tmp_path: Path) -> None:
    for name, own in {
        "a": {}, "b": {"seed": 2}, "lr": {"lr": 0.1}, "batch": {"batch_size": 8}, "wire": {"wire_delta": "int8"},
    }.items():  # fmt: skip
        record(tmp_path / name, [0.1, 0.5], **own)
    assert labels(tmp_path) == {
        "fedact, wire_delta = float32, lr = 0.003 | batch_size = 8": ["batch"],
        "fedact, wire_delta = float32, lr = 0.003 | batch_size = 16": ["b", "a"],
        "fedact, wire_delta = float32, lr = 0.1 | batch_size = 16": ["lr"],
        "fedact, wire_delta = int8, lr = 0.003 | batch_size = 16": ["wire"],
    }


def test_what_only_the_machine_or_the_watching_differs_in_is_alike(record: Record, tmp_path: Path) -> None:
    record(tmp_path / "a", [0.1, 0.5], threads=1, evaluate_every=1, name="a")
    record(tmp_path / "b", [0.1, 0.5], threads=2, evaluate_every=5, name="b", seed=2, diagnostics=False)
    assert labels(tmp_path) == {"fedact | digits, vit": ["b", "a"]}


def test_conditions_are_told_apart_by_few_settings_and_all_are_said(record: Record, tmp_path: Path) -> None:
    """The number of rounds follows from the task, but not that of clients."""
    record(tmp_path / "a", [0.1, 0.5], task="digits")
    record(tmp_path / "b", [0.1, 0.5, 0.6], task="fashion_mnist", model="mlp")
    record(tmp_path / "c", [0.1, 0.5, 0.6], task="fashion_mnist", model="mlp", clients=20)
    comparison = compare(find_runs([tmp_path])[0])
    assert [column.label for column in comparison.columns] == [
        "digits, clients = 10", "fashion_mnist, clients = 10", "fashion_mnist, clients = 20",
    ]  # fmt: skip
    assert "in model, clients, rounds, task. Each" in comparison.notes[0]


def test_a_split_is_told_by_what_it_reads(record: Record, tmp_path: Path) -> None:
    """The concentration of a Dirichlet split tells no runs by classes apart, and says nothing of them."""
    for i, alpha in enumerate((0.1, 0.6)):
        record(tmp_path / f"a{i}", [0.1, 0.5], split="dirichlet", dirichlet_alpha=alpha, classes_per_client=2 + i)
        record(tmp_path / f"b{i}", [0.1, 0.5], split="by_class", dirichlet_alpha=alpha, seed=i)
    comparison = compare(find_runs([tmp_path])[0])
    assert {column.label for column in comparison.columns} == {"Dir(0.1)", "Dir(0.6)", "split = by_class"}
    assert sorted(len(cell) for cell in comparison.cells.values()) == [1, 1, 2]


def test_a_setting_can_be_ignored(record: Record, tmp_path: Path) -> None:
    record(tmp_path / "a", [0.1, 0.5], data="here", task="fashion_mnist")
    record(tmp_path / "b", [0.1, 0.5], data="there", task="fashion_mnist", seed=1)
    assert len(compare(find_runs([tmp_path])[0]).columns) == 2
    assert len(compare(find_runs([tmp_path])[0], ["data"]).columns) == 1
    record(tmp_path / "c", [0.1, 0.5], data="nowhere", task="fashion_mnist", seed=1)
    (twice,) = compare(find_runs([tmp_path])[0], ["data"]).left_out
    assert twice.reason == "the same seed and settings, but for data, as b"


def test_runs_that_did_not_complete_or_are_there_twice_are_listed_and_left_out(record: Record, tmp_path: Path) -> None:
    record(tmp_path / "good", [0.1, 0.5])
    record(tmp_path / "good2", [0.1, 0.5])
    record(tmp_path / "failed", [0.1, 0.9], "failed", seed=1)
    record(tmp_path / "half", [0.1, 0.9], "unfinished", seed=2)
    (record(tmp_path / "broken", [0.1, 0.9]) / "summary.json").write_text("{")
    code, output = report(tmp_path, "--output", tmp_path / "out")
    assert code == 0
    for line in (
        f"left out: {tmp_path / 'good2'}: the same seed and settings as good",
        f"left out: {tmp_path / 'failed'}: failed: RunFailed: round 2",
        f"left out: {tmp_path / 'half'}: unfinished: it ended without a word",
        f"left out: {tmp_path / 'broken'}: summary.json: not a run's summary",
    ):
        assert line in output
    text = (tmp_path / "out" / "report.md").read_text()
    assert rows_of(text, "Results") == [["fedact", "50.0"]]
    assert "Left out, 4: `failed`: failed: RunFailed: round 2; " in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--baseline", "fedavg"], "--baseline fedavg: allowed is one of fedact"),
        (["--ignore", "nosuch"], "--ignore nosuch: allowed are settings, see pyproject.toml"),
        (["--name", "a/b"], "--name a/b: allowed are letters, digits, '.', '-' and '_'"),
        (["--output", "file/there"], "--output file/there: "),
    ],
)
def test_wrong_options(
    record: Record, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "runs" / "a", [0.1, 0.5])
    (tmp_path / "file").touch()
    code, output = report("runs", *options)
    assert code == 2
    assert f"error: {message}" in output
    assert output.count("\n") == 1


def test_the_machine_is_named(record: Record, tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = record(tmp_path / name, [0.1, 0.5], seed=ord(name))
        end = {"status": "completed", "cause": None, "machine": "An Abacus, 2 CPUs", "versions": {"torch": "2.9"}}
        (folder / "summary.json").write_text(json.dumps(end))
    assert report(tmp_path, "--output", tmp_path / "out", "--name", "table")[0] == 0
    assert "\nMade on An Abacus, 2 CPUs, torch 2.9.\n" in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "figures" / "table-rounds-accuracy.svg").exists()


def test_nothing_to_report(record: Record, tmp_path: Path) -> None:
    record(tmp_path / "a", [0.1, 0.2], "failed")
    code, output = report(tmp_path)
    assert code == 2
    assert f"error: {tmp_path}: no run that completed; allowed are records, or folders of records" in output
    assert report(tmp_path / "no")[0] == 2


def test_the_papers_numbers_stand_beside_runs_of_the_same_condition_alone(write_record: Record, tmp_path: Path) -> None:
    """Typed from the paper: FedACT, ViT-Tiny, CIFAR-100, Dirichlet(0.1) is in tables 1, 3, 4 and 9; SCAFFOLD in one."""

    def paper_run(folder: Path, conf: str, **own: Any) -> Run:
        settings = read_file(PROJECT / "conf" / "paper" / f"{conf}.toml")
        settings |= own
        lines = [{"round": settings["rounds"], "accuracy": 0.4, "loss": 2.0, "seconds": 1.0}]
        run = read_run(write_record(folder, lines, **settings))
        assert isinstance(run, Run)
        return run

    same = paper_run(tmp_path / "a", "vit_tiny-cifar100-dir0.1", seed=7, data="/some/where", device="cpu", threads=2)
    assert {(value.table, value.number) for value in values_for(same)[0]} == {
        ("table_1", 42.03), ("table_3", 42.03), ("table_4", 42.03), ("table_9", 42.03),
    }  # fmt: skip
    scaffold = paper_run(tmp_path / "b", "resnet18-tiny_imagenet-dir0.3", method="scaffold")
    assert [(value.table, value.number) for value in values_for(scaffold)[0]] == [("table_10", 52.41)]
    corner = paper_run(tmp_path / "c", "swin_lite-cifar100-dir0.6", tau=0.7, gamma=0.9)
    assert [(value.table, value.number) for value in values_for(corner)[0]] == [("table_4", 51.98)]
    edge = paper_run(tmp_path / "d", "swin_lite-cifar100-dir0.1", rho=0.6)
    assert [(value.table, value.number) for value in values_for(edge)[0]] == [("table_9", 18.19)]
    short = paper_run(tmp_path / "e", "vit_tiny-cifar100-dir0.1", rounds=30, lr=1e-3)
    assert values_for(short) == ([], "rounds = 30, not 300; lr = 0.001, not 0.0003")
    other = paper_run(tmp_path / "f", "vit_tiny-cifar100-dir0.1", method="local_adamw", local_steps=10)
    assert values_for(other) == ([], "local_steps = 10, not 50")

    assert report(tmp_path, "--output", tmp_path / "out", "--against", "paper")[0] == 0
    text = (tmp_path / "out" / "report.md").read_text()
    rows = rows_of(text, "Beside the paper")
    assert len(rows) == 4 + 1 + 1 + 1
    assert [row[3:] for row in rows if row[0] == "table_10"] == [["accuracy %", "40.00, 1 seed", "52.41", "-12.41"]]
    assert "Not compared, since local_steps = 10, not 50: local_adamw" in text
    paper_run(tmp_path / "g", "vit_tiny-cifar100-dir0.1", seed=8, lr=1e-2, data="/some/where")
    several = ("--against", "paper", "--ignore", "lr", "--ignore", "rounds")
    assert report(tmp_path / "a", tmp_path / "g", "--output", tmp_path / "both", *several)[0] == 0
    assert "Not compared, since its runs differ in what counts: all" in (tmp_path / "both" / "report.md").read_text()
    assert report(tmp_path, "--output", tmp_path / "plain")[0] == 0
    assert "Beside the paper" not in (tmp_path / "plain" / "report.md").read_text()


def test_every_number_of_the_paper_has_its_condition() -> None:
    by_table: dict[str, int] = {}
    for value in _values():
        assert (PROJECT / "conf" / "paper" / f"{value.conf}.toml").is_file()
        by_table[value.table] = by_table.get(value.table, 0) + 1
    assert by_table == {
        "table_1": 9 * 18, "table_3": 3 * 4, "table_10": 9 * 9, "table_4": 2 * 3 * 2 * 4, "table_9": 4 * 8,
        "table_2": 6 * 6, "table_11": 7 * 8,
    }  # fmt: skip


def test_foreign_text_breaks_no_table_and_no_page() -> None:
    blocks = [
        Paragraph("`a` <b> & c"),
        Table(["x|y"], [["<i>"]], frozenset({(0, 0)})),
        Figure("f", "<c>", "<svg></svg>"),
    ]
    assert to_markdown("x", "<t>", blocks).splitlines()[4:7] == ["| x\\|y |", "|---|", "| **<i>** |"]
    html = to_html("<t>", blocks)
    assert "<h1>&lt;t&gt;</h1>" in html
    assert "<p><code>a</code> &lt;b&gt; &amp; c</p>" in html
    assert "<td><b>&lt;i&gt;</b></td>" in html
    assert "<figcaption>&lt;c&gt;</figcaption>" in html
