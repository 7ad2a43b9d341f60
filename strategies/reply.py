"""A client's reply, checked before anything of it is folded into the server's state."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flwr.app import MetricRecord, RecordDict

from strategies import wire
from strategies.wire import Vectors

# Beyond what any client can have; a count that is wrong by more than this would own every weighted mean.
MAX_EXAMPLES = 10**12

Decode = Callable[[str, Vectors, Vectors], Vectors]


class BadReply(ValueError):
    """A reply that must not be folded; the message says why."""


@dataclass(frozen=True)
class Reply:
    """What one client returned from one round, after all checks."""

    partition: int
    num_examples: int
    num_steps: int
    vectors: Mapping[str, Vectors]  # wire.DELTA and what the method returns beside it
    metrics: Mapping[str, float]

    @property
    def delta(self) -> Vectors:
        return self.vectors[wire.DELTA]

    def without_vectors(self) -> "Reply":
        """What is to be remembered when the vectors are folded: a few numbers."""
        return replace(self, vectors={})


def read_reply(
    content: RecordDict,
    partition: int,
    model: Vectors,
    returned: Mapping[str, Vectors],
    local_steps: int | None,
    decode: Decode = lambda record, vectors, like: vectors,
) -> Reply:
    """Decode and check the reply for ``partition``.

    ``model`` and the values of ``returned`` give the names, shapes and dtypes that the delta and the records beside
    it must have, ``local_steps`` the number of steps, if it is one for all; ``decode`` undoes what made the arrays of
    a record smaller for the wire, given what they must be like. Raises `BadReply`.
    """
    expected = {wire.DELTA: model, **returned}
    records = wire.array_records(content)
    missing = [name for name in expected if name not in records]
    if missing:
        raise BadReply(f"records {', '.join(missing)} are missing")
    if extra := [name for name in records if name not in expected]:
        raise BadReply(f"records {', '.join(extra)} are none of this method's")
    metrics = read_metrics(content, partition)
    steps = metrics.get(wire.NUM_STEPS)
    if not isinstance(steps, int) or steps < 1 or local_steps not in (None, steps):
        raise BadReply(f"metric {wire.NUM_STEPS} is {steps}, not {local_steps or 'a whole number above 0'}")

    vectors = {}
    for name, like in expected.items():
        try:
            vector = decode(name, wire.from_record(records[name]), like)
        except Exception as error:  # bytes from outside: whatever the decoder raises, the reply is bad
            raise BadReply(f"record {name} can't be decoded: {error}") from error
        _check_vector(name, vector, like)
        vectors[name] = vector
    for name, array in vectors.get(wire.SECOND_MOMENT, {}).items():
        if array.min(initial=0) < 0:
            raise BadReply(f"{wire.SECOND_MOMENT} {name} has negative entries")
    return Reply(
        partition=partition,
        num_examples=int(metrics[wire.NUM_EXAMPLES]),
        num_steps=steps,
        vectors=vectors,
        metrics=metrics,
    )


def read_metrics(content: RecordDict, partition: int) -> dict[str, float]:
    """The metrics of the reply for ``partition``, all finite. Raises `BadReply`."""
    record = content.get(wire.METRICS)
    if not isinstance(record, MetricRecord):
        raise BadReply(f"record {wire.METRICS} is missing")
    metrics = {key: v for key, v in record.items() if not isinstance(v, list)}
    odd = [key for key, value in metrics.items() if not math.isfinite(value)]
    if odd:
        raise BadReply(f"metric {odd[0]} is {metrics[odd[0]]}")
    if metrics.get(wire.PARTITION) != partition:
        raise BadReply(f"it answers for partition {metrics.get(wire.PARTITION)}")
    examples = metrics.get(wire.NUM_EXAMPLES)
    if not isinstance(examples, int) or not 1 <= examples <= MAX_EXAMPLES:
        raise BadReply(f"metric {wire.NUM_EXAMPLES} is {examples}, not a whole number from 1 to {MAX_EXAMPLES:g}")
    return metrics


def _check_vector(record: str, vector: Vectors, like: Vectors) -> None:
    if vector.keys() != like.keys():
        odd = sorted(vector.keys() ^ like.keys())
        raise BadReply(f"record {record} has other names than the model, {odd[0]!r} first")
    for name, array in vector.items():
        wanted = like[name]
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            raise BadReply(
                f"{record} {name} is {array.dtype}{list(array.shape)}, not {wanted.dtype}{list(wanted.shape)}"
            )
        if not wire.all_finite(array):
            raise BadReply(f"{record} {name} has non-finite entries")


def last_line(reason: str | None) -> str:
    """The gist of an error reply: Flower's reason is ``<class 'X'>:<'a whole traceback'>``."""
    lines = [line.strip() for line in (reason or "").removesuffix("'>").splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
