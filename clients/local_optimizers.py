"""The optimizers that a client can run by themselves: ``local_optimizer`` chooses one where a method leaves it open.

A new one is named here, in the type of ``local_optimizer`` (clients/settings.py) and in its comment (pyproject.toml).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from clients.cautious import CautiousAdamW
from clients.local_round import LocalRound
from clients.optimizers import ActAdamW
from strategies import wire
from tasks.task import Family

ADAM_SETTINGS = ("beta1", "beta2", "eps")


@dataclass(frozen=True)
class LocalOptimizer:
    """Attributes
    ----------
    make : callable
        The optimizer of one round, from a fresh state.
    family : {"adamw", "adam", "sgd"}
        Which of a task's learning rates and weight decays is the default.
    settings : tuple of str
        The settings that it reads and not every method has.
    """

    make: Callable[[LocalRound], Optimizer]
    family: Family
    settings: tuple[str, ...]


def sgd(local: LocalRound) -> Optimizer:
    s = local.settings
    return torch.optim.SGD(local.parameters, local.lr, momentum=s.momentum, weight_decay=s.weight_decay)


def adam(local: LocalRound) -> Optimizer:
    """Adam, whose decay is coupled: part of the gradient and so of both moments."""
    s = local.settings
    return torch.optim.Adam(local.parameters, local.lr, (s.beta1, s.beta2), s.eps, s.weight_decay)


def adamw(local: LocalRound) -> Optimizer:
    s = local.settings
    return torch.optim.AdamW(local.parameters, local.lr, (s.beta1, s.beta2), s.eps, s.weight_decay)


def mgup_adamw(local: LocalRound) -> Optimizer:
    """MGUP-AdamW: ACT-AdamW with nothing from the server, the top taken in each tensor.

    Source: Chang and Yuan, "MGUP: A Momentum-Gradient Alignment Update Policy for Stochastic Optimization", NeurIPS
    2025, arXiv:2606.17526: phi = alpha on the floor(tau d) largest u g of a tensor, gamma on the rest, by default
    1/tau and tau.
    """
    s = local.settings
    return act_adamw(local, rho=0.0, tau=s.tau, alpha=s.alpha, gamma=s.gamma, scope="tensor")


def act_adamw(local: LocalRound, kind: type[ActAdamW] = ActAdamW, **own: Any) -> ActAdamW:
    """ACT-AdamW, or a ``kind`` of it, with the settings that it shares with AdamW, and its ``own``."""
    s = local.settings
    return kind(local.parameters, local.lr, (s.beta1, s.beta2), s.eps, s.weight_decay, **own)


def cautious_adamw(local: LocalRound) -> Optimizer:
    s = local.settings
    return CautiousAdamW(local.parameters, local.lr, (s.beta1, s.beta2), s.eps, s.weight_decay)


LOCAL_OPTIMIZERS: dict[str, LocalOptimizer] = {
    "sgd": LocalOptimizer(sgd, "sgd", ("momentum",)),
    "adam": LocalOptimizer(adam, "adam", ADAM_SETTINGS),
    "adamw": LocalOptimizer(adamw, "adamw", ADAM_SETTINGS),
    "mgup_adamw": LocalOptimizer(mgup_adamw, "adamw", (*ADAM_SETTINGS, "tau", "alpha", "gamma")),
    "cautious_adamw": LocalOptimizer(cautious_adamw, "adamw", ADAM_SETTINGS),
}


def chosen_optimizer(local: LocalRound) -> Optimizer:
    """The optimizer that the setting ``local_optimizer`` names."""
    return LOCAL_OPTIMIZERS[local.settings.local_optimizer].make(local)


def proximal_optimizer(local: LocalRound) -> Optimizer:
    """The same; the gradient of mu/2 |x - x^r|^2, mu (x - x^r), joins the loss's, after any clipping of that."""
    optimizer = chosen_optimizer(local)
    start = local.received(wire.MODEL)

    def add_proximal_gradient(*_: object) -> None:
        for p, x in zip(local.parameters, start, strict=True):
            if p.grad is not None:
                p.grad.add_(p.detach() - x, alpha=local.settings.mu)

    optimizer.register_step_pre_hook(add_proximal_gradient)
    return optimizer
