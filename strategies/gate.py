"""A limit on the length of what a client returns, relative to what clients return."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from strategies.reply import Reply
from strategies.wire import Vectors

WINDOW = 100  # norms of the past that the median knows, of each record


class NormGate:
    """Refuses or shortens records of a reply that are longer than ``factor`` times the median.

    The median runs over this round's replies and the last `WINDOW` before them, those that were refused included: where
    all clients' norms grow, it follows. Fewer than half of the clients can't move it far.

    Records named in ``whole`` are refused and never clipped: clients keep what they sent of them, and both sides must
    agree.

    Attributes
    ----------
    norms : dict of str to list of float
        The norms of the past, by record.
    """

    def __init__(self, mode: Literal["reject", "clip"], factor: float, whole: Sequence[str] = ()) -> None:
        self.mode, self.factor, self.whole = mode, factor, whole
        self.norms: dict[str, list[float]] = {}

    def judge(self, replies: Sequence[Reply]) -> list[tuple[Reply, str | None, bool]]:
        """Each reply, shortened where need be, what is wrong with it, if anything is, and whether it is refused."""
        norms = [{record: _norm(vectors) for record, vectors in reply.vectors.items()} for reply in replies]
        known = {
            record: self.norms.get(record, []) + [of[record] for of in norms] for record in (norms[0] if norms else ())
        }
        limits = {record: self.factor * statistics.median(values) for record, values in known.items()}
        self.norms = {record: values[-WINDOW:] for record, values in known.items()}
        return [self._judge(reply, of, limits) for reply, of in zip(replies, norms, strict=True)]

    def _judge(
        self, reply: Reply, norms: Mapping[str, float], limits: Mapping[str, float]
    ) -> tuple[Reply, str | None, bool]:
        too_long = [record for record, norm in norms.items() if 0 < limits[record] < norm]
        if not too_long:
            return reply, None, False
        reason = ", ".join(
            f"the norm of {record} is {norms[record]:.3g}, above {limits[record]:.3g}" for record in too_long
        )
        if self.mode == "reject" or set(too_long) & set(self.whole):
            return reply, reason, True
        shortened = {record: _scaled(reply.vectors[record], limits[record] / norms[record]) for record in too_long}
        return replace(reply, vectors={**reply.vectors, **shortened}), reason, False


def _norm(vectors: Vectors) -> float:
    return math.hypot(
        *(np.linalg.norm(a.astype(np.float64)) for a in vectors.values() if np.issubdtype(a.dtype, np.floating))
    )


def _scaled(vectors: Vectors, factor: float) -> Vectors:
    return {
        name: np.asarray(a * a.dtype.type(factor)) if np.issubdtype(a.dtype, np.floating) else a
        for name, a in vectors.items()
    }
