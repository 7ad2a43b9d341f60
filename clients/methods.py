"""The client half of every method: its local optimizer, and what it returns beside the model's delta."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from clients.fedlada import AmendedAMSGrad
from clients.optimizers import ActAdamW, stability_note
from clients.settings import LocalSettings
from strategies import wire
from tasks.task import Family


@dataclass(frozen=True)
class LocalRound:
    """One client's round, as its method sees it. Lists of tensors are in the order of the parameters.

    Attributes
    ----------
    parameters : sequence of Tensor
        The trainable parameters, at x^r when the round begins and at x_K when it ends.
    received : mapping of str to sequence of Tensor
        What the server sent beside the model, by record name.
    lr : float
        eta of the round.
    steps : int
        K, the steps of this round.
    steps_done : float
        t before the round's first step.
    settings : LocalSettings
    """

    parameters: Sequence[Tensor]
    received: Mapping[str, Sequence[Tensor]]
    lr: float
    steps: int
    steps_done: float
    settings: LocalSettings


@dataclass(frozen=True)
class ClientMethod:
    """One method on the client.

    Attributes
    ----------
    local_step : str
        What a step does, in one line for people.
    family : {"adamw", "adam", "sgd"}
        The family of its local optimizer: which of a task's learning rates and weight decays is the default.
    make_optimizer : callable
        The optimizer of one round.
    settings : tuple of str
        The settings that it reads and not every method has.
    returned : callable, optional
        After the round, from it and its optimizer: the records beside the delta, in the order of the parameters.
    note : callable, optional
        What people should know about these settings before a run, or None.
    """

    local_step: str
    family: Family
    make_optimizer: Callable[[LocalRound], Optimizer]
    settings: tuple[str, ...]
    returned: Callable[[LocalRound, Optimizer], Mapping[str, Sequence[Tensor]]] = lambda local, optimizer: {}
    note: Callable[[LocalSettings], str | None] = lambda settings: None

    def family_for(self, local_optimizer: str) -> Family:
        """The family where the setting ``local_optimizer``, if this method has it, is ``local_optimizer``."""
        chosen: dict[str, Family] = {"sgd": "sgd", "adamw": "adamw"}
        return chosen.get(local_optimizer, self.family) if "local_optimizer" in self.settings else self.family


def sgd(local: LocalRound) -> Optimizer:
    s = local.settings
    return torch.optim.SGD(local.parameters, local.lr, momentum=s.momentum, weight_decay=s.weight_decay)


def adamw(local: LocalRound) -> Optimizer:
    s = local.settings
    return torch.optim.AdamW(local.parameters, local.lr, (s.beta1, s.beta2), s.eps, s.weight_decay)


def adam(local: LocalRound) -> Optimizer:
    """Adam, whose decay is coupled: part of the gradient and so of both moments."""
    s = local.settings
    return torch.optim.Adam(local.parameters, local.lr, (s.beta1, s.beta2), s.eps, s.weight_decay)


def sgd_or_adamw(local: LocalRound) -> Optimizer:
    return adamw(local) if local.settings.local_optimizer == "adamw" else sgd(local)


def fedprox(local: LocalRound) -> Optimizer:
    """The gradient of mu/2 |x - x^r|^2, mu (x - x^r), joins the loss's, after any clipping of that."""
    optimizer = sgd_or_adamw(local)
    start = [p.detach().clone() for p in local.parameters]

    def add_proximal_gradient(*_: object) -> None:
        for p, x in zip(local.parameters, start, strict=True):
            if p.grad is not None:
                p.grad.add_(p.detach() - x, alpha=local.settings.mu)

    optimizer.register_step_pre_hook(add_proximal_gradient)
    return optimizer


def fedlada(local: LocalRound) -> AmendedAMSGrad:
    s = local.settings
    return AmendedAMSGrad(
        local.parameters,
        local.lr,
        (s.beta1, s.beta2),
        s.eps,
        s.weight_decay,
        s.rho,
        correction=local.received[wire.CORRECTION],
        second_moment=local.received[wire.SECOND_MOMENT],
    )


def fedact(local: LocalRound) -> ActAdamW:
    s = local.settings
    return _act_adamw(local, s.tau, s.alpha, s.gamma)


def fedact_local(local: LocalRound) -> ActAdamW:
    s = local.settings
    return _act_adamw(local, s.tau, s.alpha, s.gamma, score="local")


def fedadamw(local: LocalRound) -> ActAdamW:
    return _act_adamw(local, tau=1.0, alpha=1.0, gamma=1.0)


def _act_adamw(
    local: LocalRound,
    tau: float,
    alpha: float | None,
    gamma: float | None,
    score: Literal["corrected", "local"] = "corrected",
) -> ActAdamW:
    s = local.settings
    return ActAdamW(
        local.parameters,
        local.lr,
        (s.beta1, s.beta2),
        s.eps,
        s.weight_decay,
        rho=s.rho,
        tau=tau,
        alpha=alpha,
        gamma=gamma,
        scope=s.scope,
        score=score,
        correction=local.received[wire.CORRECTION],
        second_moment=local.received[wire.SECOND_MOMENT],
        steps_done=local.steps_done,
    )


def second_moments(local: LocalRound, optimizer: Optimizer) -> Mapping[str, Sequence[Tensor]]:
    assert isinstance(optimizer, ActAdamW | AmendedAMSGrad)
    return {wire.SECOND_MOMENT: optimizer.second_moments()}


def edge_of_stability(settings: LocalSettings) -> str | None:
    alpha = 1 / settings.tau if settings.alpha is None else settings.alpha
    return stability_note(settings.rho, settings.tau, alpha)


SGD = ("momentum",)
ADAM = ("beta1", "beta2", "eps")
EITHER = ("local_optimizer", *SGD, *ADAM)
ACT = (*ADAM, "rho", "tau", "alpha", "gamma", "scope")

CLIENT_METHODS: dict[str, ClientMethod] = {
    "fedavg": ClientMethod("SGD", "sgd", sgd, SGD),
    "fedprox": ClientMethod("SGD or AdamW, + mu/2 |x - x^r|^2 in the loss", "sgd", fedprox, (*EITHER, "mu")),
    "fedadam": ClientMethod("SGD or AdamW", "sgd", sgd_or_adamw, EITHER),
    "local_adam": ClientMethod("Adam (coupled decay) from a fresh state", "adam", adam, ADAM),
    "local_adamw": ClientMethod("AdamW from a fresh state", "adamw", adamw, ADAM),
    "fedlada": ClientMethod("amended AMSGrad from v_bar", "adam", fedlada, (*ADAM, "rho"), second_moments),
    "fedadamw": ClientMethod("ACT-AdamW with phi = 1", "adamw", fedadamw, (*ADAM, "rho"), second_moments),
    "fedact_local": ClientMethod(
        "ACT-AdamW, scored with u_loc", "adamw", fedact_local, ACT, second_moments, edge_of_stability
    ),
    "fedact": ClientMethod("ACT-AdamW", "adamw", fedact, ACT, second_moments, edge_of_stability),
}
