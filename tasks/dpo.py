"""FedVA: preference tuning of a pretrained language model with LoRA by DPO: Rafailov et al. 2023, arXiv:2305.18290."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.adapter import AdapterTask, log, response_examples, response_losses
from tasks.language import slices
from tasks.task import ANY_MODEL, BadData, Defaults, Examples
from tasks.text import TextSpec

# Vicuna's template, version 1.1 (Chiang et al. 2023)
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"  # how HH-RLHF writes a dialogue
MAX_PROMPT = 128  # tokens
SIDES = ("chosen", "rejected")


class PreferenceTuning(AdapterTask):
    """Which of two responses is preferred, in Vicuna's template.

    With the adapter's model pi, the base model ref (the same one with the adapter off), a prompt's chosen response c
    and rejected response r::

        margin = beta [(log pi(c) - log ref(c)) - (log pi(r) - log ref(r))]      loss = -log sigmoid(margin)

    Examples are the tensors of both responses, with "chosen_" and "rejected_" before their names. A prompt longer than
    128 tokens loses its beginning, a response that goes beyond ``max_length`` its end; both are counted in the log.
    """

    summary = "FedVA: a pretrained causal model with LoRA on preferences (HH-RLHF), by DPO"
    spec = TextSpec("Anthropic/hh-rlhf", evaluates="test")
    columns = ()  # in one of several forms, see `texts`
    target, higher_is_better = "preference_accuracy", True
    settings_used: Sequence[str] = (*AdapterTask.settings_used, "dpo_beta")
    models: Sequence[str] = ("TheBloke/Wizard-Vicuna-7B-Uncensored-HF", ANY_MODEL)
    defaults: Mapping[str, Defaults] = {  # the paper's
        "adamw": {"lr": 5e-4, "weight_decay": 0.01},
        "adam": {"lr": 5e-4, "weight_decay": 0.001},
        "sgd": {"lr": 5e-4, "weight_decay": 0.001},
        "fedlada": {"lr": 5e-4, "weight_decay": 0.001},
        "fedadam": {"server_lr": 1e-3},
    }
    r, alpha = 8, 16

    def check(self, train: bool = True, test: bool = True) -> None:
        for wanted, is_train in ((train, True), (test, False)):
            there = self.rows(is_train).column_names if wanted else SIDES
            if missing := [side for side in SIDES if side not in there]:
                raise BadData(f"{self.source} has no column {missing[0]}; it has {', '.join(there)}")
        super().check(train, test)

    def texts(self, row: Mapping[str, Any]) -> tuple[str, str, str]:
        """From a row in one of these forms.

        HH-RLHF's two dialogues that differ in the last turn, as text or as messages {"role", "content"}; "prompt"
        beside two responses; "conversations" beside them, as turns {"from", "value"}.
        """
        if "conversations" in row:
            turns = [(turn["from"] in ("human", "user"), turn["value"]) for turn in row["conversations"]]
            chosen, rejected = (row[side]["value"] for side in SIDES)
        elif "prompt" in row and isinstance(row["chosen"], str):
            turns, chosen, rejected = [(True, row["prompt"])], row["chosen"], row["rejected"]
        elif isinstance(row["chosen"], list):
            turns = [(message["role"] == "user", message["content"]) for message in row["chosen"][:-1]]
            chosen, rejected = (row[side][-1]["content"] for side in SIDES)
        else:
            history, _, chosen = row["chosen"].rpartition(ASSISTANT)
            rejected = row["rejected"].rpartition(ASSISTANT)[2]
            turns = []
            for part in history.split(HUMAN)[1:]:
                question, *answers = part.split(ASSISTANT)
                turns += [(True, question), *((False, answer) for answer in answers)]
        end = self.tokenizer.eos_token
        said = (f"USER: {text.strip()} " if human else f"ASSISTANT: {text.strip()}{end}" for human, text in turns)
        return f"{SYSTEM} {''.join(said)}ASSISTANT:", f" {chosen.strip()}", f" {rejected.strip()}"

    def prompt(self, text: str) -> str:
        return f"{SYSTEM} USER: {text} ASSISTANT:"

    def tokenised(self, rows: Any) -> Examples:
        prompts, *responses = zip(*self.all_texts(rows), strict=True)
        most = min(MAX_PROMPT, self.max_length - 1)
        examples: dict[str, Tensor] = {}
        long = cut = 0
        for side, texts in zip(SIDES, responses, strict=True):
            kept = []
            for prompt, ids in self.encoded(prompts, texts):
                ids = ids[max(0, prompt - most) :]
                kept.append((min(prompt, most), ids[: self.max_length]))
                long += prompt > most
                cut += len(ids) > self.max_length
            examples |= response_examples(kept, f"{side}_")
        if long or cut:
            log.warning(
                "of %d responses %d have prompts cut to their last %d tokens, %d are cut to max_length = %d in all",
                2 * len(prompts), long, most, cut, self.max_length,
            )  # fmt: skip
        return examples

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        margin, _ = self._margins(model, batch)
        return -F.logsigmoid(margin).mean()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Means over pairs: loss, how often the margin is above 0, the margin, and the policy gap.

        The policy gap is log pi(c) - log pi(r), in nats.
        """
        model.eval()
        longest = max(examples[f"{side}_ids"].shape[1] for side in SIDES)
        results = [self._margins(model, part) for part in slices(examples, 2 * longest)]
        margin, gap = (torch.cat(parts).double() for parts in zip(*results, strict=True))
        return {
            "loss": -F.logsigmoid(margin).mean().item(),
            "preference_accuracy": (margin > 0).double().mean().item(),
            "reward_margin": margin.mean().item(),
            "policy_gap": gap.mean().item(),
        }

    def _margins(self, model: nn.Module, batch: Examples) -> tuple[Tensor, Tensor]:
        """Reward margin and policy gap of each pair, shape (n,)."""
        gap = _gap(model, batch)
        assert callable(model.disable_adapter)
        with torch.no_grad(), model.disable_adapter():
            reference = _gap(model, batch)
        return self.settings.dpo_beta * (gap - reference), gap.detach()


def _gap(model: nn.Module, batch: Examples) -> Tensor:
    """log pi of the chosen less that of the rejected response, shape (n,), in nats."""
    chosen, rejected = (response_losses(model, batch, f"{side}_")[0].sum(1) for side in SIDES)
    return rejected - chosen
