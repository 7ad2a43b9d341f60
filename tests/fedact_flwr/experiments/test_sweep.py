"""`fedact sweep`: what a file stands for, what is tuned, and what is made, skipped, resumed and listed."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedact_flwr.cli import app
from fedact_flwr.experiments import sweeping
from fedact_flwr.experiments.runs import Run, read_run
from fedact_flwr.experiments.sweep import Job, read_sweep
from fedact_flwr.record import locked
from fedact_flwr.settings import PROJECT, dump

SMALL = """
[settings]
clients = 4
clients_per_round = 3
rounds = 6
local_steps = 3
device = "cpu"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "some.toml"
    path.write_text(text)
    return path


def sweep(path: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sweep", str(path), "--output", str(path.parent / "out"), *options])
    return result.exit_code, result.output


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs are not made, but their records are: accuracy = 1 - |lr - 0.01| - seed / 1000; lr above 1 fails.

    The fine-tuned model's accuracy is lr / 100, that of ditto's own models 1 - lr / 100; above 0.2 a client is missing.
    """
    names: list[str] = []

    def carry_out(jobs: Sequence[Job], *_: object) -> dict[Path, str]:
        for job in jobs:
            names.append(f"{job.folder.parent.name}/{job.folder.name}")
            job.folder.mkdir(parents=True, exist_ok=True)
            s = job.settings
            line = {"round": s.rounds, "accuracy": 1 - abs(s.lr - 0.01) - s.seed / 1000, "seconds": 1.0}
            own = {"personal_accuracy": 1 - s.lr / 100} if s.method == "ditto" else {}
            lines = [line | {"tuned_accuracy": s.lr / 100, "personal_failures": int(s.lr > 0.2)} | own]
            (job.folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            end = {"status": "failed", "cause": "nan"} if s.lr > 1 else {"status": "completed", "cause": None}
            (job.folder / "summary.json").write_text(json.dumps(end))
            (job.folder / "settings.toml").write_text(tomli(dump(s)))
        return {}

    monkeypatch.setattr(sweeping, "carry_out", carry_out)
    return names


def tomli(settings: Mapping[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(settings)


def test_all_combinations_of_cases_and_grid(tmp_path: Path, made: list[str]) -> None:
    text = SMALL + "[grid]\nrho = [0.1, 0.2]\nseed = [1, 2]\n[[cases]]\nmethod = 'fedact'\n[[cases]]\ntau = 0.6\n"
    code, output = sweep(write(tmp_path, text), "--set", "rounds=7")
    assert code == 0, output
    assert made == [
        "runs/method=fedact,rho=0.1,seed=1", "runs/method=fedact,rho=0.1,seed=2", "runs/method=fedact,rho=0.2,seed=1",
        "runs/method=fedact,rho=0.2,seed=2", "runs/tau=0.6,rho=0.1,seed=1", "runs/tau=0.6,rho=0.1,seed=2",
        "runs/tau=0.6,rho=0.2,seed=1", "runs/tau=0.6,rho=0.2,seed=2",
    ]  # fmt: skip
    run = read_run(tmp_path / "out" / "runs" / "tau=0.6,rho=0.2,seed=2")
    assert isinstance(run, Run)
    assert [run.settings[key] for key in ("tau", "rho", "seed", "rounds", "clients")] == [0.6, 0.2, 2, 7, 4]


def test_settings_files_are_seen_from_the_sweep(tmp_path: Path, made: list[str]) -> None:
    (tmp_path / "base.toml").write_text("rounds = 9\nlocal_steps = 2\n")
    code, output = sweep(write(tmp_path, "conf = ['base.toml']\n[settings]\nlocal_steps = 4\n[grid]\nseed = [1]\n"))
    assert code == 0, output
    run = read_run(tmp_path / "out" / "runs" / "seed=1")
    assert isinstance(run, Run)
    assert (run.settings["rounds"], run.settings["local_steps"]) == (9, 4)


TUNED = (
    SMALL
    + """
[grid]
method = ["fedact", "fedavg"]
dirichlet_alpha = [0.6, 0.1]
seed = [1, 2]
[tune]
lr = { adamw = [0.001, 0.011], sgd = [0.02, 7] }
seeds = [11, 12]
at = { dirichlet_alpha = 0.1 }
"""
)


def test_the_learning_rate_is_tuned_for_each_combination_on_other_seeds(tmp_path: Path, made: list[str]) -> None:
    """fedact: 0.011 is nearer to 0.01 than 0.001; fedavg: at 7 it fails."""
    code, output = sweep(write(tmp_path, TUNED))
    assert code == 0, output
    assert made[:8] == [
        f"tuning/method={method},dirichlet_alpha=0.1,lr={lr},seed={seed}"
        for method, rates in (("fedact", ("0.001", "0.011")), ("fedavg", ("0.02", "7"))) for lr in rates
        for seed in (11, 12)
    ]  # fmt: skip
    assert made[8:] == [
        f"runs/method={method},dirichlet_alpha={alpha},seed={seed},lr={lr}"
        for method, lr in (("fedact", "0.011"), ("fedavg", "0.02")) for alpha in (0.6, 0.1) for seed in (1, 2)
    ]  # fmt: skip
    first, second = json.loads((tmp_path / "out" / "tuning.json").read_text())
    assert first["cell"] == {"method": "fedact", "dirichlet_alpha": 0.1}
    assert first["target"] == "accuracy"
    assert first["by_lr"] == [[0.001, pytest.approx(0.9795)], [0.011, pytest.approx(0.9875)]]
    assert (first["best"], second["best"]) == (0.011, 0.02)
    assert second["by_lr"][1] == [7, None]
    assert "failed: tuning/method=fedavg,dirichlet_alpha=0.1,lr=7,seed=11: nan" in output


def test_the_learning_rate_may_be_that_of_the_clients_own_models(tmp_path: Path, made: list[str]) -> None:
    """ditto has such, fedact has a fine-tuned one; both go against the global model's 0.01."""
    text = SMALL + "holdout = 0.2\npersonal_every = 6\n[grid]\nmethod = ['ditto', 'fedact']\n"
    code, output = sweep(write(tmp_path, text + "[tune]\nlr = [0.001, 0.01, 0.1]\nseeds = [11]\nby = 'personal'\n"))
    assert code == 0, output
    assert made[-2:] == ["runs/method=ditto,lr=0.001", "runs/method=fedact,lr=0.1"]
    first, second = json.loads((tmp_path / "out" / "tuning.json").read_text())
    assert (first["target"], second["target"]) == ("personal_accuracy", "tuned_accuracy")
    assert first["by_lr"][0] == [0.001, pytest.approx(0.99999)]


def test_a_rate_that_loses_clients_is_no_candidate(tmp_path: Path, made: list[str]) -> None:
    """The clients that are left may be the easy ones. Nothing of that concerns the global model."""
    text = SMALL + "holdout = 0.2\npersonal_every = 6\n[grid]\nmethod = ['fedact']\n[tune]\nlr = [0.01, 0.5]\n"
    for by, best in (("personal", "0.01"), ("global", "0.01")):
        code, output = sweep(write(tmp_path, text + f"seeds = [11]\nby = '{by}'\n"), "--output", str(tmp_path / by))
        assert code == 0, output
        assert made[-1] == f"runs/method=fedact,lr={best}"
        ((_, first), (_, second)) = json.loads((tmp_path / by / "tuning.json").read_text())[0]["by_lr"]
        assert first is not None
        assert (second is None) == (by == "personal")


def test_what_is_done_is_skipped_and_what_failed_is_made_again_when_asked(tmp_path: Path, made: list[str]) -> None:
    path = write(tmp_path, SMALL + "[grid]\nlr = [0.01, 7]\n")
    code, output = sweep(path)
    assert code == 1
    assert "failed: runs/lr=7: nan" in output
    assert "error: 1 of the runs to report are missing; --retry makes those that failed again" in output
    made.clear()
    assert sweep(path)[0] == 1
    assert made == []
    assert sweep(path, "--retry")[0] == 1
    assert made == ["runs/lr=7"]


def test_where_no_rate_works_the_others_are_reported(tmp_path: Path, made: list[str]) -> None:
    text = SMALL + "[grid]\nmethod = ['fedact', 'fedavg']\n[tune]\nlr = { fedact = [3, 4], sgd = [0.1] }\nseeds = [5]\n"
    code, output = sweep(write(tmp_path, text))
    assert code == 1
    assert "failed: method = fedact: no learning rate works" in output
    assert made[-1] == "runs/method=fedavg,lr=0.1"


def test_another_run_in_the_folder_is_refused(tmp_path: Path, made: list[str]) -> None:
    sweep(write(tmp_path, SMALL + "[grid]\nseed = [1]\n"))
    code, output = sweep(write(tmp_path, SMALL + "[grid]\nseed = [1]\n"), "--set", "rounds=8")
    assert code == 2
    folder = tmp_path / "out" / "runs" / "seed=1"
    assert (
        f"error: {folder}: holds a run with rounds = 6, not 8; allowed is another --output, or to remove it" in output
    )
    assert len(made) == 1


def test_the_example_of_the_docs_is_a_sweep(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (PROJECT / "docs" / "sweeps.md").read_text(), re.DOTALL)
    sweep = read_sweep(write(tmp_path, example))
    assert len(sweep.cases) * len(sweep.grid["seed"]) * len(sweep.grid["dirichlet_alpha"]) == 12
    assert sweep.tune
    assert sweep.tune.seeds == [11]


def test_a_record_that_can_not_be_read_is_refused_and_not_overwritten(tmp_path: Path, made: list[str]) -> None:
    path = write(tmp_path, SMALL + "[grid]\nseed = [1]\n")
    sweep(path)
    record = tmp_path / "out" / "runs" / "seed=1"
    (record / "rounds.jsonl").write_text("{}\n")
    code, output = sweep(path)
    assert code == 2
    assert (
        f"error: {record}: rounds.jsonl: line 1 is no round's; allowed is another --output, or to remove it" in output
    )
    assert (record / "rounds.jsonl").read_text() == "{}\n"


def test_another_sweep_in_the_folder_is_refused(tmp_path: Path, made: list[str]) -> None:
    path = write(tmp_path, SMALL + "[grid]\nseed = [1]\n")
    sweep(path)
    before = (tmp_path / "out" / "sweep.toml").read_text()
    with locked(tmp_path / "out"):
        code, output = sweep(write(tmp_path, SMALL + "[grid]\nseed = [1, 2]\n"))
    assert code == 2
    assert f"error: --output {tmp_path / 'out'}: another sweep is at work there" in output
    assert (tmp_path / "out" / "sweep.toml").read_text() == before


def test_the_folder_says_which_runs_are_the_sweeps_and_what_was_set(tmp_path: Path, made: list[str]) -> None:
    path = write(tmp_path, SMALL + "[grid]\nseed = [1, 2]\n")
    sweep(path, "--set", "rho=0.12345678")
    sweep(write(tmp_path, SMALL + "[grid]\nseed = [2, 3]\n"), "--set", "rho=0.12345678")
    out = tmp_path / "out"
    assert json.loads((out / "runs.json").read_text()) == ["seed=2", "seed=3"]
    assert sorted(folder.name for folder in (out / "runs").iterdir()) == ["seed=1", "seed=2", "seed=3"]
    assert (out / "sweep.toml").read_text().startswith("# --set rho=0.12345678\n")
    assert made == ["runs/seed=1", "runs/seed=2", "runs/seed=3"]


def test_numbers_that_are_nearly_alike_have_names_of_their_own(tmp_path: Path, made: list[str]) -> None:
    assert sweep(write(tmp_path, SMALL + "[grid]\nrho = [0.12345678, 0.12345679, 0.5]\n"))[0] == 0
    assert made == ["runs/rho=0.12345678", "runs/rho=0.12345679", "runs/rho=0.5"]


WRONG = {
    "grids = 1": "grids: Extra inputs are not permitted; allowed are title, about, conf, settings, grid, cases, tune",
    "[grid]\nmethod = []": "grid.method: List should have at least 1 item",
    "[grid]\nmethod = ['fedx']": "method=fedx: method = 'fedx': allowed is one of",
    "[settings]\nseed = 1\n[grid]\nseed = [1]": "seed: stands in settings and in grid; allowed is one of them",
    "[settings]\nname = 'x'": "name: a sweep has a folder of its own for records; allowed is --output",
    "[settings]\nlr = 1.0\n[tune]\nlr = [0.1]\nseeds = [1]": "lr: stands in settings and in tune",
    "[tune]\nlr = [0.1]\nseeds = []": "tune.seeds: List should have at least 1 item",
    "[tune]\nlr = [0.0]\nseeds = [1]": "greater than 0",
    "[tune]\nlr = { sgd = [0.1] }\nseeds = [1]": "tune.lr: neither 'fedact' nor its family, 'adamw', is there",
    "[tune]\nlr = [0.1]\nseeds = [1]\nat = { rho = 0.1 }": "tune.at.rho: allowed are keys of grid and cases, but for",
    "[tune]\nlr = [0.1]\nseeds = [42]": "tune.seeds: 42 is a seed to report; allowed are others",
    "[tune]\nlr = { adamw = [0.1], fedat = [0.2] }\nseeds = [1]": "tune.lr.fedat: allowed are methods and families, ",
    "[tune]\nlr = 0.1\nseeds = [1]": "tune.lr: Input should be a valid list",
    "[tune]\nlr = [0.1]\nseeds = [1]\nby = 'personal'": "personal_every = 0: tune.by = 'personal' needs it",
    "[grid]\npersonal_every = [0, 2]\n[settings]\nholdout = 0.2\n[tune]\nlr = [0.1]\nseeds = [1]\nby = 'personal'": (
        "personal_every = 0: tune.by = 'personal' needs it"
    ),
    "[tune]\nlr = [0.1]\nseeds = [1]\nby = 'own'": "tune.by: Input should be 'global' or 'personal'",
    "[settings]\nevaluate_every = 0\n[tune]\nlr = [0.1]\nseeds = [1]": "evaluate_every = 0: ",
    "[settings]\nrho = [0.1, 0.2]": "settings.rho: Input should be a valid string; several values belong in [grid]",
    "[grid]\nseed = [1, 1]": "seed=1: it has this run twice",
    "[grid]\nmethod = ['fedavg']\nrho = [0.1]": "method=fedavg,rho=0.1: rho = 0.1: fedavg with local_optimizer",
    "conf = ['no.toml']": "no.toml: No such file or directory",
    "[grid": "not valid TOML",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused_in_one_line(text: str, tmp_path: Path, made: list[str]) -> None:
    path = write(tmp_path, text)
    code, output = sweep(path)
    assert code == 2
    assert WRONG[text] in output
    assert output.count("\n") == 1
    assert made == []
    assert not (tmp_path / "out").exists()


def test_wrong_options(tmp_path: Path, made: list[str]) -> None:
    path = write(tmp_path, SMALL + "[grid]\nseed = [1]\n")
    for options, message in {
        ("--per-gpu", "2"): "--gpus, --per-gpu: allowed where device is cuda; these runs use none",
        ("--cpus", "999"): "--cpus 999: allowed is 1, the threads of a run, to ",
        ("--set", "seed=2"): "--set seed: the sweep itself has values for it",
        ("--set", "rounds=0"): "rounds = 0: allowed is a whole number above 0",
    }.items():
        code, output = sweep(path, *options)
        assert code == 2
        assert message in output
    code, output = sweep(path, "--dry-run")
    assert code == 0
    assert "1 runs; 54 steps of clients" in output  # 6 rounds of 3 clients of 3 steps
    assert "runs/seed=1" in output
    assert made == []
    assert not (tmp_path / "out").exists()


def test_interrupted_it_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Two runs side by side, of which one fails; interrupted in the middle; then what is left of them."""
    grid = "[grid]\nseed = [1]\n[[cases]]\nlr = 1e9\n[[cases]]\nmethod = 'scaffold'\n"
    path = write(tmp_path, SMALL.replace("rounds = 6", "rounds = 30\ncheckpoint_every = 1000") + grid)
    command = [sys.executable, "-m", "fedact_flwr", "sweep", str(path), "--output", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    failing, good = (tmp_path / "out" / "runs" / name for name in ("lr=1e+09,seed=1", "method=scaffold,seed=1"))
    rounds, deadline = good / "rounds.jsonl", time.monotonic() + 60
    while not (rounds.exists() and rounds.read_bytes().count(b"\n") > 1) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "error: interrupted; the same command goes on" in output
    assert read_run(good).status == "interrupted"  # type: ignore[union-attr]

    code, output = sweep(path)
    assert code == 1
    assert "failed: runs/lr=1e+09,seed=1: RunFailed: round" in output
    assert read_run(failing).status == "failed"  # type: ignore[union-attr]
    assert read_run(good).status == "completed"  # type: ignore[union-attr]
    own = [line.replace(" ", "") for line in SMALL.splitlines() if "=" in line and "rounds" not in line]
    own += ["rounds=30", "method=scaffold", "seed=1", f"output={tmp_path}", "name=straight"]
    arguments = ["run", "--engine", "inprocess", *(part for setting in own for part in ("--set", setting))]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    models = [(folder / "model.safetensors").read_bytes() for folder in (good, tmp_path / "straight")]
    assert models[0] == models[1]
