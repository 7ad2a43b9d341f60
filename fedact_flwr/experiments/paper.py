"""The paper's results, beside those of runs that were made under the same conditions, and only those.

paper_results.json holds the tables of "FedACT: Federated Adaptive Coordinate Trust Modulation for Robust Transformer
Training under Data Heterogeneity"; conf/paper has a file of settings for each of their conditions.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedact_flwr.experiments.comparison import OBSERVING, Comparison
from fedact_flwr.experiments.document import Block, Heading, Paragraph, Table
from fedact_flwr.experiments.runs import MACHINE, Run, effective, show
from fedact_flwr.settings import PROJECT, dump, parse, read_defaults, read_file

RESULTS = Path(__file__).with_name("paper_results.json")
CONF = PROJECT / "conf" / "paper"
METHODS = {
    "FedAvg": "fedavg", "SCAFFOLD": "scaffold", "FedProx": "fedprox", "LocalAdam": "local_adam", "FedAdam": "fedadam",
    "FedLADA": "fedlada", "LocalAdamW": "local_adamw", "FedAdamW": "fedadamw", "FedACT-Local": "fedact_local",
    "FedACT": "fedact",
}  # fmt: skip
NAMES = {
    "ViT-Tiny": "vit_tiny", "Swin-Lite": "swin_lite", "ResNet-18": "resnet18", "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100", "Tiny-ImageNet": "tiny_imagenet",
}  # fmt: skip
METRICS = {  # the paper's name, a round's key, and how many of the key's units are one of the paper's
    "train loss": ("train_loss", 1.0), "val ppl": ("perplexity", 1.0),
    "loss": ("loss", 1.0), "ppl": ("perplexity", 1.0),
    "token acc %": ("token_accuracy", 100.0), "response nll": ("response_nll", 1.0),
    "pref acc %": ("preference_accuracy", 100.0), "reward margin": ("reward_margin", 1.0),
    "policy gap": ("policy_gap", 1.0), "accuracy %": ("accuracy", 100.0),
}  # fmt: skip
# What the paper does not give, and what changes no result but by rounding; data may lie anywhere.
OPEN = (*MACHINE, *OBSERVING, "seed", "data", "precision", "compile", "micro_batch_size", "gradient_checkpointing")
MAX_DIFFERENCES = 4


@dataclass(frozen=True)
class Value:
    """A number of the paper: where it stands, what it measures, and under which settings."""

    table: str
    conf: str
    method: str
    own: tuple[tuple[str, Any], ...]
    metric: str
    number: float

    def differences(self, settings: Mapping[str, Any]) -> list[str]:
        """In which settings a run differs from the paper's, in words."""
        wanted = _settings(self.conf, self.method, self.own)
        open_keys = {*OPEN, "rounds"} - {"tokens_per_parameter"} if wanted["tokens_per_parameter"] else set(OPEN)
        return [
            f"{key} = {show(settings.get(key))}, not {show(value)}"
            for key, value in wanted.items()
            if key not in open_keys and settings.get(key) != value
        ]


def against_paper(comparison: Comparison) -> list[Block]:
    """A table of ours beside theirs where the condition is the same, and why it is not elsewhere."""
    rows, elsewhere = [], dict[str, list[str]]()
    for (row, column), runs in comparison.cells.items():
        found = [values_for(run) for run in runs]
        values, reason = found[0] if all(each == found[0] for each in found) else ([], "its runs differ in what counts")
        if reason:
            elsewhere.setdefault(reason, []).append(f"{row.label} ({column.label})")
        for value in values:
            key, scale = METRICS[value.metric]
            ours = [scale * run.final[key] for run in runs if run.final and run.final.get(key) is not None]
            if ours:
                mean = statistics.fmean(ours)
                spread = f" ± {statistics.stdev(ours):.2f}" if len(ours) > 1 else ""
                seeds = f"{len(ours)} seeds" if len(ours) > 1 else "1 seed"
                seeds += f" of {len(runs)}" if len(ours) < len(runs) else ""
                difference = f"{mean - value.number:+.2f}"
                rows.append(
                    [value.table, column.label, row.label, value.metric, f"{mean:.2f}{spread}, {seeds}",
                     f"{value.number:g}", difference]
                )  # fmt: skip
    header = ["table", "condition", "method", "metric", "here", "paper", "difference"]
    blocks: list[Block] = [Heading("Beside the paper")]
    if rows:
        blocks.append(Table(header, rows))
    else:
        blocks.append(Paragraph("None of these runs was made under the conditions of one of the paper's numbers."))
    for reason, cells in elsewhere.items():
        which = "all" if len(cells) == len(comparison.cells) else "; ".join(cells)
        blocks.append(Paragraph(f"Not compared, since {reason}: {which}."))
    return blocks


def values_for(run: Run) -> tuple[list[Value], str | None]:
    """The paper's numbers for a run, or why there are none."""
    s = run.effective
    near = [value for value in _values() if _same_kind(value, s)]
    if not near:
        return [], f"the paper has nothing on {s['task']} with {s['model']}"
    near = [value for value in near if value.method == s["method"]]
    if not near:
        return [], f"the paper has no {s['method']} on {s['task']} with {s['model']}"
    differences = {value: value.differences(s) for value in near}
    if same := [value for value, differing in differences.items() if not differing]:
        return same, None
    fewest = min(differences.values(), key=len)
    more = f" and {len(fewest) - MAX_DIFFERENCES} more" if len(fewest) > MAX_DIFFERENCES else ""
    return [], f"{'; '.join(fewest[:MAX_DIFFERENCES])}{more}"


def _same_kind(value: Value, settings: Mapping[str, Any]) -> bool:
    wanted = _settings(value.conf, value.method, value.own)
    return all(settings[key] == wanted[key] for key in ("task", "model"))


@cache
def _settings(conf: str, method: str, own: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    settings = dump(parse(read_defaults() | read_file(CONF / f"{conf}.toml") | {"method": method} | dict(own)))
    return effective(settings)


@cache
def _values() -> tuple[Value, ...]:
    return tuple(_read(json.loads(RESULTS.read_text())))


def _read(tables: Mapping[str, Any]) -> Iterator[Value]:
    for name in ("table_1", "table_3", "table_10"):
        for row, numbers in tables[name]["rows"].items():
            for column, number in zip(tables[name]["columns"], numbers, strict=True):
                *named, alpha = column.split("/")
                model, task = {"table_1": named, "table_3": [*named, "CIFAR-100"], "table_10": ["ResNet-18", *named]}[
                    name
                ]
                yield Value(name, _vision(model, task, alpha), METHODS[row], (), "accuracy %", number)
    four = tables["table_4"]
    for alpha, by_tau in four["rows"].items():
        for tau, by_model in by_tau.items():
            for model, numbers in by_model.items():
                for gamma, number in zip(four["gamma"], numbers, strict=True):
                    own = (("tau", float(tau)), ("gamma", float(gamma)))
                    yield Value("table_4", _vision(model, "CIFAR-100", alpha), "fedact", own, "accuracy %", number)
    nine = tables["table_9"]
    for row, numbers in nine["rows"].items():
        model, alpha = row.split("/")
        for rho, number in zip(nine["rho"], numbers, strict=True):
            conf = _vision(model, "CIFAR-100", alpha)
            yield Value("table_9", conf, "fedact", (("rho", float(rho)),), "accuracy %", number)
    for name, confs in (
        ("table_2", {f"Llama2-{size.upper()}": f"pretrain-llama_{size}" for size in ("60m", "130m", "250m")}),
        ("table_11", {"Alpaca-GPT4 SFT": "fedit", "HH-RLHF DPO": "fedva"}),
    ):
        for row, numbers in tables[name]["rows"].items():
            for column, number in zip(tables[name]["columns"], numbers, strict=True):
                if row in METHODS and number is not None:
                    what, metric = column.split("/", 1)
                    yield Value(name, confs[what], METHODS[row], (), metric, number)


def _vision(model: str, task: str, alpha: str) -> str:
    return f"{NAMES[model]}-{NAMES[task]}-{alpha.lower().replace('-', '')}"
