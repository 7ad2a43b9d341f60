"""The client half of methods whose clients have models of their own.

A client's own model is x + Delta_i, with x the newest global one: Delta_i is of all parameters, or, in FedPer, of some
layers. Ditto's own models are whole ones. In local_only, FedPer and Ditto its buffers are its own, too.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from clients.local_optimizers import chosen_optimizer, proximal_optimizer
from clients.local_round import Finished, LocalRound
from clients.pflalign import SHRINKAGE, AlignedSGD
from clients.settings import LocalSettings
from strategies import wire

BUFFERS = "buffers"  # in what a client keeps: its own, beside what it keeps of the parameters
PERSONAL = "personal"  # likewise: Ditto's model v_i


def personal_layers(settings: LocalSettings, names: Collection[str]) -> list[str]:
    """The layers that the setting ``personal_layers`` names, of a model whose trainable parameters have these names.

    "auto" is the last one's: its module, of an adapter the module that it adapts, or itself where it is in none.
    """
    last = list(names)[-1]
    auto = last.partition(".lora_")[0] if ".lora_" in last else last.rpartition(".")[0] or last
    layers = [layer.strip() for layer in settings.personal_layers.split(",")]
    return [auto if layer == "auto" else layer for layer in layers]


def is_in(name: str, layers: Collection[str]) -> bool:
    """Whether a parameter or buffer is one of these layers, or below one."""
    return any(f"{name}.".startswith(f"{layer}.") for layer in layers)


@torch.no_grad()
def take_up(local: LocalRound) -> None:
    """From x to x + Delta_i."""
    torch._foreach_add_(list(local.own.values()), local.kept[wire.DELTA])
    if local.folded and BUFFERS in local.kept:
        _assign(local.buffers.values(), local.kept[BUFFERS])


def own_layers(local: LocalRound) -> Optimizer:
    """All parameters train, from x^r + Delta_i."""
    take_up(local)
    return chosen_optimizer(local)


@torch.no_grad()
def keep_own_layers(local: LocalRound, optimizer: Optimizer) -> Finished:
    """Delta_i <- x_K - x^r of its own layers, which return as they came: what is a client's own stays with it."""
    x = local.received(wire.MODEL, local.own)
    kept = {
        wire.DELTA: [p - x_p for p, x_p in zip(local.own.values(), x, strict=True)],
        BUFFERS: [b.clone() for b in local.buffers.values()],
    }
    _assign(local.own.values(), x)
    _assign(local.buffers.values(), local.received(wire.MODEL, local.buffers))
    return Finished(kept=kept)


@torch.no_grad()
def take_up_ditto(local: LocalRound) -> None:
    """To v_i; a client that has none yet begins with the global model."""
    if local.folded:
        _assign(local.trainable.values(), local.kept[PERSONAL])
        _assign(local.buffers.values(), local.kept[BUFFERS])


@torch.no_grad()
def finish_ditto(local: LocalRound, optimizer: Optimizer) -> Finished:
    """K more steps, of v_i and with mu (v_i - x^r) in the gradient, while the global model's x_K waits."""
    tensors = [*local.trainable.values(), *local.buffers.values()]
    shared = [t.detach().clone() for t in tensors]
    _assign(tensors, local.received(wire.MODEL, {**local.trainable, **local.buffers}))
    take_up_ditto(local)
    with torch.enable_grad():
        local.train(proximal_optimizer(local))
    own = [t.detach().clone() for t in tensors]
    _assign(tensors, shared)
    n = len(local.trainable)
    return Finished(kept={PERSONAL: own[:n], BUFFERS: own[n:]})


def pflalign(local: LocalRound) -> AlignedSGD:
    """x starts at x^r + Delta. The client's delta is still taken from x^r, so it is the next Delta."""
    s = local.settings
    take_up(local)
    return AlignedSGD(
        local.parameters,
        local.lr,
        s.beta1,
        s.align_eps,
        s.weight_decay,
        local.steps,
        delta=local.kept[wire.DELTA],
        second_moment=local.kept[wire.SECOND_MOMENT],
        shrinkage=local.kept[SHRINKAGE],
        shrink=s.shrinkage == "on",
        realign=s.realign,
    )


def finish_pflalign(local: LocalRound, optimizer: Optimizer) -> Finished:
    """Delta <- x_K - x^r, or 0 as it was; v and P go on."""
    assert isinstance(optimizer, AlignedSGD)
    moments = {wire.SECOND_MOMENT: optimizer.second_moments(), SHRINKAGE: optimizer.shrinkages()}
    return Finished(kept={wire.DELTA: next_delta(local), **moments})


def next_delta(local: LocalRound) -> Sequence[Tensor]:
    """x_K - x^r, or where ``personal_delta`` is off the 0 that it was."""
    if not local.settings.personal_delta:
        return local.kept[wire.DELTA]
    return torch._foreach_sub([p.detach() for p in local.parameters], local.received(wire.MODEL))


def _assign(tensors: Collection[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
