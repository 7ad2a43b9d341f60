"""The personalized evaluation of whole runs: its numbers, its file, and what it leaves alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch

from clients.client import FedClient
from fedact_flwr import server_app
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import run_inprocess
from fedact_flwr.personal import drop_clients_after, in_words, read_clients, spread_over_clients, write_clients
from fedact_flwr.server_app import check
from fedact_flwr.settings import Settings, SettingsError, check_own_settings, dump, parse, read_defaults
from tasks import TASKS
from tasks.digits import Digits

MakeSettings = Callable[..., Settings]
SMALL: dict[str, Any] = {
    "clients": 4, "clients_per_round": 3, "rounds": 3, "local_steps": 3, "name": "run", "holdout": 0.25,
}  # fmt: skip


def run(settings: Settings) -> Path:
    run_inprocess(server_app.app, client_app, settings.clients, dump(settings))
    return Path(settings.output) / settings.name


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


# ---- numbers by hand


def client(number: int, **metrics: float) -> dict[str, float]:
    return {"partition": number, "num_examples": 10, **metrics}


def test_the_spread_over_eleven_clients_by_hand() -> None:
    """Accuracies 0, .1, ..., 1: mean .5, variance (2/11) (.25 + .16 + .09 + .04 + .01) = .1; the worst two: .05."""
    clients = [client(i, global_accuracy=(i * 7 % 11) / 10, global_loss=2.0 * i) for i in range(11)]
    found = spread_over_clients(clients, TASKS["digits"])
    spread = {"global_accuracy", "global_accuracy_sd", "global_accuracy_worst"}
    assert found.keys() == spread | {"global_loss", "tuned_failures"}
    assert found["global_accuracy"] == pytest.approx(0.5)
    assert found["global_accuracy_sd"] == pytest.approx(0.1**0.5)
    assert found["global_accuracy_worst"] == pytest.approx(0.05)
    assert found["global_loss"] == pytest.approx(10)


def test_the_worst_of_a_target_that_should_be_low() -> None:
    class Lower(Digits):
        target: ClassVar[str] = "loss"
        higher_is_better: ClassVar[bool] = False

    clients = [client(i, tuned_loss=float(i), personal_loss=1.0) for i in range(10)]
    found = spread_over_clients(clients, Lower())
    assert (found["tuned_loss_worst"], found["personal_loss_worst"], found["personal_loss_sd"]) == (9, 1, 0)
    assert spread_over_clients([], Lower()) == {}


def test_the_file_has_each_evaluation_once(tmp_path: Path) -> None:
    """A run that goes on from round 3 makes round 4 again."""
    for server_round in (2, 4, 4):
        drop_clients_after(tmp_path, server_round - 1)
        write_clients(
            tmp_path, server_round, [client(1, global_accuracy=server_round / 8), client(3, global_accuracy=0)]
        )
    text = "round,client,held_out,global_accuracy\n2,1,10,0.25\n2,3,10,0\n4,1,10,0.5\n4,3,10,0\n"
    assert (tmp_path / "personal.csv").read_text() == text
    assert read_clients(tmp_path)[0] == {"round": 2, "client": 1, "held_out": 10, "global_accuracy": 0.25}
    assert read_clients(tmp_path / "none") == []


def test_a_metric_that_some_client_lacks_has_no_mean(tmp_path: Path) -> None:
    """The clients that are left may be the easy ones."""
    clients = [client(0, global_accuracy=0.5, tuned_accuracy=0.9, round=7.0), client(1, global_accuracy=0.7)]
    found = spread_over_clients(clients, TASKS["digits"])
    assert found["global_accuracy"] == pytest.approx(0.6)
    assert found["tuned_failures"] == 1
    assert not any(key.startswith("tuned_accuracy") for key in found)
    write_clients(tmp_path, 3, clients)
    assert (tmp_path / "personal.csv").read_text().splitlines()[1:] == ["3,0,10,0.5,0.9", "3,1,10,0.7,"]
    assert read_clients(tmp_path)[1] == {"round": 3, "client": 1, "held_out": 10, "global_accuracy": 0.7}


def test_a_rounds_line_in_words() -> None:
    line = {"global_accuracy": 0.5, "global_accuracy_worst": 0.25, "tuned_accuracy": 0.75, "tuned_accuracy_worst": 0.7}
    assert in_words({"accuracy": 0.5}, TASKS["digits"]) == ""
    assert in_words(line, TASKS["digits"]) == (
        "accuracy on what the clients hold out: global 0.5000 (worst tenth 0.2500), tuned 0.7500 (worst tenth 0.7000)"
    )
    assert in_words(
        {"global_accuracy": 0.5, "global_accuracy_worst": 0.25, "personal_failures": 2}, TASKS["digits"]
    ) == ("accuracy on what the clients hold out: global 0.5000 (worst tenth 0.2500), clients without a good answer: 2")


# ---- whole runs


@pytest.mark.parametrize("method", ["fedact", "ditto"])
def test_all_clients_measure_and_training_does_not_notice(method: str, make_settings: MakeSettings) -> None:
    """Also those that were not asked in the round, every second round and at the end."""
    plain = run(make_settings(**SMALL, method=method))
    measured = run(make_settings(**(SMALL | {"name": "measured"}), method=method, personal_every=2))
    assert (plain / "model.safetensors").read_bytes() == (measured / "model.safetensors").read_bytes()
    rows = read_clients(measured)
    assert [(row["round"], row["client"]) for row in rows] == [(r, c) for r in (2, 3) for c in range(4)]
    kinds = {"global", "tuned"} | ({"personal"} if method == "ditto" else set())
    assert {key.split("_")[0] for key in rows[0] if key.endswith("accuracy")} == kinds
    lines = lines_of(measured)
    assert ["tuned_accuracy" in line for line in lines] == [False, False, True, True]
    last = [row for row in rows if row["round"] == 3]
    for kind in kinds:
        assert lines[-1][f"{kind}_accuracy"] == pytest.approx(sum(row[f"{kind}_accuracy"] for row in last) / 4)
    assert lines[-1]["personal_failures"] == 0
    assert lines[-1]["bytes_sent"] > lines[1]["bytes_sent"]
    strip = [{key: v for key, v in line.items() if key in ("accuracy", "train_loss")} for line in lines]
    assert strip == [{key: line[key] for key in own} for line, own in zip(lines_of(plain), strip, strict=True)]


def test_the_rate_of_fine_tuning_is_not_the_schedules(make_settings: MakeSettings) -> None:
    """ "auto" is lr, and 0 leaves the model as it is."""
    settings = make_settings(**SMALL, personal_every=3)
    assert dump(settings)["finetune_lr"] == "auto"
    same = read_clients(run(make_settings(**(SMALL | {"name": "same"}), personal_every=3, finetune_lr=0.0)))
    assert all(row["tuned_loss"] == row["global_loss"] for row in same)
    auto = read_clients(run(settings))
    assert all(row["tuned_loss"] < row["global_loss"] for row in auto)
    given = run(make_settings(**(SMALL | {"name": "given"}), personal_every=3, finetune_lr=settings.lr))
    assert read_clients(given) == auto


def test_a_client_that_can_not_measure_is_named(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = FedClient.evaluate_personally

    def fail_for_1(self: FedClient, parameters: Any, config: Any) -> Any:
        if config["partition"] == 1:
            raise RuntimeError("no such luck")
        return measure(self, parameters, config)

    monkeypatch.setattr(FedClient, "evaluate_personally", fail_for_1)
    folder = run(make_settings(**SMALL, personal_every=3))
    line = lines_of(folder)[-1]
    assert line["personal_failures"] == 1
    assert line["failures"] == 0
    assert any(text.startswith("partition 1") and "no such luck" in text for text in line["failed"])
    assert [row["client"] for row in read_clients(folder)] == [0, 2, 3]


@pytest.mark.parametrize("left", [{}, {"global_accuracy": 0.5}, {"personal_accuracy": 0.5, "round": 9.0}])
def test_an_answer_without_what_was_asked_for_is_refused_and_named(
    left: dict[str, float], make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of the first client; the others count, and the run goes on."""
    measure = FedClient.evaluate_personally

    def odd_for_0(self: FedClient, parameters: Any, config: Any) -> Any:
        found = measure(self, parameters, config)
        return {"partition": 0, "num_examples": 3, **left} if config["partition"] == 0 else found

    monkeypatch.setattr(FedClient, "evaluate_personally", odd_for_0)
    folder = run(make_settings(**SMALL, method="ditto", personal_every=1))
    line = lines_of(folder)[-1]
    assert line["personal_failures"] == 1
    assert any(text.startswith("partition 0") and "is missing" in text for text in line["failed"])
    assert "personal_accuracy_worst" in line
    assert [(row["round"], row["client"]) for row in read_clients(folder)] == [
        (r, c) for r in (1, 2, 3) for c in (1, 2, 3)
    ]


def test_a_client_whose_own_model_is_lost_is_named(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when the client trained."""
    fit = FedClient.fit

    def lose(self: FedClient, parameters: Any, config: Any) -> Any:
        found = fit(self, parameters, config)
        if config["round"] == 3 and config["partition"] == lost:
            (Path(config["state_folder"]) / str(lost) / "round-3.safetensors").unlink()
        return found

    settings = make_settings(**SMALL, method="local_only", personal_every=3)
    lost = 2
    monkeypatch.setattr(FedClient, "fit", lose)
    folder = run(settings.model_copy(update={"clients_per_round": 4}))
    line = lines_of(folder)[-1]
    assert (line["failures"], line["personal_failures"]) == (0, 1)
    assert any(text.startswith("partition 2") and "can't go on without what it kept" in text for text in line["failed"])
    assert [row["client"] for row in read_clients(folder)] == [0, 1, 3]


def test_a_resumed_run_measures_the_same(make_settings: MakeSettings) -> None:
    """From the checkpoint of round 2, with round 3 measured before: each round stands there once."""
    settings = make_settings(**SMALL, method="fedper", personal_every=1, checkpoint_every=2)
    folder = run(settings)
    before, model = read_clients(folder), (folder / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "checkpoints" / "round-3")
    run_inprocess(
        server_app.app, client_app, 4, dump(settings.model_copy(update={"resume": str(folder), "name": folder.name}))
    )
    assert read_clients(folder) == before
    assert (folder / "model.safetensors").read_bytes() == model


def test_what_is_a_clients_own_is_exactly_0_in_few_bits_too(make_settings: MakeSettings) -> None:
    """Rounding at random would tell something of it."""
    settings = make_settings(**SMALL, method="fedper", wire_delta="int8")
    before, after = (
        safetensors.torch.load_file(
            run(settings.model_copy(update={"rounds": r, "name": str(r)})) / "model.safetensors"
        )
        for r in (1, 3)
    )
    for name in before:
        assert before[name].equal(after[name]) == name.startswith("head"), name


# ---- settings


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"personal_every": 2}, r"holdout = 0\.0: personal_every needs held-out examples"),
        ({"personal_every": -1}, "personal_every = -1: allowed is a whole number at least 0"),
        ({"finetune_lr": -0.1}, r"finetune_lr = -0\.1: allowed is a number at least 0 or \"auto\""),
        ({"method": "fedper", "personal_layers": "a,,b"}, "personal_layers = 'a,,b': allowed is \"auto\" or names of"),
        ({"method": "fedact_align", "wire_correction": "derived"}, "fedact_align's Delta_G does not follow"),
    ],
)
def test_wrong_settings(own: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse(read_defaults() | own)


def test_a_model_that_is_not_there_is_named_before_its_layers(make_settings: MakeSettings) -> None:
    with pytest.raises(SettingsError, match="/nonexistent can't be loaded"):
        check(make_settings(task="sft", model="/nonexistent", method="fedper", personal_layers="x"))


def test_layers_that_the_model_does_not_have_are_refused_before_the_start(make_settings: MakeSettings) -> None:
    check(make_settings(method="fedper", personal_layers="norm,head.bias"))
    with pytest.raises(SettingsError, match=r"personal_layers = 'head,tail': .* no parameter 'tail' .* allowed are"):
        check(make_settings(method="fedper", personal_layers="head,tail"))
    with pytest.raises(SettingsError, match="personal_layers = 'head': fedact has no such setting"):
        check_own_settings(make_settings(personal_layers="head"))
