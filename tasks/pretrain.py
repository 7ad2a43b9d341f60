"""Pre-training of Llama-shaped models from scratch on packed text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tasks.language import LanguageTask, next_logits, slices, token_losses
from tasks.task import BadData, Defaults, Examples
from tasks.text import TextSpec

DOCUMENTS_AT_ONCE = 1000

# hidden size, feed-forward size, heads, layers; vocabulary and length come from the tokenizer and max_length
LLAMA_SHAPES = {
    "llama_60m": (512, 1376, 8, 8),
    "llama_130m": (768, 2048, 12, 12),
    "llama_250m": (768, 2560, 16, 24),
    "llama_5m": (256, 688, 4, 4),  # for a laptop: that many with a vocabulary of 4,000
}


# Of Llama 2's tokenizer, tokenizer = "auto": a model is made, and its parameters are counted, without it.
LLAMA_2_TOKENS = {"vocab_size": 32_000, "bos_token_id": 1, "eos_token_id": 2}


class PretrainC4(LanguageTask):
    """The next token of C4's English text, or of any other documents.

    An example is a sequence of ``max_length`` tokens: a client's documents one after another, each between the
    tokenizer's begin and end tokens, cut into pieces; what is left at the end is dropped. Attention sees across
    documents in a sequence. Examples are {"input_ids": int32 (n, max_length)}.
    """

    summary = "next token of C4 (English) or of local text; a Llama 2 shape from scratch"
    spec = TextSpec("allenai/c4", ("en",), "validation", streams=True)
    columns = ("text",)
    default_length = 1024
    models: Sequence[str] = tuple(LLAMA_SHAPES)
    defaults: Mapping[str, Defaults] = {  # the paper's
        "adamw": {"lr": 3e-4, "weight_decay": 0.01, "beta2": 0.99},
        "adam": {"lr": 3e-4, "weight_decay": 0.001, "beta2": 0.99},
        "sgd": {"lr": 0.1, "weight_decay": 0.001},
        "fedlada": {"lr": 3e-3, "weight_decay": 0.0, "beta2": 0.99},
    }

    @property
    def tokenizer_name(self) -> str:
        return "hf-internal-testing/llama-tokenizer" if self.settings.tokenizer == "auto" else self.settings.tokenizer

    def check(self, train: bool = True, test: bool = True) -> None:
        for wanted, key in ((train, "max_train_rows"), (test, "max_test_rows")):
            if wanted and self.settings.data == "auto" and getattr(self.settings, key) == 0:
                raise BadData("C4 has 365 million documents; set how many to read", key)
        super().check(train, test)

    def tokenised(self, rows: Any) -> Examples:
        tokenizer = self.tokenizer
        end = [tokenizer.eos_token_id]
        begin = [] if tokenizer.bos_token_id in (None, *end) else [tokenizer.bos_token_id]
        pieces = []
        for batch in rows.iter(DOCUMENTS_AT_ONCE):
            documents = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
            pieces += [np.array([*begin, *document, *end], np.int32) for document in documents]
        ids = np.concatenate(pieces)
        n = len(ids) // self.max_length
        if n == 0:
            raise BadData(
                f"{self.source}: {len(rows)} documents have {len(ids)} tokens, fewer than one example", "max_length"
            )
        return {"input_ids": torch.from_numpy(ids[: n * self.max_length]).view(n, self.max_length)}

    def make_model(self, seed: int) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        hidden, feed_forward, heads, layers = LLAMA_SHAPES[self.settings.model]
        config = LlamaConfig(
            **self._tokens(),
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_attention_heads=heads,
            num_hidden_layers=layers,
            max_position_embeddings=self.max_length,
            tie_word_embeddings=False,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
        if self.settings.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    @property
    def parameters(self) -> int:
        """How many a model has, known without one and without Transformers."""
        hidden, feed_forward, _, layers = LLAMA_SHAPES[self.settings.model]
        layer = 4 * hidden**2 + 3 * hidden * feed_forward + 2 * hidden
        return layers * layer + hidden + 2 * hidden * self._tokens()["vocab_size"]

    def _tokens(self) -> Mapping[str, Any]:
        if self.settings.tokenizer == "auto":
            return LLAMA_2_TOKENS
        tokenizer = self.tokenizer
        return {
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        return self._losses(model, batch).mean()

    def _losses(self, model: nn.Module, batch: Examples) -> Tensor:
        return token_losses(next_logits(model, batch["input_ids"]), batch["input_ids"])

    @torch.no_grad()
    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Mean loss (nats per token), and perplexity, its exponential."""
        model.eval()
        losses = [self._losses(model, part).mean(1).double() for part in slices(examples, self.max_length)]
        loss = torch.cat(losses).mean().item()
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
