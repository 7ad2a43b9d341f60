"""One client's round, as its method sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    """

    trainable: Mapping[str, Tensor]
    message: Mapping[str, Vectors]
    lr: float
    steps: int
    steps_done: float
    settings: LocalSettings
    kept: Mapping[str, list[Tensor]] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.trainable.values())

    def received(self, record: str) -> list[Tensor]:
        """A record of the message, `strategies.wire.MODEL` for x^r. Read-only: it may be the message's own memory."""
        vectors = self.message[record]
        return [torch.from_numpy(vectors[name]).to(p.device) for name, p in self.trainable.items()]


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
