"""Language tasks: rows, tokens, losses by hand, and runs on a tiny random Llama."""

import contextlib
import gzip
import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from datasets import Dataset, DatasetDict
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from clients.training import train
from fedact_flwr.budget import with_budget
from fedact_flwr.cli import app
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import run_inprocess
from fedact_flwr.server_app import app as server_app
from fedact_flwr.server_app import check
from fedact_flwr.settings import PROJECT, Settings, SettingsError, dump, parse, read_defaults
from tasks import TASKS
from tasks.adapter import _adapted
from tasks.language import LanguageTask, load_tokenizer
from tasks.pretrain import LLAMA_SHAPES
from tasks.task import BadData
from tasks.text import TextSpec, load_rows

SPEC = TextSpec("nobody/nothing")
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon"]


quantized = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def settings_of(task: str, **own: Any) -> Settings:
    return parse(read_defaults() | {"task": task, "device": "cpu", "split": "iid", "min_samples": 1} | own)


def task_of(task: str, **own: Any) -> Any:
    configured = TASKS[task].configured(settings_of(task, **own))
    assert isinstance(configured, LanguageTask)
    return configured


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer with one token a word: <s> 0, </s> 1, alpha 2, beta 3, ..."""
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", *WORDS, "?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random Llama and a tokenizer of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )
    folder = tmp_path_factory.mktemp("llama")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


# ---- rows


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "parquet", "txt", "save_to_disk", "one split"])
def test_rows_of_each_format(kind: str, tmp_path: Path) -> None:
    """Two files or splits train, one evaluates; without the latter, one row of twenty is held out."""
    texts = {"train-0": ["a", "b"], "train-1": ["c"], "validation": ["v"]}
    data = tmp_path / "data"
    if kind == "save_to_disk":
        DatasetDict({n.replace("-", ""): Dataset.from_dict({"text": t}) for n, t in texts.items()}).save_to_disk(data)
    elif kind == "one split":
        Dataset.from_dict({"text": [str(i) for i in range(40)]}).save_to_disk(data)
    else:
        data.mkdir()
        for name, rows in texts.items():
            path = data / f"{name}.{kind}"
            if kind == "parquet":
                Dataset.from_dict({"text": rows}).to_parquet(path)
            elif kind == "txt":
                for i, text in enumerate(rows):
                    (data / f"{name}-{i}.txt").write_text(text)
            else:
                lines = "\n".join(json.dumps({"text": text}) for text in rows)
                written = (json.dumps([{"text": text} for text in rows]) if kind == "json" else lines).encode()
                path.write_bytes(gzip.compress(written) if kind.endswith("gz") else written)
    train, held_out = (list(load_rows(SPEC, str(data), is_train, 0)["text"]) for is_train in (True, False))
    if kind == "one split":
        assert (len(train), len(held_out)) == (38, 2)
        assert sorted(train + held_out) == sorted(str(i) for i in range(40))
    else:
        assert (train, held_out) == (["a", "b", "c"], ["v"])
        assert list(load_rows(SPEC, str(data), True, 2)["text"]) == ["a", "b"]


def test_a_server_may_have_a_file_that_evaluates_alone(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps({"text": str(i)}) for i in range(20)))
    assert len(load_rows(SPEC, str(tmp_path / "test.jsonl"), False, 0)) == 20
    with pytest.raises(BadData, match=r"all of it evaluates \(test\.jsonl\), nothing trains"):
        load_rows(SPEC, str(tmp_path / "test.jsonl"), True, 0)


def test_one_file_is_held_out_from(tmp_path: Path) -> None:
    (tmp_path / "latest.jsonl").write_text("\n".join(json.dumps({"text": str(i)}) for i in range(20)))
    assert len(load_rows(SPEC, str(tmp_path / "latest.jsonl"), True, 0)) == 19
    assert len(load_rows(SPEC, str(tmp_path / "latest.jsonl"), False, 0)) == 1


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"txt": "x"}\n{"txt": "y"}', r"a\.jsonl has no column text; it has txt"),
        ("a.jsonl", "{broken", r"a\.jsonl can't be read: "),
        ("a.parquet", "PAR", r"a\.parquet can't be read: "),
        ("a.csv", "text\nx", r"a\.csv holds no format known here: save_to_disk, \.parquet"),
        ("test.jsonl", '{"text": "x"}', r"all of it evaluates \(test\.jsonl\), nothing trains"),
        (None, "", r"nowhere is not there"),
    ],
)
def test_bad_files(name: str | None, content: str, message: str, tmp_path: Path, words: str) -> None:
    data = tmp_path / (name or "nowhere")
    if name:
        data.write_text(content)
    refused(message, "pretrain_c4", data=str(data), tokenizer=words)


def refused(message: str, task: str, **own: Any) -> None:
    """In one line before anything starts."""
    with pytest.raises(SettingsError, match=message) as caught:
        check(settings_of(task, **own))
    assert "\n" not in str(caught.value)


# ---- pre-training


def test_documents_are_packed_between_their_boundaries(words: str, tmp_path: Path) -> None:
    """<s> alpha beta </s> <s> gamma </s> <s> delta </s>: ten tokens, of which two sequences of four are made."""
    (tmp_path / "valid.txt").write_text("epsilon alpha")
    for i, text in enumerate(("alpha beta", "gamma", "delta")):
        (tmp_path / f"{i}.txt").write_text(text)
    task = task_of("pretrain_c4", data=str(tmp_path), tokenizer=words, max_length=4, model="llama_5m")
    assert task.train_examples(np.arange(3))["input_ids"].tolist() == [[0, 2, 3, 1], [0, 4, 1, 0]]
    assert task.test_examples()["input_ids"].tolist() == [[0, 6, 2, 1]]
    long = task_of("pretrain_c4", data=str(tmp_path), tokenizer=words, max_length=99)
    with pytest.raises(BadData, match=r"3 documents have 10 tokens, fewer than one example"):
        long.train_examples(np.arange(3))


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # layers (4 h^2 + 3 h f + 2 h) + h, and 2 x 32,000 h for embedding and head
        ("llama_60m", 8 * (4 * 512**2 + 3 * 512 * 1376 + 2 * 512) + 512 + 64_000 * 512),
        ("llama_130m", 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768 + 64_000 * 768),
        ("llama_250m", 24 * (4 * 768**2 + 3 * 768 * 2560 + 2 * 768) + 768 + 64_000 * 768),
    ],
)
def test_llamas_have_the_shapes_of_the_paper(
    model: str, parameters: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of("pretrain_c4", model=model, tokenizer=words)
    monkeypatch.setattr(PreTrainedTokenizerFast, "__len__", lambda self: 32_000)
    assert task.parameters == parameters
    with torch.device("meta"):
        assert sum(p.numel() for p in task.make_model(0).parameters()) == parameters


@pytest.mark.parametrize(("model", "rounds"), [("llama_60m", 89), ("llama_130m", 205), ("llama_250m", 377)])
def test_a_token_budget_sets_the_rounds(model: str, rounds: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 tokens a parameter, 4 clients x 50 steps x 64 sequences x 1,024 a round: as the paper says."""
    monkeypatch.setattr(PreTrainedTokenizerFast, "__len__", lambda self: 32_000)
    own = {"tokens_per_parameter": 20.0, "clients_per_round": 4, "local_steps": 50, "batch_size": 64}
    settings, words_for_people = with_budget(settings_of("pretrain_c4", model=model, tokenizer=words, **own))
    assert settings.rounds == rounds
    assert words_for_people is not None
    assert words_for_people.endswith(f"{rounds} rounds of 13,107,200 tokens")
    assert with_budget(settings)[0] == settings
    with pytest.raises(SettingsError, match=rf"rounds = 3: allowed is the default, or what .* gives, {rounds}"):
        with_budget(settings_of("pretrain_c4", model=model, tokenizer=words, rounds=3, **own))
    with pytest.raises(SettingsError, match=r"tokens_per_parameter = 20: allowed with task = 'digits' is 0"):
        with_budget(settings_of("digits", tokens_per_parameter=20.0))


def test_speakers_are_clients(words: str, tmp_path: Path) -> None:
    rows = [{"text": f"{WORDS[i % 5]} " * 8, "speaker": "bca"[i % 3]} for i in range(40)]
    data = write(tmp_path / "a.jsonl", rows)
    task = task_of("pretrain_c4", data=data, tokenizer=words, partition_column="speaker")
    speakers = load_rows(task.spec, data, True, 0)["speaker"]
    assert task.train_labels().tolist() == ["abc".index(speaker) for speaker in speakers]
    refused(
        r'clients = 4: split = "natural" gives away whole classes .* there are 3', "pretrain_c4", data=data,
        tokenizer=words, partition_column="speaker", split="natural", clients=4, clients_per_round=4, max_length=4,
    )  # fmt: skip
    refused(
        r"partition_column = 'who': .* has no such column; it has text, speaker", "pretrain_c4", data=data,
        tokenizer=words, partition_column="who",
    )  # fmt: skip


def test_a_tokenizer_without_an_end(words: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(words)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "t")
    data = write(tmp_path / "a.jsonl", [{"text": "alpha"}] * 40)
    refused("has no end-of-sequence token", "pretrain_c4", data=data, tokenizer=str(tmp_path / "t"))
    refused("tokenizer = .*nowhere can't be loaded", "pretrain_c4", data=data, tokenizer=str(tmp_path / "nowhere"))


# ---- losses by hand


class Coins(nn.Module):
    """Says 1 with chance 3/4 and 0 with 1/4 at every place; with the adapter off, each with 1/2."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.tensor(math.log(3.0)))
        self.on = True

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        one = self.logit if self.on else torch.zeros(())
        logits = torch.stack([torch.zeros(()), one]).expand(*input_ids.shape, 2)
        return type("Output", (), {"logits": logits})

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self.on = False
        yield
        self.on = True


RESPONSES = {  # prompts of 2 and 1 tokens, responses of 1 and 3
    "ids": torch.tensor([[0, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.int32),
    "prompt": torch.tensor([2, 1]),
    "length": torch.tensor([3, 4]),
}


def test_the_loss_is_on_the_responses_alone() -> None:
    """Response tokens 1; 1, 0, 1: three times -log 3/4, once -log 1/4."""
    task = task_of("sft", model="x")
    nll = -3 * math.log(0.75) - math.log(0.25)
    by_response = (-math.log(0.75) + (-2 * math.log(0.75) - math.log(0.25)) / 3) / 2
    assert task.loss(Coins(), RESPONSES).item() == pytest.approx(nll / 4)
    assert task.terms(RESPONSES) == 4
    metrics = task.evaluate(Coins(), RESPONSES)
    assert metrics == pytest.approx(
        {"loss": nll / 4, "perplexity": math.exp(nll / 4), "token_accuracy": 0.75, "response_nll": by_response}
    )


def test_micro_batches_weigh_by_response_tokens() -> None:
    task = task_of("sft", model="x")
    gradients = []
    for size in (0, 1):
        model = Coins()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        train(model, task.loss, iter([RESPONSES]), optimizer, 1, micro_batch_size=size, terms=task.terms)
        gradients.append(model.logit.grad.item() if model.logit.grad is not None else 0.0)
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-5)
    assert gradients[0] == pytest.approx((4 * 0.75 - 3) / 4, abs=1e-6)  # sum of p(1) - [token = 1]


def test_dpo() -> None:
    """Chosen 1 1, rejected 0: log-ratios 2 log 3/2 and log 1/2, so the margin is beta log 9/2."""
    task = task_of("dpo", model="x", dpo_beta=0.1)
    pair = {
        "chosen_prompt": torch.tensor([1]), "rejected_prompt": torch.tensor([1]),
        "chosen_ids": torch.tensor([[0, 1, 1]], dtype=torch.int32), "chosen_length": torch.tensor([3]),
        "rejected_ids": torch.tensor([[0, 0, 1]], dtype=torch.int32), "rejected_length": torch.tensor([2]),
    }  # fmt: skip
    margin = 0.1 * math.log(4.5)
    loss = math.log(1 + math.exp(-margin))
    assert task.loss(Coins(), pair).item() == pytest.approx(loss, rel=1e-5)
    metrics = task.evaluate(Coins(), pair)
    gap = 2 * math.log(0.75) - math.log(0.25)
    assert metrics == pytest.approx(
        {"loss": loss, "preference_accuracy": 1.0, "reward_margin": margin, "policy_gap": gap}, rel=1e-5
    )
    swapped = {key.replace("chosen", "x").replace("rejected", "chosen").replace("x", "rejected"): t
               for key, t in pair.items()}  # fmt: skip
    assert task.evaluate(Coins(), swapped)["preference_accuracy"] == 0.0


def test_tokens_of_a_response_follow_the_prompts(tmp_path: Path) -> None:
    """A tokenizer that marks the start of a text would mark a response's too, were it tokenised by itself."""
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "_a": 1, "_": 2, ":": 3, "b": 4, "_b": 5}, unk_token="_"))
    tokenizer.normalizer = normalizers.Prepend("_")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("_?."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)
    task = task_of("sft", model="x", tokenizer=str(tmp_path))
    assert task.encoded(["a:"], ["b"]) == [(2, [1, 3, 4, 0])]


# ---- templates and truncation


def decoded(llama: str, ids: Tensor) -> str:
    return load_tokenizer(llama).decode(ids.tolist(), skip_special_tokens=False)


def test_instructions_in_alpacas_template(llama: str, tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
    ]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows[:1])
    task = task_of("sft", model=llama, data=str(tmp_path))
    examples = task.train_examples(np.arange(2))
    with_input, without = (decoded(llama, ids[:n]) for ids, n in zip(examples["ids"], examples["length"], strict=True))
    assert with_input == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n3</s>"
    )
    assert without == task.prompt("Say hi.") + "hi</s>"
    assert [int(n) for n in examples["length"] - examples["prompt"]] == [2, 3]


def test_long_responses_are_cut_and_those_with_nothing_left_dropped(
    llama: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template alone has 140-odd bytes, which are tokens here."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    rows = [
        {"instruction": "a", "input": "", "output": "short"},
        {"instruction": "a", "input": "", "output": "x" * 300},
        {"instruction": "a" * 300, "input": "", "output": "short"},
    ]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows[2:])
    task = task_of("sft", model=llama, data=str(tmp_path), max_length=200)
    examples = task.train_examples(np.arange(3))
    assert len(examples["length"]) == 2
    assert examples["length"][1] == 200
    assert decoded(llama, examples["ids"][1]).endswith("### Response:\n" + "x" * int(200 - examples["prompt"][1]))
    assert "1 of 3 responses cut to max_length = 200 tokens, 1 examples dropped" in caplog.text
    with pytest.raises(BadData, match="no prompt of 1 is that short"):
        task.test_examples()


@pytest.mark.parametrize("form", ["dialogue", "prompt", "conversations"])
def test_preferences_in_vicunas_template(
    form: str, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row: dict[str, Any] = {"chosen": "Yes.", "rejected": "No."}
    if form == "dialogue":
        start = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Really?\n\nAssistant:"
        row = {side: f"{start} {row[side]}" for side in row}
    elif form == "prompt":
        row["prompt"] = "Really?"
    else:
        row = {side: {"from": "gpt", "value": row[side]} for side in row}
        row["conversations"] = [{"from": "human", "value": "Really?"}]
    write(tmp_path / "train.jsonl", [row])
    write(tmp_path / "test.jsonl", [row])
    monkeypatch.setattr("tasks.dpo.MAX_PROMPT", 400)
    task = task_of("dpo", model=llama, data=str(tmp_path))
    examples = task.train_examples(np.arange(1))
    history = "USER: Hi ASSISTANT: Hello</s>" if form == "dialogue" else ""
    prompt = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        f"detailed, and polite answers to the user's questions. {history}USER: Really? ASSISTANT:"
    )
    for side, response in (("chosen", " Yes.</s>"), ("rejected", " No.</s>")):
        ids, n = examples[f"{side}_ids"][0], examples[f"{side}_length"][0]
        assert decoded(llama, ids[:n]) == prompt + response
        assert decoded(llama, ids[examples[f"{side}_prompt"][0] : n]) == response
    assert task.prompt("Really?") == prompt.replace(history, "")


def test_long_prompts_lose_their_beginning_and_long_responses_their_end(llama: str, tmp_path: Path) -> None:
    row = {"prompt": "p" * 200, "chosen": "c" * 50, "rejected": "r"}
    write(tmp_path / "train.jsonl", [row])
    write(tmp_path / "test.jsonl", [row])
    examples = task_of("dpo", model=llama, data=str(tmp_path), max_length=150).train_examples(np.arange(1))
    assert (examples["chosen_prompt"].tolist(), examples["chosen_length"].tolist()) == ([128], [150])
    prompt = "p" * (128 - len(" ASSISTANT:")) + " ASSISTANT:"
    assert decoded(llama, examples["chosen_ids"][0]) == prompt + " " + "c" * 21
    assert decoded(llama, examples["rejected_ids"][0]) == prompt + " r</s>"


# ---- runs


def rows_for(task: str) -> list[dict[str, Any]]:
    if task == "sft":
        return [{"instruction": f"Say {w}.", "input": "", "output": w} for w in WORDS * 6]
    if task == "dpo":
        return [{"prompt": f"Say {w}.", "chosen": w, "rejected": "no"} for w in WORDS * 6]
    return [{"text": f"{w} {w} {w} " * 3} for w in WORDS * 6]


def run(task: str, llama: str, tmp_path: Path, **own: Any) -> tuple[Path, list[dict[str, Any]]]:
    """Four rounds of three clients on thirty rows."""
    data = write(tmp_path / "rows.jsonl", rows_for(task))
    base = {"tokenizer": llama, "model": "llama_5m", "max_length": 16} if task == "pretrain_c4" else {"model": llama}
    rate = {"pretrain_c4": 3e-3, "sft": 3e-2, "dpo": 3e-2}[task]
    common = {"clients": 3, "clients_per_round": 3, "rounds": 4, "local_steps": 4, "batch_size": 4, "lr": rate}
    settings = settings_of(task, data=data, output=str(tmp_path), name="run", **(base | common | own))
    check(settings)
    run_inprocess(server_app, client_app, settings.clients, dump(settings))
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    return tmp_path / "run", [json.loads(line) for line in lines]


@pytest.mark.parametrize("task", ["pretrain_c4", "sft", "dpo"])
def test_a_run_learns_and_what_it_leaves_is_loaded_by_others(
    task: str, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LLAMA_SHAPES, "llama_5m", (16, 24, 2, 2))
    folder, rounds = run(task, llama, tmp_path)
    assert all(line["failures"] == 0 for line in rounds[1:])
    assert rounds[-1]["loss"] < rounds[0]["loss"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer("Say alpha.", return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    saved = next((folder / "model").glob("*model.safetensors"))
    if task == "pretrain_c4":
        assert sum(t.numel() for t in load_file(saved).values()) == sum(p.numel() for p in model.parameters())
    else:
        base = AutoModelForCausalLM.from_pretrained(llama)
        peft = PeftModel.from_pretrained(base, folder / "model")
        assert (peft(ids).logits == model(ids).logits).all()
        with peft.disable_adapter():
            assert (peft(ids).logits != model(ids).logits).any()
    result = CliRunner().invoke(app, ["generate", str(folder), "Say alpha.", "--max-tokens", "4"])
    assert result.exit_code == 0, result.output
    prompt = tokenizer(TASKS[task].prompt("Say alpha."), return_tensors="pt")["input_ids"]  # type: ignore[attr-defined]
    with torch.no_grad():
        for _ in range(4):
            prompt = torch.cat([prompt, model(prompt).logits[:, -1:].argmax(2)], dim=1)
    answer = prompt[0, -4:].tolist()
    answer = answer[: answer.index(1)] if 1 in answer else answer  # the end token
    assert result.stdout == tokenizer.decode(answer) + "\n"


def test_dpo_starts_at_log_two(llama: str, tmp_path: Path) -> None:
    """The adapter does nothing at first, so policy and reference agree."""
    _, (before, after) = run("dpo", llama, tmp_path, rounds=1, lr=1e-12)
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert before["reward_margin"] == 0
    assert after["train_loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize(
    "own",
    [
        {"base_precision": "bfloat16", "precision": "bfloat16"},
        pytest.param({"base_precision": "int8"}, marks=quantized),
        pytest.param({"base_precision": "nf4"}, marks=quantized),
        {"lora_r": 2},
    ],
)
def test_only_the_adapter_travels(own: dict[str, Any], llama: str, tmp_path: Path) -> None:
    """A (r x 16) and B (16 x r) on q_proj and v_proj of two layers, in float32 whatever the base is."""
    _, (_, line, _) = run("sft", llama, tmp_path, rounds=2, **own)
    numbers = own.get("lora_r", 32) * (16 + 16) * 2 * 2
    header = 128  # of each array: A and B on four modules
    assert line["bytes_received"] == 3 * 2 * (4 * numbers + 8 * header)  # deltas and v of three clients
    assert line["failures"] == 0


@quantized
@pytest.mark.parametrize(("precision", "bits", "close"), [("int8", 8, 0.01), ("nf4", 4, 0.2)])
def test_quantized_bases(precision: str, bits: int, close: float, llama: str, tmp_path: Path) -> None:
    """Smaller, near the base, in training as in evaluation, and the adapter still gets gradients after one."""
    data = write(tmp_path / "rows.jsonl", rows_for("sft"))
    losses, sizes = [], []
    for base_precision in ("float32", precision):
        task = task_of("sft", model=llama, data=data, base_precision=base_precision, lora_dropout=0.0)
        model, batch = task.make_model(0), task.train_examples(np.arange(4))
        evaluated = task.evaluate(model, batch)["loss"]
        loss = task.loss(model.train(), batch)
        assert loss.item() == pytest.approx(evaluated, rel=1e-4)
        losses.append(evaluated)
        layer = next(m for path, m in model.named_modules() if path.endswith("mlp.up_proj"))
        sizes.append(layer.weight.nbytes)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(g is not None and g.dtype == torch.float32 for g in gradients.values())
    assert all(g.any() for name, g in gradients.items() if "lora_B" in name and g is not None)
    assert sizes == [4 * 16 * 24, bits * 16 * 24 // 8]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=close)


@quantized
def test_answers_come_from_the_quantized_base(llama: str, tmp_path: Path) -> None:
    folder, _ = run("sft", llama, tmp_path, rounds=1, base_precision="nf4")
    result = CliRunner().invoke(app, ["generate", str(folder), "Say alpha.", "--max-tokens", "4"])
    assert result.exit_code == 0, result.output


def test_quantized_bases_need_a_package(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.adapter.find_spec", lambda package: None)
    message = "base_precision = 'nf4': it needs the package bitsandbytes, which is not installed; allowed are 'float32'"
    with pytest.raises(SettingsError, match=message):
        check(settings_of("sft", model=llama, base_precision="nf4"))


def test_the_base_is_loaded_once_in_a_process(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _adapted.cache_clear()
    loaded = []
    original = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append(a) or original(*a, **k))
    run("sft", llama, tmp_path, rounds=1)
    assert len(loaded) == 1


def test_adapters_start_by_the_seed(llama: str) -> None:
    def start(seed: int) -> Tensor:
        model = task_of("sft", model=llama).make_model(seed)
        return next(p for name, p in model.named_parameters() if "lora_A" in name).detach().clone()

    one, other, again = start(1), start(2), start(1)
    assert (one == again).all()
    assert (one != other).any()


@pytest.mark.parametrize("task", ["pretrain_c4", "sft"])
def test_gradient_checkpointing_changes_no_gradient(task: str, llama: str) -> None:
    ids = torch.randint(2, 256, (2, 16), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    batch = {
        "input_ids": ids,
        "ids": ids,
        "prompt": torch.tensor([3, 5]),
        "length": torch.tensor([16, 12]),
    }
    gradients = []
    for on in (False, True):
        own = {"tokenizer": llama, "model": "llama_5m"} if task == "pretrain_c4" else {"model": llama}
        configured = task_of(task, gradient_checkpointing=on, lora_dropout=0.0, **own)
        model = configured.make_model(3).train()
        configured.loss(model, batch).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    assert len(gradients[0]) == len(gradients[1]) > 0
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*gradients, strict=True))
    assert any(g.any() for g in gradients[0])


def test_dpo_is_trls(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, margin and accuracy of a model whose adapter does something; its policy is the merged model there."""
    trl = pytest.importorskip("trl")
    monkeypatch.setattr("tasks.dpo.MAX_PROMPT", 400)  # it cuts none
    rows = [{"prompt": f"Say {w}.", "chosen": w * (i + 1), "rejected": "no" * (3 - i)} for i, w in enumerate(WORDS[:3])]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows)
    task = task_of("dpo", model=llama, data=str(tmp_path), lora_dropout=0.0)
    model = task.make_model(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    ours = task.evaluate(model, task.train_examples(np.arange(3)))

    texts = [dict(zip(("prompt", "chosen", "rejected"), task.texts(row), strict=True)) for row in rows]
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), beta=0.1, per_device_train_batch_size=3, max_steps=1, learning_rate=0.0,
        logging_steps=1, max_length=512, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        deepcopy(model).merge_and_unload().requires_grad_(),
        ref_model=AutoModelForCausalLM.from_pretrained(llama),
        args=arguments,
        train_dataset=Dataset.from_list(texts),
        processing_class=load_tokenizer(llama),
    )
    trainer.train()
    theirs = trainer.state.log_history[0]
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-3)
    assert theirs["rewards/margins"] == pytest.approx(ours["reward_margin"], rel=1e-3)
    assert theirs["rewards/accuracies"] == pytest.approx(ours["preference_accuracy"])
    assert abs(ours["reward_margin"]) > 0.01


# ---- what does not fit


def test_a_model_without_the_target_modules(llama: str, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", rows_for("sft"))
    refused(
        r"lora_targets = 'q_proj,query': .* has no query; it has down_proj, gate_proj, .*q_proj, up_proj, v_proj",
        "sft", model=llama, data=data, lora_targets="q_proj,query",
    )  # fmt: skip
    refused(r"lora_targets = 'q_proj;v': allowed is names of modules", "sft", model=llama, lora_targets="q_proj;v")


def test_a_model_that_is_not_there(llama: str, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", rows_for("sft"))
    refused(
        "model = '.*nowhere': .*nowhere can't be loaded",
        "sft",
        model=str(tmp_path / "nowhere"),
        data=data,
        tokenizer=llama,
    )


def test_a_vocabulary_larger_than_the_embedding(llama: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.add_tokens([f"new{i}" for i in range(100)])
    tokenizer.save_pretrained(tmp_path / "larger")
    data = write(tmp_path / "rows.jsonl", rows_for("sft"))
    message = rf"the tokenizer has {len(tokenizer)} tokens, and .* embeds {len(tokenizer) - 100}"
    refused(message, "sft", model=llama, data=data, tokenizer=str(tmp_path / "larger"))


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_an_empty_response(task: str, llama: str, tmp_path: Path) -> None:
    rows = rows_for(task)
    side = "output" if task == "sft" else "rejected"
    rows[3][side] = " \n"
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows[:3])
    refused("response of training row 3 is empty", task, model=llama, data=str(tmp_path))
    write(tmp_path / "train.jsonl", [{"a": "b"}])
    load_rows.cache_clear()
    refused("has no column ", task, model=llama, data=str(tmp_path))


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("sft", {"instruction": "a", "input": "", "output": None}, "the column output does not hold text in every row"),
        ("sft", {"instruction": "a", "input": "", "output": 3}, "the column output does not hold text in every row"),
        ("pretrain_c4", {"text": None}, "the column text does not hold text in every row"),
        ("dpo", {"chosen": [{"role": "user"}], "rejected": [{"role": "user"}]}, "row 0 has another form: 'content'"),
        ("dpo", {"prompt": "a", "chosen": "b"}, "has no column rejected; it has prompt, chosen"),
    ],
)
def test_rows_of_another_form(task: str, row: dict[str, Any], message: str, llama: str, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [row])
    write(tmp_path / "test.jsonl", [row])
    own = {"tokenizer": llama, "model": "llama_5m"} if task == "pretrain_c4" else {"model": llama}
    refused(message, task, data=str(tmp_path), **own)


def test_held_out_rows_that_give_no_example(llama: str, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", rows_for("sft"))
    refused("max_length = 50: .* no prompt of 2 is that short", "sft", model=llama, data=data, max_length=50)


def test_c4_wants_to_know_how_much(words: str) -> None:
    refused("max_train_rows = 0: C4 has 365 million documents", "pretrain_c4", tokenizer=words, max_test_rows=5)


def test_c4_is_streamed_once(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of a file in the place of the hub; the second process finds them in the cache."""
    write(tmp_path / "rows.jsonl", [{"text": f"{word} " * 8} for word in WORDS])
    program = (
        "import datasets, tasks.text\n"
        "def stream(name, *configuration, split, streaming):\n"
        f"    print('asked', name, configuration, split); assert streaming\n"
        f"    files = {str(tmp_path / 'rows.jsonl')!r}\n"
        f"    return datasets.load_dataset('json', data_files=files, split='train', streaming=True)\n"
        "tasks.text.load_from_hub = stream\n"
        "from tasks.pretrain import PretrainC4\n"
        "print(len(tasks.text.load_rows(PretrainC4.spec, 'auto', True, 2)))\n"
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    first, second = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PROJECT).stdout
        for _ in range(2)
    )
    assert first == "asked allenai/c4 ('en',) train\n2\n"
    assert second == "2\n"


def test_answers_want_a_finished_run_of_a_language_task(llama: str, tmp_path: Path) -> None:
    for name, settings, message in (
        ("digits", settings_of("digits"), "its task, digits, writes no text"),
        ("sft", settings_of("sft", model=llama), "model is not there: the run has not ended"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.toml").write_text(tomli_w.dumps(dump(settings)))
        result = CliRunner().invoke(app, ["generate", str(tmp_path / name), "hi"], env={"COLUMNS": "250"})
        assert result.exit_code == 2
        assert message in result.output
        assert result.output.count("\n") == 1
    result = CliRunner().invoke(app, ["generate", str(tmp_path / "none"), "hi"], env={"COLUMNS": "250"})
    assert result.exit_code == 2
