"""The client half of every method: its local optimizer, and what it returns beside the model's delta."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from clients.blocks import block_means, from_block_means
from clients.fadamgc import TrackingAdamW
from clients.fedact_align import RealignedActAdamW
from clients.fedlada import AmendedAMSGrad
from clients.local_optimizers import (
    ADAM_SETTINGS,
    LOCAL_OPTIMIZERS,
    act_adamw,
    adam,
    adamw,
    chosen_optimizer,
    proximal_optimizer,
)
from clients.local_round import Finished, LocalRound
from clients.optimizers import ActAdamW, stability_note
from clients.personal import (
    BUFFERS,
    PERSONAL,
    finish_ditto,
    finish_pflalign,
    keep_own_layers,
    next_delta,
    own_layers,
    personal_layers,
    pflalign,
    take_up,
    take_up_ditto,
)
from clients.pflalign import SHRINKAGE
from clients.settings import LocalSettings
from strategies import wire
from tasks.task import Family


@dataclass(frozen=True)
class ClientMethod:
    """One method on the client.

    Attributes
    ----------
    local_step : str
        What a step does, in one line for people.
    make_optimizer : callable
        The optimizer of one round.
    family : {"adamw", "adam", "sgd"}
        The family of its local optimizer: which of a task's learning rates and weight decays is the default.
    settings : tuple of str
        The settings that it reads and not every method has.
    local_optimizer : str, optional
        For methods that run on any of `LOCAL_OPTIMIZERS`: the one that ``local_optimizer = "auto"`` stands for.
        Its family and settings are then those of the one chosen.
    keeps : tuple of str
        What it keeps on the client between rounds, each shaped like the parameters (`clients.personal.BUFFERS`: like
        the buffers) and 0 at first.
    layers : callable, optional
        Of which layers, given the names of the trainable parameters; by default of all.
    take_up : callable, optional
        For methods whose clients have models of their own: makes that of the global one, in place.
    finish : callable
        After the round, from it and its optimizer: what goes to the server beside the delta, and what is kept.
    note : callable
        What people should know about these settings before a run, or None.
    """

    local_step: str
    make_optimizer: Callable[[LocalRound], Optimizer]
    family: Family = "adamw"
    settings: tuple[str, ...] = ()
    local_optimizer: str | None = None
    keeps: tuple[str, ...] = ()
    layers: Callable[[LocalSettings, Collection[str]], list[str]] | None = None
    take_up: Callable[[LocalRound], None] | None = None
    finish: Callable[[LocalRound, Optimizer], Finished] = lambda local, optimizer: Finished()
    note: Callable[[LocalSettings], str | None] = lambda settings: None

    def family_with(self, local_optimizer: str) -> Family:
        """The family where the setting ``local_optimizer`` is as given; "auto" and methods that have none included."""
        name = self._optimizer_name(local_optimizer)
        return LOCAL_OPTIMIZERS[name].family if name else self.family

    def settings_with(self, local_optimizer: str) -> tuple[str, ...]:
        """The settings, likewise."""
        name = self._optimizer_name(local_optimizer)
        return (*self.settings, "local_optimizer", *LOCAL_OPTIMIZERS[name].settings) if name else self.settings

    def _optimizer_name(self, local_optimizer: str) -> str | None:
        return local_optimizer if self.local_optimizer and local_optimizer != "auto" else self.local_optimizer


def scaffold(local: LocalRound) -> Optimizer:
    """Each step is followed by x <- x - eta (c - c_i): with plain SGD the same as a gradient g + c - c_i.

    Also for parameters without a gradient, whose g is 0: else their c_i, which takes x's way for granted, would drift.
    """
    optimizer = chosen_optimizer(local)
    c, c_i = local.received(wire.CONTROL), local.kept[wire.CONTROL]
    shift = torch._foreach_sub(c, c_i)

    @torch.no_grad()
    def correct(*_: object) -> None:
        torch._foreach_sub_(local.parameters, shift, alpha=local.lr)

    optimizer.register_step_post_hook(correct)
    return optimizer


def finish_scaffold(local: LocalRound, optimizer: Optimizer) -> Finished:
    """c_i <- c_i - c + (x^r - x_K) / (K eta), option II of the paper's Algorithm 1."""
    moved = torch._foreach_sub(local.received(wire.MODEL), [p.detach() for p in local.parameters])
    torch._foreach_div_(moved, local.steps * local.lr)
    change = torch._foreach_sub(moved, local.received(wire.CONTROL))
    return _changed_control(local, change)


def fadamgc(local: LocalRound) -> TrackingAdamW:
    s = local.settings
    y, y_i = local.received(wire.CONTROL), local.kept[wire.CONTROL]
    shift = torch._foreach_sub(y, y_i)
    return TrackingAdamW(local.parameters, local.lr, (s.beta1, s.beta2), s.eps, s.weight_decay, shift=shift)


def finish_fadamgc(local: LocalRound, optimizer: Optimizer) -> Finished:
    """y_i <- the mean gradient of the round."""
    assert isinstance(optimizer, TrackingAdamW)
    return _changed_control(local, torch._foreach_sub(optimizer.mean_gradients(), local.kept[wire.CONTROL]))


def _changed_control(local: LocalRound, change: tuple[Tensor, ...]) -> Finished:
    """The server gets the change, and the client keeps what it has with it."""
    kept = torch._foreach_add(local.kept[wire.CONTROL], change)
    return Finished(returned={wire.CONTROL: change}, kept={wire.CONTROL: kept})


def fedlada(local: LocalRound) -> AmendedAMSGrad:
    s = local.settings
    return AmendedAMSGrad(
        local.parameters,
        local.lr,
        (s.beta1, s.beta2),
        s.eps,
        s.weight_decay,
        s.rho,
        correction=local.received(wire.CORRECTION),
        second_moment=local.received(wire.SECOND_MOMENT),
    )


def fedact(local: LocalRound) -> ActAdamW:
    s = local.settings
    return _from_shared_state(local, tau=s.tau, alpha=s.alpha, gamma=s.gamma)


def fedact_align(local: LocalRound) -> ActAdamW:
    """From x^r + Delta_i."""
    take_up(local)
    s = local.settings
    align = {"delta": local.kept[wire.DELTA], "align_eps": s.align_eps, "realign": s.realign, "steps": local.steps}
    shared = _shared_state(local)
    return act_adamw(local, RealignedActAdamW, tau=s.tau, alpha=s.alpha, gamma=s.gamma, **shared, **align)


def finish_fedact_align(local: LocalRound, optimizer: Optimizer) -> Finished:
    """Beside v_K what ACT-AdamW's own steps moved, the mean over them: neither Delta_i nor what was let go of it."""
    assert isinstance(optimizer, RealignedActAdamW)
    moved = torch._foreach_sub([p.detach() for p in local.parameters], local.received(wire.MODEL))
    torch._foreach_sub_(moved, local.kept[wire.DELTA])
    torch._foreach_add_(moved, optimizer.let_go())
    torch._foreach_div_(moved, local.steps)
    returned = return_second_moments(local, optimizer).returned
    return Finished(returned={**returned, wire.CORRECTION: moved}, kept={wire.DELTA: next_delta(local)})


def fedact_local(local: LocalRound) -> ActAdamW:
    s = local.settings
    return _from_shared_state(local, tau=s.tau, alpha=s.alpha, gamma=s.gamma, score="local")


def fedadamw(local: LocalRound) -> ActAdamW:
    return _from_shared_state(local, tau=1.0, alpha=1.0, gamma=1.0)


def _from_shared_state(local: LocalRound, **own: Any) -> ActAdamW:
    """ACT-AdamW that goes on from Delta_G, v_bar and t."""
    return act_adamw(local, **_shared_state(local), **own)


def _shared_state(local: LocalRound) -> dict[str, Any]:
    return {
        "rho": local.settings.rho,
        "scope": local.settings.scope,
        "correction": local.received(wire.CORRECTION),
        "second_moment": from_block_means(local.received(wire.SECOND_MOMENT), local.parameters),
        "steps_done": local.steps_done,
    }


def return_second_moments(local: LocalRound, optimizer: Optimizer) -> Finished:
    """v_K, or its means over the blocks that v_bar came in; in fewer bits, the share of it that is new."""
    assert isinstance(optimizer, ActAdamW | AmendedAMSGrad)
    start = local.received(wire.SECOND_MOMENT)
    v = block_means(optimizer.second_moments(), start)
    if local.settings.wire_second_moment != "float32":
        kept = local.settings.beta2**local.steps
        v = [(v_k - kept * v_0).clamp_(min=0) for v_k, v_0 in zip(v, start, strict=True)]
    return Finished(returned={wire.SECOND_MOMENT: v})


def keeps(settings: LocalSettings) -> tuple[str, ...]:
    """What a client keeps between rounds: what its method does, and x^r where it is to derive Delta_G from it."""
    own = CLIENT_METHODS[settings.method].keeps
    return (*own, wire.MODEL) if settings.derives_correction else own


def edge_of_stability(settings: LocalSettings) -> str | None:
    alpha = 1 / settings.tau if settings.alpha is None else settings.alpha
    return stability_note(settings.rho, settings.tau, alpha)


ACT_SETTINGS = (*ADAM_SETTINGS, "rho", "tau", "alpha", "gamma", "scope")

CLIENT_METHODS: dict[str, ClientMethod] = {
    "fedavg": ClientMethod("SGD or local_optimizer", chosen_optimizer, local_optimizer="sgd"),
    "fedprox": ClientMethod(
        "SGD or local_optimizer, + mu/2 |x - x^r|^2 in the loss",
        proximal_optimizer,
        settings=("mu",),
        local_optimizer="sgd",
    ),
    "scaffold": ClientMethod(
        "SGD or local_optimizer, then x -= eta (c - c_i)",
        scaffold,
        local_optimizer="sgd",
        keeps=(wire.CONTROL,),
        finish=finish_scaffold,
    ),
    "fedadam": ClientMethod("SGD or local_optimizer", chosen_optimizer, local_optimizer="sgd"),
    "local_adam": ClientMethod("Adam (coupled decay) from a fresh state", adam, "adam", ADAM_SETTINGS),
    "local_adamw": ClientMethod("AdamW from a fresh state", adamw, "adamw", ADAM_SETTINGS),
    "fedlada": ClientMethod(
        "amended AMSGrad from v_bar", fedlada, "adam", (*ADAM_SETTINGS, "rho"), finish=return_second_moments
    ),
    "fadamgc": ClientMethod(
        "AdamW on g + y - y_i", fadamgc, "adamw", ADAM_SETTINGS, keeps=(wire.CONTROL,), finish=finish_fadamgc
    ),
    "pflalign": ClientMethod(
        "SGD on P g from x^r + Delta_i, then x -= gamma Delta_i / K",
        pflalign,
        "sgd",
        ("beta1", "align_eps", "shrinkage", "realign", "personal_delta"),
        keeps=(wire.DELTA, wire.SECOND_MOMENT, SHRINKAGE),
        take_up=take_up,
        finish=finish_pflalign,
    ),
    "local_only": ClientMethod(
        "SGD or local_optimizer, from the client's own model",
        own_layers,
        local_optimizer="sgd",
        keeps=(wire.DELTA, BUFFERS),
        take_up=take_up,
        finish=keep_own_layers,
    ),
    "fedper": ClientMethod(
        "SGD or local_optimizer, from the client's own personal_layers",
        own_layers,
        settings=("personal_layers",),
        local_optimizer="sgd",
        keeps=(wire.DELTA, BUFFERS),
        layers=personal_layers,
        take_up=take_up,
        finish=keep_own_layers,
    ),
    "ditto": ClientMethod(
        "SGD or local_optimizer, then as many steps of v_i, + mu/2 |v_i - x^r|^2 in the loss",
        chosen_optimizer,
        settings=("mu",),
        local_optimizer="sgd",
        keeps=(PERSONAL, BUFFERS),
        take_up=take_up_ditto,
        finish=finish_ditto,
    ),
    "fedadamw": ClientMethod(
        "ACT-AdamW with phi = 1", fedadamw, "adamw", (*ADAM_SETTINGS, "rho"), finish=return_second_moments
    ),
    "fedact_local": ClientMethod(
        "ACT-AdamW, scored with u_loc",
        fedact_local,
        "adamw",
        ACT_SETTINGS,
        finish=return_second_moments,
        note=edge_of_stability,
    ),
    "fedact": ClientMethod(
        "ACT-AdamW", fedact, "adamw", ACT_SETTINGS, finish=return_second_moments, note=edge_of_stability
    ),
    "fedact_align": ClientMethod(
        "ACT-AdamW from x^r + Delta_i, then x -= gamma Delta_i / K",
        fedact_align,
        "adamw",
        (*ACT_SETTINGS, "align_eps", "realign", "personal_delta"),
        keeps=(wire.DELTA,),
        take_up=take_up,
        finish=finish_fedact_align,
        note=edge_of_stability,
    ),
}
