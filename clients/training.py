"""The one local training loop."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tasks.task import Examples

Loss = Callable[[nn.Module, Examples], Tensor]


WHAT_HELPS = "; a lower lr, or clip_norm, may help"


class NonFinite(RuntimeError):
    """Training has left the numbers; the message says where."""


def num_examples(examples: Examples) -> int:
    return len(next(iter(examples.values())))


def train(
    model: nn.Module,
    loss: Loss,
    batches: Iterator[Examples],
    optimizer: Optimizer,
    steps: int,
    precision: str = "float32",
    clip_norm: float = 0.0,
    micro_batch_size: int = 0,
    terms: Callable[[Examples], int] = num_examples,
) -> float:
    """Do exactly ``steps`` optimizer steps and return the mean loss over them. Raises `NonFinite` where that is none.

    ``loss`` gives the mean over a batch, which has ``terms(batch)`` terms. A ``micro_batch_size`` above 0 is the most
    examples that go through the model at once; the gradient is that of the whole batch, unless the model normalises
    over batches. With ``precision = "bfloat16"`` forward and backward run in autocast; parameters, gradients and the
    optimizer's state stay float32. A ``clip_norm`` above 0 limits the norm of the gradient before the optimizer sees
    it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    model.train()
    losses = torch.zeros(steps, device=device)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        batch = next(batches)
        parts = _micro_batches(batch, micro_batch_size)
        for part in parts:
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                value = loss(model, part)
            if len(parts) > 1:
                value = value * (terms(part) / terms(batch))
            value.backward()
            losses[step] += value.detach()
        if clip_norm > 0:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
    bad = (~losses.isfinite()).nonzero()  # looked at once: each look makes a GPU wait
    if len(bad):
        raise NonFinite(f"the loss of step {bad[0].item() + 1} of {steps} is {losses[bad[0]].item()}{WHAT_HELPS}")
    return losses.mean().item()


def batches(examples: Examples, batch_size: int, generator: torch.Generator) -> Iterator[Examples]:
    """Batches without end, all of one size: ``batch_size``, or the client's whole data if that is smaller.

    Examples come in passes over the data, each in a fresh order; a batch may span the end of a pass. The order
    depends on ``generator`` (a CPU one) alone, not on the device of the examples.
    """
    n = num_examples(examples)
    size = min(batch_size, n)
    device = next(iter(examples.values())).device
    order = torch.empty(0, dtype=torch.int64, device=device)
    while True:
        if len(order) < size:
            order = torch.cat([order, torch.randperm(n, generator=generator).to(device)])
        yield take(examples, order[:size])
        order = order[size:]


def _micro_batches(batch: Examples, size: int) -> Sequence[Examples]:
    n = num_examples(batch)
    if size == 0 or n <= size:
        return [batch]
    return [{name: tensor[start : start + size] for name, tensor in batch.items()} for start in range(0, n, size)]


def take(examples: Examples, index: Tensor) -> Examples:
    index = index.to(next(iter(examples.values())).device)
    return {name: tensor[index] for name, tensor in examples.items()}
