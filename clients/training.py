"""The one local training loop."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tasks.task import Examples

Loss = Callable[[nn.Module, Examples], Tensor]


def train(
    model: nn.Module,
    loss: Loss,
    batches: Iterator[Examples],
    optimizer: Optimizer,
    steps: int,
    precision: str = "float32",
    clip_norm: float = 0.0,
) -> float:
    """Do exactly ``steps`` optimizer steps and return the mean loss over them.

    ``loss`` gives the mean over a batch. With ``precision = "bfloat16"`` forward and backward run in autocast;
    parameters, gradients and the optimizer's state stay float32. A ``clip_norm`` above 0 limits the norm of the
    gradient before the optimizer sees it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    model.train()
    total = torch.zeros((), device=device)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            value = loss(model, next(batches))
        value.backward()
        if clip_norm > 0:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
        total += value.detach()
    return total.item() / steps


def batches(examples: Examples, batch_size: int, generator: torch.Generator) -> Iterator[Examples]:
    """Batches without end, all of one size: ``batch_size``, or the client's whole data if that is smaller.

    Examples come in passes over the data, each in a fresh order; a batch may span the end of a pass. The order
    depends on ``generator`` (a CPU one) alone, not on the device of the examples.
    """
    n = num_examples(examples)
    size = min(batch_size, n)
    order = torch.empty(0, dtype=torch.int64)
    while True:
        if len(order) < size:
            order = torch.cat([order, torch.randperm(n, generator=generator)])
        yield take(examples, order[:size])
        order = order[size:]


def num_examples(examples: Examples) -> int:
    return len(next(iter(examples.values())))


def take(examples: Examples, index: Tensor) -> Examples:
    return {name: tensor[index.to(tensor.device)] for name, tensor in examples.items()}
