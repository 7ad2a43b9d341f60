"""The client half of every method: its local optimizer, and what it returns beside the model's delta."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from clients.optimizers import ActAdamW, stability_note
from clients.settings import LocalSettings
from strategies import wire

Parameters = Sequence[Tensor]


@dataclass(frozen=True)
class Received:
    """What the server sent for this round beside the model; tensors are in the order of the parameters."""

    lr: float
    steps_done: float
    vectors: Mapping[str, Sequence[Tensor]]  # by record name


@dataclass(frozen=True)
class ClientMethod:
    """One method on the client.

    Attributes
    ----------
    local_step : str
        What a step does, in one line for people.
    family : {"adamw", "sgd"}
        Which of a task's learning rates and weight decays is the default.
    make_optimizer : callable
        The optimizer of one round, from the trainable parameters, what the server sent, and the settings.
    returned : callable, optional
        From that optimizer after the round: the records beside the delta, in the order of the parameters.
    note : callable, optional
        What people should know about these settings before a run, or None.
    """

    local_step: str
    family: Literal["adamw", "sgd"]
    make_optimizer: Callable[[Parameters, Received, LocalSettings], Optimizer]
    returned: Callable[[Optimizer], Mapping[str, Sequence[Tensor]]] = lambda optimizer: {}
    note: Callable[[LocalSettings], str | None] = lambda settings: None


def sgd(parameters: Parameters, received: Received, settings: LocalSettings) -> Optimizer:
    return torch.optim.SGD(parameters, received.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def adamw(parameters: Parameters, received: Received, settings: LocalSettings) -> Optimizer:
    return torch.optim.AdamW(
        parameters, received.lr, (settings.beta1, settings.beta2), settings.eps, settings.weight_decay
    )


def fedact(
    parameters: Parameters,
    received: Received,
    settings: LocalSettings,
    score: Literal["corrected", "local"] = "corrected",
) -> Optimizer:
    return ActAdamW(
        parameters,
        received.lr,
        (settings.beta1, settings.beta2),
        settings.eps,
        settings.weight_decay,
        rho=settings.rho,
        tau=settings.tau,
        alpha=settings.alpha,
        gamma=settings.gamma,
        scope=settings.scope,
        score=score,
        correction=received.vectors[wire.CORRECTION],
        second_moment=received.vectors[wire.SECOND_MOMENT],
        steps_done=received.steps_done,
    )


def fedact_local(parameters: Parameters, received: Received, settings: LocalSettings) -> Optimizer:
    return fedact(parameters, received, settings, score="local")


def fedadamw(parameters: Parameters, received: Received, settings: LocalSettings) -> Optimizer:
    trust_all = settings.model_copy(update={"tau": 1.0, "alpha": 1.0, "gamma": 1.0})
    return fedact(parameters, received, trust_all)


def second_moments(optimizer: Optimizer) -> Mapping[str, Sequence[Tensor]]:
    assert isinstance(optimizer, ActAdamW)
    return {wire.SECOND_MOMENT: optimizer.second_moments()}


def edge_of_stability(settings: LocalSettings) -> str | None:
    alpha = 1 / settings.tau if settings.alpha is None else settings.alpha
    return stability_note(settings.rho, settings.tau, alpha)


CLIENT_METHODS: dict[str, ClientMethod] = {
    "fedavg": ClientMethod("SGD", "sgd", sgd),
    "local_adamw": ClientMethod("AdamW from a fresh state", "adamw", adamw),
    "fedadamw": ClientMethod("ACT-AdamW with phi = 1", "adamw", fedadamw, second_moments),
    "fedact_local": ClientMethod(
        "ACT-AdamW, scored with u_loc", "adamw", fedact_local, second_moments, edge_of_stability
    ),
    "fedact": ClientMethod("ACT-AdamW", "adamw", fedact, second_moments, edge_of_stability),
}
