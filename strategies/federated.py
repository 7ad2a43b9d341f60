"""The one server loop. A method adds what it broadcasts, what it wants back, and how it folds replies."""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from logging import ERROR, INFO, WARNING
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from strategies import wire
from strategies.aggregation import RunningMean, TrimmedMean
from strategies.codecs import WireSettings, decode, encode
from strategies.exchange import exchange
from strategies.gate import NormGate
from strategies.hosts import Hosts
from strategies.reply import BadReply, Reply, last_line, read_metrics, read_reply
from strategies.seeds import derive_seed
from strategies.wire import Vectors

WHOLE_STATE = (  # attributes of a strategy
    "model", "state", "rounds_done", "steps_done", "folded", "failed_in_a_row", "state_folder", "norms", "last_lr"
)  # fmt: skip
T = TypeVar("T")
Answers = Iterable[Message | None]  # of the clients that were asked, in that order; None where one gave none
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class Diagnosis(Protocol):
    """What is measured of a round's deltas."""

    def add(self, delta: Vectors) -> None:
        """Of the trainable parameters, in the order of partitions."""

    def metrics(self) -> Mapping[str, float]:
        """After the last delta: what joins the metrics of the round."""


class ServerSettings(WireSettings):
    """The settings that the server half reads; pyproject.toml explains each."""

    rounds: PositiveInt
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    clients: PositiveInt
    clients_per_round: PositiveInt
    local_steps: PositiveInt
    local_epochs: NonNegativeInt
    lr: PositiveFloat
    lr_schedule: Literal["cosine", "constant"]
    lr_min: NonNegativeFloat
    beta2: Annotated[float, Field(ge=0, lt=1)]
    server_lr: PositiveFloat
    server_beta1: Annotated[float, Field(ge=0, lt=1)]
    server_beta2: Annotated[float, Field(ge=0, lt=1)]
    server_eps: PositiveFloat
    second_moment: Literal["full", "tensor", "block"]
    weighting: Literal["uniform", "examples"]
    aggregation: Literal["mean", "trimmed_mean", "median"]
    trim: Annotated[float, Field(ge=0, lt=0.5)]
    norm_gate: Literal["off", "reject", "clip"]
    norm_gate_factor: Annotated[float, Field(gt=1)]
    min_replies: PositiveInt
    max_failed_rounds: PositiveInt
    round_timeout: PositiveFloat
    node_timeout: NonNegativeFloat
    client_evaluation: bool
    personal_every: NonNegativeInt
    finetune_lr: NonNegativeFloat | None

    def learning_rate(self, server_round: int) -> float:
        """eta_r, constant within the round; rounds count from 1.

        The cosine is eta_min + (eta - eta_min) (1 + cos(pi (r-1)/R)) / 2: eta in round 1, just above eta_min
        in round R.
        """
        if self.lr_schedule == "constant":
            return self.lr
        share = (1 + math.cos(math.pi * (server_round - 1) / self.rounds)) / 2
        return self.lr_min + (self.lr - self.lr_min) * share


class RunFailed(RuntimeError):
    """The run can't go on; the message says why in one line."""


class FederatedStrategy(Strategy):
    """Samples partitions, sends the state, checks the replies and folds them in the order of partitions.

    Replies are taken and added up one at a time, so that memory does not depend on their number: x and the state, a
    sum for each record that is returned, and one reply. But medians, trimmed means and the norm gate need them all.

    Parameters
    ----------
    settings : ServerSettings
    buffers : frozenset of str
        Names in the model that are no trainable parameters (BatchNorm statistics and counters).
    blocks : mapping of str to int
        How many equal runs of rows of a parameter are blocks of their own; 1 for parameters that are not named.
    state_folder : str
        Names this run where clients keep their state: a relative path that no other run has.
    diagnose : callable, optional
        Makes the `Diagnosis` of a round.
    measured : collection of str
        The metrics that a client's answer to a personalized evaluation must have.

    Attributes
    ----------
    model : Vectors
        x, parameters and buffers, as of the last good round. A round makes new arrays and leaves the old as they were.
    state : dict of str to Vectors
        What the method keeps beside x, by record name: float32, 0 at first, with the shapes that `like` gives.
    rounds_done : int
        The rounds behind ``model``, failed ones included: `start` goes on from there.
    steps_done : float
        t, the optimizer steps behind ``state``; a whole number while all clients do the same number of steps.
    last_lr : float
        eta of the last good round. The schedule may be another when the run is resumed.
    folded : dict of int to int
        The last round whose reply was folded, by partition: the round whose state the client goes on from.
    pinned : sequence of dict of int to int
        ``folded`` of the checkpoints that the run may go back to: clients keep what those need, too.
    norms : dict of str to list of float
        What the norm gate knows of the past.
    failed_in_a_row : int
        Rounds since the last good one.
    round_metrics : dict of str to float
        The metrics of the current round.
    personal : sequence of dict
        Of the current round, if there was one: the personalized evaluation, what each client measured.
    """

    broadcast: ClassVar[tuple[str, ...]] = ()  # records sent beside the model
    returned: ClassVar[tuple[str, ...]] = ()  # records returned beside the delta
    kept: ClassVar[tuple[str, ...]] = ()  # records of `state` that stay on the server
    unweighted: ClassVar[tuple[str, ...]] = ()  # records returned whose mean counts each client once
    settings_used: ClassVar[tuple[str, ...]] = ()  # settings that it reads and not every method has
    default_server_lr: ClassVar[float] = 1.0  # where server_lr is "auto"
    default_weighting: ClassVar[str] = "uniform"  # where weighting is "auto"
    source: ClassVar[str] = ""  # where the method comes from

    def __init__(
        self,
        settings: ServerSettings,
        buffers: frozenset[str] = frozenset(),
        diagnose: Callable[[], Diagnosis] | None = None,
        blocks: Mapping[str, int] | None = None,
        state_folder: str = "clients",
        measured: Collection[str] = (),
    ) -> None:
        self.settings = settings
        self.buffers = buffers
        self.blocks = blocks or {}
        self.state_folder = state_folder
        self.diagnose = diagnose
        self.measured = measured
        self.model: Vectors = {}
        self.state: dict[str, Vectors] = {}
        self.rounds_done = 0
        self.steps_done = 0.0
        self.last_lr = 0.0
        self.folded: dict[int, int] = {}
        self.pinned: Sequence[Mapping[int, int]] = ()
        self._gate = (
            NormGate(settings.norm_gate, settings.norm_gate_factor, self.unweighted)
            if settings.norm_gate != "off"
            else None
        )
        self.failed_in_a_row = 0
        self.round_metrics: dict[str, float] = {}
        self.personal: Sequence[Mapping[str, float]] = ()
        self._hosts = Hosts(settings.clients, settings.node_timeout)
        self._asked: list[tuple[Message, int]] = []  # this round's messages and their partitions
        self._sent: dict[str, ArrayRecord] = {}  # the model and what is broadcast, as they travel
        self._round, self._num_asked = 0, 0
        self.failed: list[str] = []  # of the round: partition and node of each client that failed, and why

    # ---- the method's half

    @abstractmethod
    def fold(self, mean: dict[str, dict[str, NDArray]], replies: int, lr: float) -> None:
        """Make the next ``model`` and ``state`` of the means of what the clients returned.

        ``mean`` has a record for each that `terms` gives, whose memory is free to use; ``replies`` is S, ``lr`` the
        learning rate that the clients used.
        """

    def restored(self, reply: Reply) -> Reply:
        """A checked reply as the rest of the method knows it, where less of it travels."""
        return reply

    def terms(self, reply: Reply) -> Mapping[str, Vectors]:
        """What of a checked reply enters the means, by record."""
        return reply.vectors

    def tailor(self, partition: int, records: dict[str, ArrayRecord], config: ConfigRecord) -> None:
        """Change what one partition is sent to train with; both are its own."""

    def like(self, record: str) -> Vectors:
        """Arrays with the names, shapes and dtypes of a record of ``broadcast``, ``returned`` or ``kept``."""
        return self.parameters(self.model)

    # ---- the whole state

    def state_dict(self) -> dict[str, Any]:
        """All that the next round needs: named arrays, and plain numbers and strings.

        Nothing is copied, and nothing of it changes later: a round makes anew what it changes.
        """
        return {name: getattr(self, name) for name in WHOLE_STATE} | {"state": dict(self.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        for name in WHOLE_STATE:
            setattr(self, name, state[name])
        self.state = dict(self.state)
        self.folded = {int(partition): int(r) for partition, r in self.folded.items()}  # JSON's keys are strings
        self._serialize()

    @property
    def norms(self) -> Mapping[str, list[float]]:
        return self._gate.norms if self._gate else {}

    @norms.setter
    def norms(self, norms: Mapping[str, list[float]]) -> None:
        if self._gate:
            self._gate.norms = dict(norms)

    # ---- the loop

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Flower's loop, but for two things.

        Replies come one at a time and in the order of partitions (`exchange`), and after `load_state_dict` it goes on
        from where that state was, whatever ``initial_arrays`` are.
        """
        config, result = ConfigRecord(), Result()
        result.arrays = arrays = self._sent[wire.MODEL] if self.rounds_done else initial_arrays
        del initial_arrays  # x^0 is nobody's any more after the first round
        self.summary()

        def evaluate(server_round: int) -> None:
            metrics = evaluate_fn(server_round, arrays) if evaluate_fn else None
            if metrics is not None:
                result.evaluate_metrics_serverapp[server_round] = metrics

        if self.rounds_done == 0:
            evaluate(0)
        for server_round in range(self.rounds_done + 1, num_rounds + 1):
            log(INFO, "[ROUND %s/%s]", server_round, num_rounds)
            messages = list(self.configure_train(server_round, arrays, train_config or config, grid))
            new, metrics = self._fold_round(server_round, exchange(grid, messages, timeout))
            if new is not None:
                result.arrays = arrays = new
            result.train_metrics_clientapp[server_round] = metrics

            messages = list(self.configure_evaluate(server_round, arrays, evaluate_config or config, grid))
            client_metrics = self._mean_metrics(exchange(grid, messages, timeout))
            if client_metrics is not None:
                result.evaluate_metrics_clientapp[server_round] = client_metrics
            self.personal = self._evaluate_personally(server_round, num_rounds, grid, timeout)
            self.rounds_done = server_round
            evaluate(server_round)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.round_metrics = {"round": server_round, "lr": self.settings.learning_rate(server_round)}
        self.failed = []
        self._adopt(arrays)
        self._encode_broadcast(server_round)
        return self._ask(MessageType.TRAIN, server_round, self._sent, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the replies, which may come in any order."""
        return self._fold_round(server_round, self._in_order(replies))

    def _fold_round(self, server_round: int, answers: Answers) -> tuple[ArrayRecord | None, MetricRecord]:
        returned = {record: self.like(record) for record in self.returned}
        steps = None if self.settings.local_epochs else self.settings.local_steps
        means: defaultdict[str, RunningMean | TrimmedMean] = defaultdict(self._make_mean)
        diagnosis = self.diagnose() if self.diagnose else None
        good: list[Reply] = []
        replies = map(
            self.restored,
            self._read(answers, lambda c, p: read_reply(c, p, self.model, returned, steps, self._decode)),
        )
        for reply in self._pass_gate(self._gate, list(replies)) if self._gate else replies:
            weight = reply.num_examples if self.settings.weighting == "examples" else 1
            for record, vectors in self.terms(reply).items():
                means[record].add(vectors, 1 if record in self.unweighted else weight)
            if diagnosis:
                diagnosis.add(self.parameters(reply.delta))
            good.append(reply.without_vectors())
            del reply, vectors  # before the next one comes
        self.round_metrics |= {"replies": len(good), "failures": self._num_asked - len(good)}
        if len(good) < self.settings.min_replies:
            return self._fail_round(f"{len(good)} good replies, min_replies = {self.settings.min_replies}")

        weights = self._weights([reply.num_examples for reply in good])
        # what clients report never overwrites what the server knows
        self.round_metrics = _weighted_metrics([reply.metrics for reply in good], weights) | self.round_metrics
        if diagnosis:
            self.round_metrics |= diagnosis.metrics()
            diagnosis = None
        before = self.model, dict(self.state)
        self.fold(
            {record: mean.result() for record, mean in means.items()},
            len(good),
            self.settings.learning_rate(server_round),
        )
        if odd := _non_finite({wire.MODEL: self.model, **self.state}):
            self.model, self.state = before
            return self._fail_round(f"the server's step makes {odd} non-finite; server_lr or lr may be too large")
        self.failed_in_a_row = 0
        self.last_lr = self.settings.learning_rate(server_round)
        self._count_steps([reply.num_steps for reply in good], weights)
        self.folded = self.folded | {reply.partition: server_round for reply in good}
        self._serialize()
        return self._sent[wire.MODEL], MetricRecord(dict(self.round_metrics))

    def _decode(self, record: str, vectors: Vectors, like: Vectors) -> Vectors:
        return decode(record, vectors, self.settings.format(record), self.buffers, like)

    def _make_mean(self) -> RunningMean | TrimmedMean:
        if self.settings.aggregation == "mean":
            return RunningMean()
        if self.settings.aggregation == "median":
            return TrimmedMean(lambda n: (n - 1) // 2)
        return TrimmedMean(lambda n: min(math.ceil(Fraction(repr(self.settings.trim)) * n), (n - 1) // 2))

    def _pass_gate(self, gate: NormGate, replies: Sequence[Reply]) -> Iterator[Reply]:
        for reply, reason, refused in gate.judge(replies):
            if refused:
                self._fail(reply.partition, f"reply refused: {reason}")
                continue
            if reason:
                self.round_metrics["clipped"] = self.round_metrics.get("clipped", 0) + 1
                log(
                    WARNING,
                    "round %s, partition %s is clipped: %s",
                    self._round,
                    reply.partition,
                    reason,
                )
            yield reply

    def move(self, delta: dict[str, NDArray], direction: Vectors | None = None) -> None:
        """``x <- x + server_lr * direction``, by default the mean ``delta``, whose memory the new x takes.

        Buffers always move by their whole mean delta; those that are no floats (counters) are taken from it.
        """
        for name, x in self.model.items():
            moved = delta[name]
            if not np.issubdtype(x.dtype, np.floating):
                continue
            if name not in self.buffers:
                np.multiply((direction or delta)[name], x.dtype.type(self.settings.server_lr), out=moved)
            np.add(x, moved, out=moved)
        self.model = delta

    # ---- evaluation on the clients

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not self.settings.client_evaluation:
            return []
        return self._ask(MessageType.EVALUATE, server_round, {wire.MODEL: arrays}, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self._mean_metrics(self._in_order(replies))

    def _mean_metrics(self, answers: Answers) -> MetricRecord | None:
        if not self.settings.client_evaluation:
            return None
        good = list(self._read(answers, read_metrics))
        self.round_metrics["client_failures"] = self._num_asked - len(good)
        if not good:
            return None
        weights = self._weights([metrics[wire.NUM_EXAMPLES] for metrics in good])
        mean = {f"client_{key}": value for key, value in _weighted_metrics(good, weights).items()}
        self.round_metrics |= mean
        return MetricRecord(dict(mean))

    def _evaluate_personally(
        self, server_round: int, num_rounds: int, grid: Grid, timeout: float
    ) -> Sequence[Mapping[str, float]]:
        """What all clients measure with the global model, their own, and the global one after an epoch of theirs."""
        every = self.settings.personal_every
        if not every or (server_round % every and server_round < num_rounds):
            return ()
        self._encode_broadcast(server_round)
        clients, at_a_time = self.settings.clients, self.settings.clients_per_round
        good: list[Mapping[str, float]] = []
        for first in range(0, clients, at_a_time):  # no more at a time, and in its time, than a round has
            group = range(first, min(first + at_a_time, clients))
            messages = self._ask(wire.PERSONAL_EVALUATION, server_round, self._sent, grid, group)
            good += self._read(exchange(grid, messages, timeout), self._read_measured)
        self.round_metrics["personal_failures"] = clients - len(good)
        return good

    def _read_measured(self, content: RecordDict, partition: int) -> Mapping[str, float]:
        metrics = read_metrics(content, partition)
        if missing := sorted(set(self.measured) - metrics.keys()):
            raise BadReply(f"metric {missing[0]} is missing")
        return metrics

    def summary(self) -> None:
        log(
            INFO,
            "\t├──> %s of %s clients a round; broadcast: %s; returned: %s",
            self.settings.clients_per_round,
            self.settings.clients,
            ", ".join((wire.MODEL, *self.broadcast)),
            ", ".join((wire.DELTA, *self.returned)),
        )

    # ---- the loop's own

    def _adopt(self, arrays: ArrayRecord) -> None:
        """Read x from Flower's record, unless it is the one that the last round wrote."""
        if arrays is self._sent.get(wire.MODEL):
            return
        self.model = wire.from_record(arrays)
        if not self.state:
            self.state = {
                record: {name: np.zeros_like(x) for name, x in self.like(record).items()}
                for record in (*self.broadcast, *self.kept)
            }
        self._serialize()

    def _serialize(self) -> None:
        """Write what is sent, once for all messages; from then on the arrays are views of that, in the same memory."""
        self._sent = {wire.MODEL: wire.to_record(self.model)}
        self.model = wire.from_record(self._sent[wire.MODEL])
        for record in self.broadcast:
            if self.settings.format(record) == "float32":  # others are encoded for each round
                self._sent[record] = wire.to_record(self.state[record])
                self.state[record] = wire.from_record(self._sent[record])

    def _encode_broadcast(self, server_round: int) -> None:
        """Those records of the state that travel in fewer bits than they have."""
        for record in self.broadcast:
            if (form := self.settings.format(record)) != "float32":
                seed = derive_seed(self.settings.seed, server_round)
                self._sent[record] = wire.to_record(encode(record, self.state[record], form, (), seed))

    def parameters(self, vectors: Vectors) -> Vectors:
        """The trainable part of ``vectors``."""
        return {name: array for name, array in vectors.items() if name not in self.buffers}

    def _ask(
        self,
        kind: str,
        server_round: int,
        records: Mapping[str, ArrayRecord],
        grid: Grid,
        partitions: Sequence[int] | None = None,
    ) -> list[Message]:
        """One message to each of the partitions, by default a sample; its number and seed are in the config record."""
        settings = self.settings
        generator = np.random.default_rng(derive_seed(settings.seed, server_round, kind, "sample"))
        sampled = sorted(generator.choice(settings.clients, settings.clients_per_round, replace=False).tolist())
        if partitions is not None:
            sampled = list(partitions)
        lr = settings.learning_rate(server_round)
        if kind == wire.PERSONAL_EVALUATION:
            lr = settings.lr if settings.finetune_lr is None else settings.finetune_lr
        nodes = self._hosts.find(sampled, grid)
        self._round, self._num_asked = server_round, len(sampled)
        self._asked = []
        for partition in sampled:
            if partition not in nodes:
                self._fail(partition, "no connected node hosts it")
                continue
            config = ConfigRecord(
                {
                    wire.PARTITION: partition,
                    wire.SEED: derive_seed(settings.seed, server_round, partition, kind),
                    wire.LR: lr,
                    wire.STEPS_DONE: self.steps_done,
                    wire.ROUND: server_round,
                    wire.FOLDED: self.folded.get(partition, 0),
                    wire.PINNED: sorted({folded.get(partition, 0) for folded in (self.folded, *self.pinned)}),
                    wire.STATE_FOLDER: self.state_folder,
                }
            )
            own = dict(records)
            if kind == MessageType.TRAIN:
                self.tailor(partition, own, config)
            content = RecordDict({**own, wire.CONFIG: config})
            message = Message(content, nodes[partition], kind, group_id=str(server_round))
            self._asked.append((message, partition))
        self._count_bytes("bytes_sent", (message.content for message, _ in self._asked))
        return [message for message, _ in self._asked]

    def _in_order(self, replies: Iterable[Message]) -> Answers:
        by_question = {reply.metadata.reply_to_message_id: reply for reply in replies}
        return [by_question.get(message.metadata.message_id) for message, _ in self._asked]

    def _read(self, answers: Answers, read: Callable[[RecordDict, int], T]) -> Iterator[T]:
        """What the good replies say, in the order of partitions; bad and missing ones are named and left out."""
        each = iter(answers)  # zip would hold on to a reply until the next one is there
        for _, partition in self._asked:
            reply, failure = next(each), None
            if reply is None:
                failure = "no reply in time"
            elif reply.has_error():
                failure = f"the client failed: {last_line(reply.error.reason)}"
            else:
                self._count_bytes("bytes_received", [reply.content])
                try:
                    yield read(reply.content, partition)
                except BadReply as reason:
                    failure = f"reply refused: {reason}"
            if failure:
                self._fail(partition, failure)
            del reply

    def _fail(self, partition: int, reason: str) -> None:
        """Name a client that failed in this round."""
        node = next((f", node {message.metadata.dst_node_id}" for message, p in self._asked if p == partition), "")
        self.failed.append(f"partition {partition}{node}: {reason}")
        log(WARNING, "round %s, %s", self._round, self.failed[-1])

    def _count_bytes(self, metric: str, contents: Iterable[RecordDict]) -> None:
        """Add the arrays of these messages, as they are serialized, to a metric of the round."""
        arrays = sum(
            len(array.data) for c in contents for record in wire.array_records(c).values() for array in record.values()
        )
        self.round_metrics[metric] = self.round_metrics.get(metric, 0) + arrays

    def _fail_round(self, why: str) -> tuple[None, MetricRecord]:
        """The model stays as it is. Raises `RunFailed` after too many such rounds in a row."""
        self.failed_in_a_row += 1
        reason = f"round {self._round}: {why}"
        log(ERROR, "%s; the model stays as it is", reason)
        if self.failed_in_a_row >= min(self.settings.max_failed_rounds, self.settings.rounds):
            last_failure = f"; the last failure: {self.failed[-1]}" if self.failed else ""
            raise RunFailed(
                f"{reason}; {self.failed_in_a_row} failed rounds in a row, "
                f"max_failed_rounds = {self.settings.max_failed_rounds}{last_failure}"
            )
        return None, MetricRecord(dict(self.round_metrics))

    def _weights(self, num_examples: Sequence[float]) -> list[float]:
        if self.settings.weighting == "uniform":
            return [1 / len(num_examples)] * len(num_examples)
        return [n / sum(num_examples) for n in num_examples]

    def _count_steps(self, num_steps: Sequence[int], weights: Sequence[float]) -> None:
        """Advance t so that ``1 - beta2**t`` is the mean weight of the gradients in the mean of the v_i.

        With K steps on every client that is t + K. Where K_i differs, the EMA weights w_i = 1 - beta2**(t + K_i)
        are averaged as the v_i are, and t follows from their mean.
        """
        if len(set(num_steps)) == 1:
            self.steps_done += num_steps[0]
        elif (beta2 := self.settings.beta2) > 0:
            fewest = min(num_steps)  # powers relative to it can't all underflow
            decay = sum(w * beta2 ** (k - fewest) for w, k in zip(weights, num_steps, strict=True))
            self.steps_done += fewest + math.log(decay) / math.log(beta2)


def _non_finite(records: Mapping[str, Vectors]) -> str | None:
    """The first record and tensor that has an entry that is not finite."""
    each = (
        f"{record} {name}"
        for record, vectors in records.items()
        for name, a in vectors.items()
        if not wire.all_finite(a)
    )
    return next(each, None)


def _weighted_metrics(metrics: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Weighted means of the metrics that every client reports, without the bookkeeping ones."""
    shared = set.intersection(*(set(m) for m in metrics)) - {wire.PARTITION}
    mean = {
        key: sum(w * m[key] for w, m in zip(weights, metrics, strict=True))
        for key in sorted(shared - {wire.NUM_EXAMPLES})
    }
    return mean | {wire.NUM_EXAMPLES: sum(m[wire.NUM_EXAMPLES] for m in metrics)}
