"""What sft and dpo share: a pretrained model with a LoRA adapter that alone trains, and responses to prompts.

LoRA: Hu et al. 2022, arXiv:2106.09685.
"""

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tasks.hub import load_pretrained
from tasks.language import SETTINGS_USED, LanguageTask, next_logits, pad, token_losses
from tasks.task import BadData, Examples, first_line

log = logging.getLogger("flwr.tasks")  # where Flower logs, so that it lands in the run's log

QUANTIZED = ("int8", "nf4")

Response = tuple[int, list[int]]  # how many of the ids are the prompt's, and all of them


class AdapterTask(LanguageTask):
    """Responses of a pretrained model with an adapter.

    A response has three tensors: ids, int32 (n, longest), how many of them are the prompt's, and how many there are,
    int64 (n,) each.
    """

    r: ClassVar[int]  # what "auto" stands for
    alpha: ClassVar[int]
    default_length = 512
    requires: Sequence[str] = ("transformers", "peft")
    settings_used: Sequence[str] = (
        *SETTINGS_USED, "base_precision", "lora_r", "lora_alpha", "lora_dropout", "lora_targets",
    )  # fmt: skip

    @property
    def tokenizer_name(self) -> str:
        return self.settings.model if self.settings.tokenizer == "auto" else self.settings.tokenizer

    @abstractmethod
    def texts(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Prompt, in the task's template, and responses of a row. Raises KeyError or TypeError for another form."""

    def check(self, train: bool = True, test: bool = True) -> None:
        if self.settings.base_precision in QUANTIZED and find_spec("bitsandbytes") is None:
            raise BadData(
                "it needs the package bitsandbytes, which is not installed; allowed are 'float32', 'bfloat16'",
                "base_precision",
            )
        check_base(self.settings.model, self.settings.lora_targets, len(self.tokenizer))
        super().check(train, test)
        for wanted, is_train, which in ((train, True, "training"), (test, False, "held-out")):
            if wanted:
                self.all_texts(self.rows(is_train), which)

    def all_texts(self, rows: Any, which: str = "") -> list[tuple[str, ...]]:
        """`texts` of each row. Raises `BadData` where there are none, or a response is empty."""
        texts = []
        for number, row in enumerate(rows):
            try:
                texts.append(self.texts(row))
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise BadData(f"{self.source}: {which} row {number} has another form: {first_line(error)}") from error
            if not all(response.strip() for response in texts[-1][1:]):
                raise BadData(f"{self.source}: a response of {which} row {number} is empty")
        return texts

    def encoded(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Response]:
        """Ids of prompts with their responses and the end token.

        They are tokenised together, since tokenizers may begin a text in another way than they continue one; what both
        begin with is the prompt.
        """
        tokenizer = self.tokenizer
        together = tokenizer([p + r for p, r in zip(prompts, responses, strict=True)])["input_ids"]
        encoded = []
        for prompt, ids in zip(tokenizer(list(prompts))["input_ids"], together, strict=True):
            same = (i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b)
            encoded.append((next(same, min(len(prompt), len(ids))), [*ids, tokenizer.eos_token_id]))
        return encoded

    def make_model(self, seed: int) -> nn.Module:
        """The model with its adapter initialised by ``seed``: A at random, B = 0, so it starts as the base model.

        The base is loaded once per process: this is one object for all calls with the same settings.
        """
        s = self.settings
        model = _adapted(
            s.model, s.base_precision, s.lora_targets, s.lora_r or self.r, s.lora_alpha or self.alpha, s.lora_dropout,
            s.gradient_checkpointing,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_A" in name:  # as PEFT does, but drawn on the CPU wherever the model is by now
                    bound = parameter.shape[1] ** -0.5
                    parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
                elif "lora_B" in name:
                    parameter.zero_()
        return model


def response_examples(responses: Sequence[Response], prefix: str = "") -> Examples:
    """The three tensors of responses, by name."""
    return {
        f"{prefix}ids": pad([ids for _, ids in responses]),
        f"{prefix}prompt": torch.tensor([prompt for prompt, _ in responses]),
        f"{prefix}length": torch.tensor([len(ids) for _, ids in responses]),
    }


def response_losses(model: nn.Module, batch: Examples, prefix: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """Losses of the tokens (0 outside of responses), which are of responses, and the logits: (n, length - 1, ...)."""
    length = batch[f"{prefix}length"]
    ids = batch[f"{prefix}ids"][:, : int(length.max())]
    logits = next_logits(model, ids)
    position = torch.arange(1, ids.shape[1], device=ids.device)
    response = (position >= batch[f"{prefix}prompt"][:, None]) & (position < length[:, None])
    return token_losses(logits, ids) * response, response, logits


def check_base(name: str, targets: str, vocabulary: int) -> None:
    """Raise `BadData` where the model can't be had, lacks a target module, or embeds fewer tokens than there are.

    Reads its configuration alone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    config = load_pretrained(AutoConfig, name, "model")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise BadData(f"{name} is no causal language model: {first_line(error)}", "model") from error
    layers = {path for path, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    there = sorted({path.rpartition(".")[2] for path in layers})
    if missing := [target for target in targets.split(",") if target not in there]:
        raise BadData(f"{name} has no {missing[0]}; it has {', '.join(there)}", "lora_targets")
    embedded = model.get_input_embeddings().num_embeddings
    if vocabulary > embedded:
        raise BadData(f"the tokenizer has {vocabulary} tokens, and {name} embeds {embedded}", "tokenizer")


def load_model(name: str, precision: str) -> Any:
    """A causal language model, or one with its adapter, on the CPU; of an adapter, the base is in ``precision``.

    Of "int8" (Dettmers et al. 2022, arXiv:2208.07339) and "nf4" (with double quantisation, Dettmers et al. 2023,
    arXiv:2305.14314) the linear layers but the last are quantised, and what is left is bfloat16. Raises `BadData`.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if precision not in QUANTIZED:
        return load_pretrained(AutoModelForCausalLM, name, "model", dtype=getattr(torch, precision))

    # each int8 layer would say each time that it computes in float16
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    quantization = BitsAndBytesConfig(
        load_in_8bit=precision == "int8",
        load_in_4bit=precision == "nf4",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    options = {"dtype": torch.bfloat16, "quantization_config": quantization, "device_map": {"": "cpu"}}
    model = load_pretrained(AutoModelForCausalLM, name, "model", **options)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # else bitsandbytes repacks 4-bit weights at the first evaluation, and then gives no gradients any more
            module.support_avx512bf16_for_cpu = False
    return model


@lru_cache(maxsize=1)
def _adapted(
    name: str, precision: str, targets: str, r: int, alpha: int, dropout: float, gradient_checkpointing: bool
) -> Any:
    from peft import LoraConfig, get_peft_model

    if Path(name).is_dir():
        name = str(Path(name).resolve())  # the saved adapter says where its base is
    base = load_model(name, precision)
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # frozen, it is a reference, which knows no chance
    if gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    config = LoraConfig(
        r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets.split(","), task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)  # adapters stay float32 whatever the base is
