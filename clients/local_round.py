"""One client's round, as its method sees it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from clients.settings import LocalSettings
from strategies.wire import Vectors


@dataclass(frozen=True)
class LocalRound:
    """What a method has to work with. Lists of tensors are in the order of the parameters, on their device.

    Attributes
    ----------
    trainable : mapping of str to Tensor
        The trainable parameters by name, at x^r when the round begins and at x_K when it ends.
    message : mapping of str to Vectors
        What the server sent, by record name: the model, and what the method broadcasts beside it.
    lr : float
        eta of the round.
    steps : int
        K, the steps of this round.
    steps_done : float
        t before the round's first step.
    settings : LocalSettings
    kept : mapping of str to list of Tensor
        What the method keeps on this client between rounds, as the last round left it; 0 at first.
    folded : int
        The round that left it; 0 where there was none.
    own, buffers : mapping of str to Tensor
        Those of ``trainable``, and of the model's persistent buffers, that are in the layers of which the method keeps
        something (`clients.methods.ClientMethod.layers`).
    train : callable
        Does the round's K steps with an optimizer, on the client's examples in another order, from where the model is.
    """

    trainable: Mapping[str, Tensor]
    message: Mapping[str, Vectors]
    lr: float
    steps: int
    steps_done: float
    settings: LocalSettings
    kept: Mapping[str, list[Tensor]] = field(default_factory=dict)
    folded: int = 0
    own: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    train: Callable[[Optimizer], float] = lambda optimizer: 0.0

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.trainable.values())

    def received(self, record: str, of: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """A record of the message, `strategies.wire.MODEL` for x^r; all parameters, or the tensors that ``of`` names.

        Read-only: it may be the message's own memory.
        """
        vectors = self.message[record]
        named = self.trainable if of is None else of
        return [torch.from_numpy(vectors[name]).to(t.device) for name, t in named.items()]


@dataclass(frozen=True)
class Finished:
    """What a round leaves beside the model's delta.

    Attributes
    ----------
    returned : mapping of str to sequence of Tensor
        Goes to the server, by record name.
    kept : mapping of str to sequence of Tensor
        Stays on the client for its next round.
    """

    returned: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    kept: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
