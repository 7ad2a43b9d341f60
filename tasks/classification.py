"""Loss and metrics that classification tasks share."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.task import Examples

EVALUATION_BATCH = 512


def cross_entropy(model: nn.Module, batch: Examples) -> Tensor:
    """Mean cross-entropy of a batch {"image", "label"}."""
    return F.cross_entropy(model(batch["image"]), batch["label"])


@torch.no_grad()
def loss_and_accuracy(
    model: nn.Module, examples: Examples, prepare: Callable[[Tensor], Tensor] = lambda images: images
) -> dict[str, float]:
    """Mean cross-entropy (nats) and top-1 accuracy, in [0, 1]; ``prepare`` makes a batch's images the model's input."""
    model.eval()
    n = len(examples["label"])
    loss = correct = 0.0
    for start in range(0, n, EVALUATION_BATCH):
        label = examples["label"][start : start + EVALUATION_BATCH]
        logits = model(prepare(examples["image"][start : start + EVALUATION_BATCH]))
        loss += F.cross_entropy(logits, label, reduction="sum").item()
        correct += (logits.argmax(1) == label).sum().item()
    return {"loss": loss / n, "accuracy": correct / n}
