import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from fedact_flwr.settings import (
    PROJECT,
    Settings,
    SettingsError,
    check_own_settings,
    dump,
    parse,
    read_defaults,
    read_file,
    read_override,
)
from strategies import STRATEGIES
from tasks import TASKS
from tasks.digits import Digits

DEFAULTS = read_defaults()


def test_pyproject_holds_every_setting_and_no_other() -> None:
    assert DEFAULTS.keys() == Settings.model_fields.keys()


def test_every_default_has_a_comment() -> None:
    lines = (PROJECT / "pyproject.toml").read_text().splitlines()
    table = lines[lines.index("[tool.flwr.app.config]") + 1 :]
    settings = [line for line in table[: table.index("[tool.pytest.ini_options]")] if " = " in line]
    assert len(settings) == len(DEFAULTS)
    assert all("#" in line for line in settings)


CONF = [path for path in sorted((PROJECT / "conf").rglob("*.toml")) if "sweeps" not in path.parts]


@pytest.mark.parametrize("path", CONF, ids=lambda p: p.stem)
def test_files_in_conf_are_valid(path: Path) -> None:
    parse(DEFAULTS | read_file(path))


@pytest.mark.parametrize("model", ["vit_tiny", "swin_lite", "resnet18"])
@pytest.mark.parametrize("task", ["cifar10", "cifar100", "tiny_imagenet"])
@pytest.mark.parametrize("alpha", [0.6, 0.3, 0.1])
def test_conf_has_the_papers_vision_experiments(model: str, task: str, alpha: float) -> None:
    """As its tables have them: 100 clients, 10 of them a round, 300 rounds of 50 steps of 50 images."""
    own = read_file(PROJECT / "conf" / "paper" / f"{model}-{task}-dir{alpha}.toml")
    fedact = parse(DEFAULTS | own)
    assert (fedact.model, fedact.task, fedact.split, fedact.dirichlet_alpha) == (model, task, "dirichlet", alpha)
    assert (fedact.clients, fedact.clients_per_round, fedact.seed) == (100, 10, 42)
    assert (fedact.rounds, fedact.local_steps, fedact.batch_size, fedact.lr_schedule) == (300, 50, 50, "cosine")
    assert (fedact.lr, fedact.weight_decay, fedact.beta1, fedact.beta2) == (3e-4, 0.01, 0.9, 0.999)
    assert (fedact.rho, fedact.tau, fedact.alpha, fedact.gamma) == (0.5, 0.5, None, None)  # 1 / tau and tau
    scaffold, adam, fedadam = (parse(DEFAULTS | own | {"method": m}) for m in ("scaffold", "local_adam", "fedadam"))
    assert (scaffold.lr, scaffold.weight_decay) == (0.1, 0.001)
    assert (adam.lr, adam.weight_decay) == (3e-4, 0.001)
    assert (fedadam.server_lr, fedadam.server_beta1, fedadam.server_beta2) == (0.01, 0.9, 0.98)


def test_auto_takes_the_tasks_value_for_the_methods_family() -> None:
    adamw, sgd = parse(DEFAULTS), parse(DEFAULTS | {"method": "fedavg"})
    assert (adamw.lr, adamw.weight_decay) == (3e-3, 0.01)
    assert (sgd.lr, sgd.weight_decay) == (0.1, 0.001)
    assert parse(DEFAULTS | {"lr": 0.5}).lr == 0.5
    assert parse(DEFAULTS | {"method": "fedprox"}).lr == 0.1
    assert parse(DEFAULTS | {"method": "fedprox", "local_optimizer": "adamw"}).lr == 3e-3
    assert parse(DEFAULTS | {"method": "local_adam"}).weight_decay == 0.001
    assert (adamw.server_lr, parse(DEFAULTS | {"method": "fedadam"}).server_lr) == (1.0, 0.01)


def test_settings_of_other_methods_are_refused() -> None:
    for method in STRATEGIES:
        check_own_settings(parse(DEFAULTS | {"method": method}))
    check_own_settings(parse(DEFAULTS | {"method": "fedact", "gamma": 0.1}))
    with pytest.raises(
        SettingsError, match=r"mu = 0\.5: fedact has no .* the default, 0\.01; methods with it: fedprox, ditto;"
    ):
        check_own_settings(parse(DEFAULTS | {"mu": 0.5}))
    with pytest.raises(SettingsError, match=r"server_beta1 = 0\.5: fedact .*did you mean beta1"):
        check_own_settings(parse(DEFAULTS | {"server_beta1": 0.5}))


def test_a_tasks_values_for_a_method_go_before_those_for_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the paper has it: FedLADA's own rate and decay in pre-training, beta2 = .99 for all, FedAdam's server step."""

    class Pretraining(Digits):
        defaults: ClassVar = {
            "adamw": {"lr": 3e-4, "weight_decay": 0.01, "beta2": 0.99},
            "adam": {"lr": 3e-4, "weight_decay": 0.001, "beta2": 0.99},
            "sgd": {"lr": 0.1, "weight_decay": 0.001},
            "fedlada": {"lr": 3e-3, "weight_decay": 0.0},
            "fedadam": {"server_lr": 1e-3},
        }

    monkeypatch.setitem(TASKS, "pretraining", Pretraining())
    fedlada, fedadam, local_adam = (
        parse(DEFAULTS | {"task": "pretraining", "method": m}) for m in ("fedlada", "fedadam", "local_adam")
    )
    assert (fedlada.lr, fedlada.weight_decay, fedlada.beta1, fedlada.beta2) == (3e-3, 0.0, 0.9, 0.99)
    assert (local_adam.lr, local_adam.weight_decay, local_adam.beta2) == (3e-4, 0.001, 0.99)
    assert (fedadam.server_lr, fedadam.lr, fedadam.beta2) == (1e-3, 0.1, 0.999)
    assert parse(DEFAULTS | {"task": "pretraining", "method": "fedlada", "lr": 0.5}).lr == 0.5
    check_own_settings(parse(DEFAULTS | {"task": "pretraining"}))  # 0.99 is the default there


def test_the_local_optimizer_decides_which_settings_a_method_has() -> None:
    assert parse(DEFAULTS | {"method": "scaffold"}).local_optimizer == "sgd"
    assert parse(DEFAULTS).local_optimizer == "auto"  # fedact has its own
    mgup = {"method": "scaffold", "local_optimizer": "mgup_adamw"}
    check_own_settings(parse(DEFAULTS | mgup | {"tau": 0.2, "beta1": 0.5}))
    with pytest.raises(SettingsError, match=r"tau = 0\.2: scaffold with local_optimizer = 'sgd' has no such setting"):
        check_own_settings(parse(DEFAULTS | {"method": "scaffold", "tau": 0.2}))
    with pytest.raises(SettingsError, match=r"beta1 = 0\.5: fedavg with local_optimizer = 'sgd' has no"):
        check_own_settings(parse(DEFAULTS | {"method": "fedavg", "beta1": 0.5}))
    with pytest.raises(SettingsError, match=r"local_optimizer = 'sgd': fedact has no such setting"):
        check_own_settings(parse(DEFAULTS | {"local_optimizer": "sgd"}))
    with pytest.raises(SettingsError, match=r"second_moment = 'block': local_adamw has no such setting"):
        check_own_settings(parse(DEFAULTS | {"method": "local_adamw", "second_moment": "block"}))


def test_a_task_without_a_value_for_the_family_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Digits, "defaults", {"adamw": {"lr": 1e-3, "weight_decay": 0.01}})
    with pytest.raises(SettingsError, match=r"lr = 'auto': task 'digits' has no value for method 'local_adam' or its"):
        parse(DEFAULTS | {"method": "local_adam"})


@pytest.mark.parametrize(
    ("key", "given", "near"),
    [
        ("method", "FedACT", "fedact"),
        ("method", "SCAFFOLD", "scaffold"),
        ("method", "FedAdamW", "fedadamw"),
        ("method", "fedact-local", "fedact_local"),
        ("local_optimizer", "mgup", "mgup_adamw"),
    ],
)
def test_names_as_papers_spell_them_lead_to_ours(key: str, given: str, near: str) -> None:
    with pytest.raises(SettingsError, match=rf"{key} = '{given}': .*\(did you mean {near}\?\)"):
        parse(DEFAULTS | {"method": "fedavg"} | {key: given})


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(SettingsError, match=r"local_optimizer = 'adam_w': .*\(did you mean adamw\?\)"):
        parse(DEFAULTS | {"method": "fedavg", "local_optimizer": "adam_w"})
    with pytest.raises(SettingsError, match=r"momentum = 0\.5: fedact has no such setting; allowed"):
        check_own_settings(parse(DEFAULTS | {"momentum": 0.5}))
    with pytest.raises(SettingsError, match=r"method = 'scafold': .*\(did you mean scaffold\?\)"):
        parse(DEFAULTS | {"method": "scafold"})


def test_settings_are_frozen_and_dump_is_read_back() -> None:
    settings = parse(DEFAULTS | {"gamma": 0.25})
    with pytest.raises(ValueError, match="frozen"):
        settings.rho = 0.1  # type: ignore[misc]
    assert parse(tomllib.loads(tomli_w.dumps(dump(settings)))) == settings


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("method", "fedsgd", ", ".join(STRATEGIES)),
        ("task", "mnist", "digits"),
        ("rho", 1.5, "at least 0 and at most 1"),
        ("tau", 0.0, "above 0 and at most 1"),
        ("tau", float("nan"), "above 0"),
        ("alpha", -1.0, 'at least 0 or "auto"'),
        ("lr", "fast", 'a number above 0 or "auto"'),
        ("beta2", 1.0, "below 1"),
        ("rounds", "3", "a whole number above 0"),
        ("rounds", 2.5, "a whole number"),
        ("rounds", True, "a whole number"),
        ("split", "random", "'dirichlet', 'dirichlet_priors', 'iid', 'by_class'"),
        ("diagnostics", 1, "true or false"),
        ("metrics_to", "tensorboards", '"" or any of tensorboard, mlflow, wandb, with commas between'),
        ("metrics_to", "mlflow,", "any of tensorboard, mlflow, wandb"),
        ("metrics_to", True, "any of tensorboard, mlflow, wandb"),
        ("output", 3, "a string"),
        ("clients_per_round", 11, "1 to 10"),
        ("min_replies", 11, "1 to 10"),
        ("split", "nodes", "another task or split"),  # digits are built in
        ("lr_min", 1.0, "0 to 0.003"),
        ("rouns", 3, "did you mean rounds"),
        ("name", "", "the name of a folder"),
        ("output", "", "a folder to write to"),
        ("name", "../x", "the name of a folder"),
    ],
)
def test_errors_are_one_line_with_key_value_and_what_is_allowed(key: str, value: object, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(DEFAULTS | {key: value})
    message = str(caught.value)
    assert message.startswith(f"{key} = {value!r}: ")
    assert allowed in message
    assert "\n" not in message


numbers = st.one_of(st.integers(), st.floats(), st.booleans())
values = st.one_of(numbers, st.text(max_size=20), st.sampled_from(["auto", "../x", "/etc/passwd", "a\0b", "CON", "\n"]))


def taken_or_refused_in_one_line(read: Callable[[], Any]) -> Any:
    refusal = ""
    try:
        return read()
    except SettingsError as error:
        refusal = str(error)
    assert len(refusal.splitlines()) == 1


@given(st.dictionaries(st.one_of(st.sampled_from(sorted(DEFAULTS)), st.text(max_size=10)), values, max_size=3))
def test_any_setting_is_taken_or_refused_in_one_line(changes: dict[str, Any]) -> None:
    settings = taken_or_refused_in_one_line(lambda: parse(DEFAULTS | changes))
    if settings is None:
        return
    assert parse(dump(settings)) == settings
    assert Path(settings.name).name == settings.name
    tomllib.loads(tomli_w.dumps(dump(settings)))


@given(st.text(max_size=40))
def test_any_override_is_read_or_refused_in_one_line(text: str) -> None:
    read = taken_or_refused_in_one_line(lambda: read_override(text))
    assert read is None or read[0] in text


@given(st.binary(max_size=60))
def test_any_file_is_read_or_refused(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        Path(file.name).write_bytes(data)
        taken_or_refused_in_one_line(lambda: parse(DEFAULTS | read_file(Path(file.name))))


def test_client_evaluation_needs_held_out_examples() -> None:
    with pytest.raises(SettingsError, match=r"holdout = 0\.0: .*above 0, to 0\.5"):
        parse(DEFAULTS | {"client_evaluation": True})
    with pytest.raises(SettingsError, match=r"min_samples = 1: .*at least 2"):
        parse(DEFAULTS | {"holdout": 0.2, "min_samples": 1})


def test_overrides_are_toml_or_bare_words() -> None:
    assert read_override("rounds=3") == ("rounds", 3)
    assert read_override("lr = 1e-3") == ("lr", 1e-3)
    assert read_override("method=fedavg") == read_override("method='fedavg'") == ("method", "fedavg")
    assert read_override("diagnostics=false") == ("diagnostics", False)
    with pytest.raises(SettingsError, match="key=value"):
        read_override("rounds")


def test_unreadable_files_are_named(tmp_path: Path, make_settings: Callable) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml: No such file"):
        read_file(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds 3")
    with pytest.raises(SettingsError, match=r"bad\.toml: not valid TOML"):
        read_file(tmp_path / "bad.toml")
