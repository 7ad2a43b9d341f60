"""FedIT: instruction tuning of a pretrained language model with LoRA."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tasks.adapter import AdapterTask, log, response_examples, response_losses
from tasks.language import slices
from tasks.task import ANY_MODEL, BadData, Defaults, Examples
from tasks.text import TextSpec

# Stanford Alpaca's prompts (Taori et al. 2023)
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


class InstructionTuning(AdapterTask):
    """The response to an instruction, in Alpaca's template; the loss is on the response and its end token alone.

    A response is cut at its end where prompt and response are longer than ``max_length``; an example of which nothing
    is left of the response is dropped. Both are counted in the log.
    """

    summary = "FedIT: a pretrained causal model with LoRA on instructions (Alpaca-GPT4)"
    spec = TextSpec("vicgalle/alpaca-gpt4")
    columns = ("instruction", "input", "output")
    models: Sequence[str] = ("meta-llama/Llama-2-7b-hf", ANY_MODEL)
    defaults: Mapping[str, Defaults] = {  # the paper's
        "adamw": {"lr": 5e-5, "weight_decay": 0.01},
        "adam": {"lr": 5e-5, "weight_decay": 0.001},
        "sgd": {"lr": 5e-5, "weight_decay": 0.001},
        "fedlada": {"lr": 5e-5, "weight_decay": 0.001},
        "fedadam": {"server_lr": 1e-3},
    }
    r, alpha = 32, 64

    def texts(self, row: Mapping[str, Any]) -> tuple[str, str]:
        template = WITH_INPUT if row["input"] else WITHOUT_INPUT
        return template.format(instruction=row["instruction"], input=row["input"]), row["output"]

    def prompt(self, text: str) -> str:
        return WITHOUT_INPUT.format(instruction=text)

    def tokenised(self, rows: Any) -> Examples:
        most = self.max_length
        pairs = self.encoded(*zip(*self.all_texts(rows), strict=True))
        kept = [(prompt, ids[:most]) for prompt, ids in pairs if prompt < most]
        cut = sum(prompt < most < len(ids) for prompt, ids in pairs)
        if cut or len(kept) < len(pairs):
            log.warning(
                "%d of %d responses cut to max_length = %d tokens, %d examples dropped, of whose nothing was left",
                cut, len(pairs), most, len(pairs) - len(kept),
            )  # fmt: skip
        if not kept:
            raise BadData(f"{self.source}: no prompt of {len(pairs)} is that short", "max_length")
        return response_examples(kept)

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        losses, response, _ = response_losses(model, batch)
        return losses.sum() / response.sum()

    def terms(self, batch: Examples) -> int:
        return int((batch["length"] - batch["prompt"]).sum())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Per response token: loss (nats), its exponential, and top-1 accuracy; ``response_nll`` is per response.

        ``response_nll`` averages over responses what each has per token; so the paper's numbers, which are near the
        loss, seem to be meant.
        """
        model.eval()
        nll = correct = tokens = per_response = 0.0
        for part in slices(examples, examples["ids"].shape[1]):
            losses, response, logits = response_losses(model, part)
            expected = logits.argmax(2) == part["ids"][:, 1 : 1 + losses.shape[1]]
            nll += losses.double().sum().item()
            per_response += (losses.double().sum(1) / response.sum(1)).sum().item()
            correct += (expected & response).sum().item()
            tokens += response.sum().item()
        loss = nll / tokens
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "token_accuracy": correct / tokens,
            "response_nll": per_response / len(examples["length"]),
        }
