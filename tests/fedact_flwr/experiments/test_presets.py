"""`fedact presets`: the sweeps of the paper's tables cell by cell, what they cost, and the trial."""

from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from clients.device import OutOfMemory
from fedact_flwr.budget import with_budget
from fedact_flwr.cli import app
from fedact_flwr.experiments import presets, trial
from fedact_flwr.experiments.presets import FIGURES, LAPTOP, PAPER, Preset
from fedact_flwr.experiments.sweep import Plan
from fedact_flwr.run import for_this_machine
from fedact_flwr.settings import PROJECT, Settings, dump, parse, read_defaults, read_settings
from tasks import TASKS
from tasks.language import LanguageTask
from tasks.vision import ImageTask

TABLES = sorted(path.stem for path in PAPER.glob("*.toml"))

VISION = [(task, alpha) for task in ("cifar10", "cifar100", "tiny_imagenet") for alpha in ("0.6", "0.3", "0.1")]
CIFAR100 = [f"{model}-cifar100-dir{alpha}" for model in ("vit_tiny", "swin_lite") for alpha in ("0.6", "0.1")]
METHODS = ["fedavg", "scaffold", "fedprox", "local_adam", "fedadam", "fedlada", "local_adamw", "fedadamw", "fedact"]
TUNING_METHODS = [method for method in METHODS if method not in ("local_adam", "local_adamw")]
ON_ADAMW = [
    {"method": "local_adamw"}, {"method": "fedlada"}, {"method": "fedadamw"}, {"method": "fedact"},
    {"method": "fedprox", "local_optimizer": "adamw"}, {"method": "scaffold", "local_optimizer": "adamw"},
]  # fmt: skip
# For each table the files in conf/paper, and what each of its cells adds to each of them.
CELLS: dict[str, tuple[list[str], list[dict[str, Any]]]] = {
    "table_1": (
        [f"{model}-{task}-dir{alpha}" for model in ("vit_tiny", "swin_lite") for task, alpha in VISION],
        [{"method": method} for method in METHODS],
    ),
    "table_2": ([f"pretrain-llama_{size}" for size in ("60m", "130m", "250m")], ON_ADAMW),
    "table_3": (CIFAR100, [{"method": method} for method in ("fedadamw", "fedact_local", "fedact")]),
    "table_4": (CIFAR100, [{"tau": tau, "gamma": g} for tau in (0.3, 0.5, 0.7) for g in (0.0, 0.1, 0.5, 0.9)]),
    "table_9": (CIFAR100, [{"rho": rho} for rho in (0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.8, 0.9)]),
    "table_10": ([f"resnet18-{task}-dir{alpha}" for task, alpha in VISION], [{"method": m} for m in METHODS]),
    "table_11_fedit": (["fedit"], [{"method": method} for method in TUNING_METHODS]),
    "table_11_fedva": (["fedva"], [{"method": method} for method in TUNING_METHODS]),
}  # fmt: skip

preset_of = lru_cache(lambda name: Preset(name, []))  # read once for all tests


def run_presets(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["presets", *arguments])
    return result.exit_code, result.output


def without_place(settings: Settings) -> Mapping[str, Any]:
    return {key: value for key, value in dump(settings).items() if key not in ("output", "name")}


def test_every_table_has_cells_here_and_a_version_for_a_laptop() -> None:
    assert sorted(CELLS) == TABLES
    assert sorted(path.stem for path in LAPTOP.glob("*.toml")) == sorted(f"{table}_laptop" for table in TABLES)
    assert {table for _, tables in FIGURES.values() for table in tables} <= set(TABLES)


@pytest.mark.parametrize("table", TABLES)
def test_each_run_of_a_table_is_a_condition_of_the_paper_with_what_its_cell_adds(table: str) -> None:
    files, cells = CELLS[table]
    expected = []
    for file, cell in product(files, cells):
        overrides = [f"{key}={value}" for key, value in cell.items()]
        settings = read_settings([PROJECT / "conf" / "paper" / f"{file}.toml"], overrides)
        expected.append(with_budget(for_this_machine(settings, "inprocess", with_data=False))[0])
    planned = [job.settings for job in preset_of(table).paper.expected]

    assert len(planned) == len(expected)
    for settings in expected:
        assert [without_place(run) for run in planned].count(without_place(settings)) == 1, settings
    assert {settings.seed for settings in planned} == {42}


@pytest.mark.parametrize(
    ("table", "runs", "steps"),
    [
        ("table_1", 2 * 3 * 3 * 9, 162 * 300 * 10 * 50),
        ("table_2", 3 * 6, 6 * (89 + 205 + 377) * 4 * 50),  # rounds of 20 tokens a parameter, as the paper has them
        ("table_4", 2 * 3 * 4 * 2, 48 * 300 * 10 * 50),
        ("table_11_fedva", 7, 7 * 200 * 2 * 10),
    ],
)
def test_runs_and_steps_are_counted(table: str, runs: int, steps: int) -> None:
    plan = preset_of(table).paper
    assert (len(plan.expected), plan.steps) == (runs, steps)


@pytest.mark.parametrize("table", TABLES)
def test_laptops_have_the_same_methods_and_values(table: str) -> None:
    """But for one thing: of models and data sets they have one."""
    paper, laptop = preset_of(table).paper.sweep, preset_of(table).laptop.sweep
    small = {key: values for key, values in laptop.grid.items() if key != "seed"}
    assert small == {key: values for key, values in paper.grid.items() if key not in ("model", "task")}
    methods, small_methods = (
        [{key: case[key] for key in case if key in ("method", "local_optimizer")} for case in cases]
        for cases in (paper.cases, laptop.cases)
    )
    assert small_methods == methods[: len(small_methods)]
    assert {tuple(case.items()) for case in small_methods} == {tuple(case.items()) for case in methods}
    assert "minutes" in laptop.about


@pytest.mark.parametrize("table", ["table_1", "table_3", "table_4", "table_9", "table_10"])
def test_laptops_run_on_digits_as_they_are(table: str, tmp_path: Path) -> None:
    plan = Plan(LAPTOP / f"{table}_laptop.toml", tmp_path, [], "inprocess")  # looks at the data and splits it
    assert {job.settings.task for job in plan.expected} == {"digits"}


def test_all_of_them_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "Preset", lambda name, overrides: preset_of(name))
    code, output = run_presets()
    assert code == 0, output
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line.split()}
    assert rows.keys() >= {*TABLES, *FIGURES}
    laptop = preset_of("table_4").laptop
    assert rows["table_4"][-5:] == ["48", "7,200,000", "-", str(len(laptop.expected)), f"{laptop.steps:,}"]


def test_one_says_what_to_type() -> None:
    code, output = run_presets("figure_4", "--set", "lr_min=2e-5")
    assert code == 0, output
    assert "18 runs, 805,200 steps" in output
    assert 'model = "llama_60m", max_train_rows = 3000000, method = "fedprox", local_optimizer = "adamw"' in output
    assert "  lr_min = 2e-05" in output
    assert "fedact sweep " in output
    assert "conf/sweeps/paper/table_2.toml" in output
    assert "conf/sweeps/laptop/table_2_laptop.toml" in output


def test_a_wrong_name_or_setting_is_refused_in_a_line() -> None:
    code, output = run_presets("table_5")
    assert code == 2
    assert output.startswith("error: preset 'table_5': allowed is one of table_1, table_2, table_3, table_4, table_9, ")
    assert output.count("\n") == 1
    code, output = run_presets("table_4", "--set", "tau=0.1")
    assert code == 2
    assert "--set tau: the sweep itself has values for it" in output


def test_hours_are_steps_times_seconds_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of table 4's 7,200,000 steps at 0.36 s and half at 0.72 s are 1,080 hours."""
    seconds = {"vit_tiny": 0.36, "swin_lite": 0.72}
    tried = []

    def seconds_per_step(settings: Settings) -> tuple[float, int]:
        tried.append(settings.model)
        if settings.model not in seconds:
            raise OutOfMemory("out of memory with 50 examples at once")
        return seconds[settings.model], 50 if settings.model == "vit_tiny" else 8

    monkeypatch.setattr(presets, "seconds_per_step", seconds_per_step)
    code, output = run_presets("table_4", "--trial")
    assert code == 0, output
    assert tried == ["vit_tiny", "swin_lite"]
    assert "1,080.0 hours on " in output
    assert "cifar100, swin_lite, float32: 0.72, reckoned from 8 of 50 examples" in output

    del seconds["swin_lite"]
    code, output = run_presets("table_4", "--trial")
    assert code == 0, output
    assert "cifar100, swin_lite, float32: no estimate: out of memory with 50 examples at once" in output
    assert "7,200,000 steps of clients, - hours on " in output


def test_where_the_base_model_is_not_to_be_had_there_is_no_estimate(tmp_path: Path) -> None:
    code, output = run_presets("table_11_fedit", "--trial", "--set", f"model={tmp_path}")
    assert code == 0, output
    assert f"sft, {tmp_path}, bfloat16: no estimate: {tmp_path} can't be loaded" in output
    assert "28,000 steps of clients, - hours on " in output


def settings_of(task: str, **own: Any) -> Settings:
    own |= {"device": "cpu", "split": "iid", "min_samples": 1}
    return parse(read_defaults() | {"task": task} | own)


def test_the_trial_times_twenty_steps_unless_they_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    done, train = [], trial.train

    def counted(model: Any, loss: Any, stream: Any, optimizer: Any, steps: int, *more: Any) -> float:
        first = next(stream)
        done.append((len(first["label"]), steps))
        return train(model, loss, stream, optimizer, steps, *more)

    monkeypatch.setattr(trial, "train", counted)
    settings = settings_of("cifar10", model="mlp", mlp_width=8, batch_size=6)
    seconds, examples = trial.seconds_per_step(settings)
    assert examples == 6
    assert 0 < seconds < 1
    assert done == [(1, 1), (1, 1), (2, 1), (4, 1), (6, 1), (6, 3), (6, 20)]

    done.clear()
    monkeypatch.setattr(trial, "SLOW", 0.0)
    seconds, examples = trial.seconds_per_step(settings)
    assert examples == 1
    assert done == [(1, 1), (1, 1)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random Llama and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "word": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=4, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


ROWS = {
    "pretrain_c4": {"text": ["word " * 40] * 3},
    "sft": {"instruction": ["word"] * 3, "input": [""] * 3, "output": ["word word"] * 3},
    "dpo": {"prompt": ["word"] * 3, "chosen": ["word word"] * 3, "rejected": ["word"] * 3},
}


@pytest.mark.parametrize("task", ROWS)
def test_random_text_has_the_form_of_tokenised_rows(task: str, llama: str) -> None:
    from datasets import Dataset

    model = {"model": "llama_5m", "tokenizer": llama} if task == "pretrain_c4" else {"model": llama}
    settings = settings_of(task, max_length=32, batch_size=2, **model)
    configured = TASKS[task].configured(settings)
    assert isinstance(configured, LanguageTask)
    real = configured.tokenised(Dataset.from_dict(ROWS[task]))
    random = trial.random_examples(configured, configured.make_model(0), 3)
    assert {name: (t.dtype, t.ndim, len(t)) for name, t in random.items()} == {
        name: (t.dtype, t.ndim, 3 if t.ndim == 1 else len(random[name])) for name, t in real.items()
    }
    assert trial.seconds_per_step(settings)[0] > 0


def test_random_images_have_the_form_of_real_ones() -> None:
    task = TASKS["tiny_imagenet"].configured(settings_of("tiny_imagenet", model="mlp"))
    assert isinstance(task, ImageTask)
    examples = trial.random_examples(task, torch.nn.Identity(), 7)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in examples.items()} == {
        "image": (torch.uint8, (7, 3, 64, 64)), "label": (torch.int64, (7,)),
    }  # fmt: skip


def test_paper_llamas_need_no_tokenizer() -> None:
    task = TASKS["pretrain_c4"].configured(settings_of("pretrain_c4", model="llama_60m"))
    with torch.device("meta"):
        assert task.make_model(0).get_input_embeddings().num_embeddings == 32_000
