"""What the language tasks share: rows by name, a tokenizer, and models that Transformers can load again."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tasks.hub import load_pretrained
from tasks.task import BadData, Examples, Task, TaskSettings
from tasks.text import TextSpec, load_rows, require_text

MODEL_FOLDER = "model"
EVALUATED_TOKENS = 8192  # in the model at once
SETTINGS_USED = (
    "data", "max_train_rows", "max_test_rows", "partition_column", "tokenizer", "max_length", "gradient_checkpointing",
)  # fmt: skip


class LanguageTask(Task):
    """A causal language model on rows of text.

    Ids are int32 and padded at the end to the longest example of a client; what a batch does not need of that is cut
    off before the model sees it. What stands behind an example's length is never looked at, so any id pads.
    """

    spec: ClassVar[TextSpec]
    columns: ClassVar[Sequence[str]]
    default_length: ClassVar[int]  # what max_length = "auto" stands for, in tokens
    target = "perplexity"
    higher_is_better = False
    requires: Sequence[str] = ("transformers",)
    settings_used: Sequence[str] = SETTINGS_USED

    settings: TaskSettings  # set by `configured`

    def configured(self, settings: TaskSettings) -> Self:
        task = copy(self)
        task.settings = settings
        return task

    def check(self, train: bool = True, test: bool = True) -> None:
        for wanted, is_train in ((train, True), (test, False)):
            if wanted:
                require_text(self.rows(is_train), self.columns, self.source)
        super().check(train, test)

    @property
    def source(self) -> str:
        return self.spec.hub if self.settings.data == "auto" else self.settings.data

    @property
    def max_length(self) -> int:
        return self.settings.max_length or self.default_length

    @property
    @abstractmethod
    def tokenizer_name(self) -> str:
        """A folder or a name on the hub."""

    @property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.tokenizer_name)

    def rows(self, train: bool) -> Any:
        most = self.settings.max_train_rows if train else self.settings.max_test_rows
        return load_rows(self.spec, self.settings.data, train, most)

    def train_labels(self) -> NDArray:
        """The rows' values of ``partition_column`` by number, in the order of the alphabet; without one all are 0."""
        rows, column = self.rows(train=True), self.settings.partition_column
        if not column:
            return np.zeros(len(rows), np.int64)
        if column not in rows.column_names:
            there = ", ".join(rows.column_names)
            raise BadData(f"{self.source} has no such column; it has {there}", "partition_column")
        return np.unique(np.array([str(value) for value in rows[column]]), return_inverse=True)[1].astype(np.int64)

    def train_examples(self, indices: NDArray) -> Examples:
        return self.tokenised(self.rows(train=True).select(indices))

    def test_examples(self) -> Examples:
        return self.tokenised(self.rows(train=False))

    @abstractmethod
    def tokenised(self, rows: Any) -> Examples:
        """The examples that rows give. Raises `BadData` where they give none."""

    def prompt(self, text: str) -> str:
        """What the model reads when a user says ``text``."""
        return text

    def save(self, model: nn.Module, folder: Path) -> None:
        """As Transformers, or of an adapter PEFT, writes it, with the tokenizer."""
        assert callable(model.save_pretrained)
        model.save_pretrained(str(folder / MODEL_FOLDER))
        self.tokenizer.save_pretrained(str(folder / MODEL_FOLDER))


@lru_cache(maxsize=2)
def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder or of the hub. Raises `BadData`."""
    from transformers import AutoTokenizer

    tokenizer = load_pretrained(AutoTokenizer, name, "tokenizer")
    if tokenizer.eos_token_id is None:
        raise BadData(f"the tokenizer of {name} has no end-of-sequence token", "tokenizer")
    return tokenizer


def next_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of each token but the first, shape (n, length - 1, vocabulary), float32, of ids of shape (n, length).

    Padding at the end needs no mask: no token looks ahead.
    """
    return model(input_ids=ids[:, :-1].long(), use_cache=False).logits.float()


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """The negative log-likelihood (nats) of each token but the first, shape (n, length - 1)."""
    targets = ids[:, 1:].long()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids of shape (n, longest), int32, padded with 0 at the end."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = torch.tensor(row, dtype=torch.int32)
    return ids


def slices(examples: Mapping[str, Tensor], tokens: int) -> Sequence[Mapping[str, Tensor]]:
    """The examples in parts small enough to evaluate, of ``tokens`` tokens each example."""
    n, size = len(next(iter(examples.values()))), max(1, EVALUATED_TOKENS // tokens)
    return [{k: v[start : start + size] for k, v in examples.items()} for start in range(0, n, size)]
