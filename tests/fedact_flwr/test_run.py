"""Whole runs in one process, and what their records hold."""

import json
import logging
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.numpy import load_file
from torch import nn

from fedact_flwr import server_app
from fedact_flwr.client_app import _state_folder
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import InProcessGrid, run_inprocess
from fedact_flwr.record import RunRecord
from fedact_flwr.server_app import app as run_server
from fedact_flwr.settings import Settings, SettingsError, dump, parse
from strategies import STRATEGIES, RunFailed
from strategies.exchange import exchange
from strategies.hosts import ANSWER_SECONDS
from strategies.seeds import derive_seed
from tasks import TASKS
from tasks.digits import Digits

MISSING_DEVICE = "mps" if not torch.backends.mps.is_available() else "cuda"
MakeSettings = Callable[..., Settings]
SMALL: dict[str, Any] = {"clients": 4, "clients_per_round": 3, "rounds": 3, "local_steps": 3, "name": "run"}


def run(settings: Settings, nodes: int | None = None) -> Path:
    run_inprocess(run_server, client_app, nodes or settings.clients, dump(settings))
    return Path(settings.output) / settings.name


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of the rounds that trained."""
    lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    return [line for line in lines if line["round"] > 0]


def test_the_record_of_a_run(make_settings: MakeSettings) -> None:
    settings = make_settings(**SMALL)
    folder = run(settings)
    with (folder / "settings.toml").open("rb") as file:
        assert parse(tomllib.load(file)) == settings
    rounds = rounds_of(folder)
    assert [line["round"] for line in rounds] == [1, 2, 3]
    assert {"accuracy", "loss", "train_loss", "replies", "failures", "lr", "seconds"} <= rounds[0].keys()
    assert {"direction_consistency", "positive_score_ratio", "top_score_mass"} <= rounds[0].keys()
    assert rounds[0]["replies"] == 3
    clients = json.loads((folder / "clients.json").read_text())
    assert [c["client"] for c in clients] == [0, 1, 2, 3]
    assert sum(c["examples"] for c in clients) == 1437
    assert (
        np.sum([c["labels"] for c in clients], axis=0).tolist() == np.bincount(TASKS["digits"].train_labels()).tolist()
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("completed", 3)
    assert summary["final"] == rounds[-1]
    assert summary["best"]["accuracy"] == max(line["accuracy"] for line in rounds)


def test_the_final_model_is_the_one_evaluated_last(make_settings: MakeSettings) -> None:
    from safetensors.torch import load_model

    folder = run(make_settings(**SMALL))
    task = TASKS["digits"]
    model = task.make_model(0)
    load_model(model, folder / "model.safetensors")
    metrics = task.evaluate(model, task.test_examples())
    assert metrics == {key: rounds_of(folder)[-1][key] for key in metrics}


def test_the_model_is_compiled_once_for_all_clients(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled to the same operations as before: what is new is who compiles what, and that names stay."""
    compiled = []
    original = torch.compile

    def compile(model: nn.Module) -> Any:
        compiled.append(model)
        return original(model, backend="eager")

    monkeypatch.setattr(torch, "compile", compile)
    plain, fast = (run(make_settings(**(SMALL | {"name": f"{on}", "compile": on}))) for on in (False, True))
    assert len(compiled) == 1
    assert (plain / "model.safetensors").read_bytes() == (fast / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["fedact", "scaffold", "fadamgc", "pflalign"])
def test_same_settings_same_bits_on_any_number_of_nodes(method: str, make_settings: MakeSettings) -> None:
    """Three of four clients a round: what a client keeps must find its way back to it."""
    models = []
    for i, nodes in enumerate((4, 4, 1, 3, 7)):
        folder = run(make_settings(**(SMALL | {"name": f"{i}", "method": method})), nodes)
        models.append((folder / "model.safetensors").read_bytes())
    assert len(set(models)) == 1
    other = run(make_settings(**(SMALL | {"name": "other", "method": method, "seed": 1})))
    assert (other / "model.safetensors").read_bytes() != models[0]


def test_clients_keep_their_state_in_the_record_and_nodes_where_they_are_told(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(**SMALL, method="scaffold", client_evaluation=False)
    folder = run(settings)
    (clients,) = folder.glob("clients-*")
    assert {p.name for p in clients.iterdir()} <= {"0", "1", "2", "3"}
    newest = max(clients.rglob("round-3.safetensors"))
    assert load_file(newest)["control/head.weight"].any()

    told = make_settings(**(SMALL | {"name": "told"}), method="scaffold")
    grid = InProcessGrid(client_app, 4, dump(told))
    for context in grid._contexts.values():
        context.node_config["client-state"] = str(tmp_path / "mine")
    server_app.run(told, grid)
    assert not list((Path(told.output) / "told").glob("clients-*"))
    assert len(list((tmp_path / "mine" / "told").glob("clients-*/*/round-3.safetensors"))) == 3
    ours, theirs = ((f / "model.safetensors").read_bytes() for f in (folder, Path(told.output) / "told"))
    assert ours == theirs


@pytest.mark.parametrize(("second_moment", "numbers"), [("tensor", 1), ("block", 12)])
def test_blocks_of_the_model_reach_the_wire(second_moment: str, numbers: int, make_settings: MakeSettings) -> None:
    """Of the ViT's 32 tensors, the four in_proj have 12 blocks each: query, key and value of four heads."""
    (line,) = rounds_of(run(make_settings(**(SMALL | {"rounds": 1}), second_moment=second_moment)))
    floats = 39_610 + 28 + 4 * numbers  # the delta, and the means
    assert line["bytes_received"] == 3 * (4 * floats + 128 * 2 * 32)


def test_settings_of_other_methods_are_refused_before_the_start(make_settings: MakeSettings) -> None:
    with pytest.raises(SettingsError, match=r"mu = 0\.5: fedact has no such setting"):
        server_app.run(make_settings(mu=0.5), InProcessGrid(client_app, 1, {}))
    assert not list(Path(make_settings().output).parent.glob("runs/*"))


def test_a_server_can_name_no_place_outside_a_clients_root(make_settings: MakeSettings) -> None:
    context = next(iter(InProcessGrid(client_app, 1, dump(make_settings()))._contexts.values()))
    root = Path(make_settings().output)
    assert _state_folder(context, "run/clients-1") == root / "run" / "clients-1"
    for name in ("/etc", "../elsewhere", "run/../../x", "", "."):
        with pytest.raises(ValueError, match="not inside"):
            _state_folder(context, name)
    for place in ("/proc/nowhere", "~nobody-of-that-name/x"):
        context.node_config["client-state"] = place
        with pytest.raises(ValueError, match=f"client-state = '{place}': clients can't keep their state there"):
            _state_folder(context, "run/clients-1")


def test_a_client_whose_state_is_lost_is_named_and_left_out(
    make_settings: MakeSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partition 2's file of round 1 goes; the others go on."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    settings = make_settings(**(SMALL | {"clients_per_round": 4}), method="scaffold")

    class Losing(InProcessGrid):
        def push_messages(self, messages: Any) -> Any:
            for path in Path(settings.output).rglob("2/round-1.safetensors"):
                path.unlink()
            return super().push_messages(messages)

    server_app.run(settings, Losing(client_app, 4, dump(settings)))
    assert [line["failures"] for line in rounds_of(Path(settings.output) / "run")] == [0, 1, 1]
    assert "partition 2 can't go on without what it kept in round 1" in caplog.text
    failed = [line.get("failed", []) for line in rounds_of(Path(settings.output) / "run")]
    assert list(map(len, failed)) == [0, 1, 1]
    assert failed[1][0].startswith("partition 2, node ")
    assert "kept in round 1" in failed[1][0]


def test_round_0_is_the_model_before_training(make_settings: MakeSettings) -> None:
    settings = make_settings(**SMALL, evaluate_every=3)
    line = json.loads((run(settings) / "rounds.jsonl").read_text().splitlines()[0])
    task = TASKS["digits"].configured(settings)
    model = task.make_model(derive_seed(settings.seed, "model"))
    assert line == {"round": 0, **task.evaluate(model, task.test_examples()), "seconds": line["seconds"]}


def test_diagnostics_and_evaluation_off(make_settings: MakeSettings) -> None:
    rounds = rounds_of(run(make_settings(**SMALL, diagnostics=False, evaluate_every=2)))
    assert ["accuracy" in line for line in rounds] == [False, True, True]  # every second, and the last
    assert not {"direction_consistency", "positive_score_ratio", "top_score_mass"} & rounds[0].keys()


def test_clients_evaluate_on_what_they_hold_out(make_settings: MakeSettings) -> None:
    settings = make_settings(**SMALL, client_evaluation=True, holdout=0.25)
    rounds = rounds_of(run(settings))
    assert all(0 <= line["client_accuracy"] <= 1 for line in rounds)
    everything = rounds_of(run(make_settings(**(SMALL | {"name": "all"}))))
    for part, whole in zip(rounds, everything, strict=True):
        assert part["bytes_sent"] > whole["bytes_sent"]  # the model once more, for evaluation
        held = part["client_num_examples"]
        assert held > 0
        assert part["num_examples"] < whole["num_examples"]


def test_epochs_let_clients_differ_in_steps(make_settings: MakeSettings) -> None:
    rounds = rounds_of(run(make_settings(**SMALL, local_epochs=1, batch_size=32)))
    assert rounds[0]["num_steps"] % 1 != 0 or rounds[1]["num_steps"] % 1 != 0  # a mean of different K_i
    assert all(np.isfinite(line["loss"]) for line in rounds)


def test_a_failed_run_raises_and_says_so_in_its_record(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.digits.Digits.loss", lambda *_: (_ for _ in ()).throw(RuntimeError("no more memory")))
    settings = make_settings(**SMALL, max_failed_rounds=2)
    with pytest.raises(RunFailed, match=r"2 failed rounds in a row.*no more memory"):
        run(settings)
    folder = Path(settings.output) / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "no more memory" in summary["cause"]
    assert [line["failures"] for line in rounds_of(folder)] == [3, 3]  # also of the round that ended the run
    assert (folder / "model.safetensors").exists()


def test_interruption_is_in_the_record(make_settings: MakeSettings) -> None:
    settings = make_settings(**SMALL)
    with pytest.raises(KeyboardInterrupt), RunRecord(settings, TASKS["digits"]) as record:
        raise KeyboardInterrupt
    assert json.loads((record.folder / "summary.json").read_text())["status"] == "interrupted"


def test_a_run_that_flower_kills_while_it_stops_it_is_interrupted_in_its_record(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower calls the handlers, then joins a thread that outlives the time the process has: nothing else is called."""
    handlers: list[Callable[[], None]] = []
    monkeypatch.setattr(server_app, "add_exit_handler", lambda handler, run_before_force_exit: handlers.append(handler))
    settings = make_settings(**SMALL)
    folder = Path(settings.output) / settings.name
    found = []

    class Stopped(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            if (folder / "rounds.jsonl").read_text().count("\n") == 2:  # rounds 0 and 1
                for handler in reversed(handlers):
                    handler()
                found.append(json.loads((folder / "summary.json").read_text()))
                found.append([path.name for path in (folder / "checkpoints").iterdir()])
                raise SystemExit
            return super().push_messages(messages)

    with pytest.raises(SystemExit):
        server_app.run(settings, Stopped(client_app, settings.clients, dump(settings)))
    summary, checkpoints = found
    assert (summary["status"], summary["cause"], summary["rounds"]) == ("interrupted", "interrupted", 1)
    assert checkpoints == ["round-1"]
    assert json.loads((folder / "summary.json").read_text()) == summary

    run(settings.model_copy(update={"name": "other"}))
    for handler in handlers:  # of a run that has ended well, at the end of its process
        handler()
    assert json.loads((folder.parent / "other" / "summary.json").read_text())["status"] == "completed"


def test_a_record_is_never_overwritten(make_settings: MakeSettings) -> None:
    settings = make_settings(**SMALL)
    folder = run(settings)
    before = (folder / "rounds.jsonl").read_text()
    with pytest.raises(SettingsError, match=r"name = 'run': .*allowed is a new name"):
        run(settings)
    assert (folder / "rounds.jsonl").read_text() == before


def test_automatic_names_never_collide(make_settings: MakeSettings) -> None:
    settings = make_settings()
    folders = [RunRecord(settings, TASKS["digits"]).folder for _ in range(3)]
    assert len(set(folders)) == 3


def test_values_that_are_not_finite_are_null(make_settings: MakeSettings) -> None:
    with RunRecord(make_settings(**SMALL), TASKS["digits"]) as record:
        record.write_round({"round": 1, "loss": float("nan"), "accuracy": 0.5})
    assert rounds_of(record.folder)[0]["loss"] is None


def test_what_only_the_machine_knows_is_checked_before_anything_starts(make_settings: MakeSettings) -> None:
    for wrong, message in (
        ({"min_samples": 1000}, "min_samples = 1000"),
        ({"device": MISSING_DEVICE}, f"device = '{MISSING_DEVICE}'"),
    ):
        settings = make_settings(**wrong)
        with pytest.raises(SettingsError, match=message):
            server_app.check(settings)


def test_model_bytes_are_readable_without_torch(make_settings: MakeSettings) -> None:
    tensors = load_file(run(make_settings(**SMALL)) / "model.safetensors")
    assert tensors["head.weight"].shape == (10, 48)


class DigitsWithBatchNorm(Digits):
    """A convolution with BatchNorm, whose counter is a 0-d tensor, and a scalar parameter."""

    def make_model(self, seed: int) -> torch.nn.Module:
        class Scaled(torch.nn.Sequential):
            def __init__(self) -> None:
                layers = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 10)
                super().__init__(*layers)
                self.temperature = torch.nn.Parameter(torch.tensor(1.0))

            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return super().forward(input) * self.temperature

        torch.manual_seed(seed)
        return Scaled()


@pytest.mark.parametrize("method", STRATEGIES)
def test_models_with_buffers_and_scalars(
    method: str, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "digits", DigitsWithBatchNorm())
    folder = run(make_settings(**(SMALL | {"clients_per_round": 4}), method=method))
    tensors = load_file(folder / "model.safetensors")
    if method == "local_only":  # whose global model stays, buffers and all
        (tensors,) = (load_file(path) for path in folder.glob("clients-*/0/round-3.safetensors"))
        tensors = {name.partition("/")[2]: tensor for name, tensor in tensors.items()}
        tensors["temperature"] = 1 + tensors["temperature"]
    assert tensors["1.num_batches_tracked"] == 9  # 3 rounds of 3 steps
    assert tensors["temperature"] != 1
    assert all(line["failures"] == 0 for line in rounds_of(folder))


def test_the_timeouts_of_the_settings_are_used(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = []

    def watched(grid: Any, questions: Any, timeout: float) -> Any:
        timeouts.append(timeout)
        return exchange(grid, questions, timeout)

    for module in ("federated", "hosts"):
        monkeypatch.setattr(f"strategies.{module}.exchange", watched)
    run(make_settings(**(SMALL | {"rounds": 1}), round_timeout=77.0))
    assert timeouts == [ANSWER_SECONDS, 77.0, 77.0]  # query, train, evaluate
