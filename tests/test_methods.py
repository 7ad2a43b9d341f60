"""The battery: what holds for every method. A method is covered by its name in `STRATEGIES` and `CLIENT_METHODS`, and a
plain optimizer in `REFERENCE`."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from typer.testing import CliRunner

from clients.cautious import CautiousAdamW
from clients.client import FedClient, exchanged_state
from clients.fedlada import AmendedAMSGrad
from clients.local_round import LocalRound
from clients.methods import CLIENT_METHODS
from clients.optimizers import ActAdamW
from clients.personal import BUFFERS, is_in
from clients.state import ClientState
from clients.training import batches, train
from fedact_flwr import client_app, server_app
from fedact_flwr.cli import app as cli
from fedact_flwr.inprocess import InProcessGrid, run_inprocess
from fedact_flwr.settings import Settings, dump
from strategies import STRATEGIES, FederatedStrategy, wire
from tasks import TASKS
from tasks.blocks import parameter_blocks
from tasks.task import Defaults, Examples, Task

MakeSettings = Callable[..., Settings]

CASES: dict[str, dict[str, Any]] = {name: {"method": name} for name in STRATEGIES} | {
    "fedavg+mgup": {"method": "fedavg", "local_optimizer": "mgup_adamw"},
    "fedavg+cautious": {"method": "fedavg", "local_optimizer": "cautious_adamw"},
    "fedprox+adamw": {"method": "fedprox", "local_optimizer": "adamw"},
    "scaffold+adamw": {"method": "scaffold", "local_optimizer": "adamw"},
    "fedadam+adamw": {"method": "fedadam", "local_optimizer": "adamw"},
    "fedadamw+tensor": {"method": "fedadamw", "second_moment": "tensor"},
    "fedadamw+block": {"method": "fedadamw", "second_moment": "block"},
    "fedact+block": {"method": "fedact", "second_moment": "block"},
    "ditto+adamw": {"method": "ditto", "local_optimizer": "adamw"},
}
NARROW: dict[str, dict[str, Any]] = {  # on the wire
    "fedact+bfloat16": {
        "method": "fedact",
        "wire_delta": "bfloat16",
        "wire_correction": "bfloat16",
        "wire_second_moment": "bfloat16",
    },
    "fedact+int8": {"method": "fedact", "wire_delta": "int8", "wire_correction": "int8", "wire_second_moment": "int8"},
    "fedact+derived": {"method": "fedact", "wire_correction": "derived"},
    "scaffold+int8": {"method": "scaffold", "wire_delta": "int8"},
    "fedper+int8": {"method": "fedper", "wire_delta": "int8"},
    "fedact_align+int8": {
        "method": "fedact_align",
        "wire_delta": "int8",
        "wire_correction": "int8",
        "wire_second_moment": "int8",
    },
}
every_case = pytest.mark.parametrize("case", CASES)
every_case_and_format = pytest.mark.parametrize("case", CASES | NARROW)

LR, BETAS, EPS, DECAY = 0.04, (0.7, 0.9), 1e-3, 0.2  # the LR of a message, which is not the one in the settings
PHI: dict[str, Any] = {"tau": 0.3, "alpha": 1.7, "gamma": 0.2}
UNUSUAL = {
    "momentum": 0.6, "beta1": 0.7, "beta2": 0.9, "eps": EPS, "weight_decay": DECAY, "mu": 0.4, "rho": 0.3,
    "scope": "tensor", "align_eps": EPS, **PHI,
}  # fmt: skip
SIZES = (1, 7, 40)  # examples of three clients
ALONE = ("local_only", "fedper")  # whose global model does not learn all there is to learn


class Toy(Task):
    """Whether the first of three numbers is positive, for a head-split attention over the three."""

    summary = "a toy"
    models: Sequence[str] = ("attention",)
    defaults: Mapping[str, Defaults] = {
        "adamw": {"lr": 0.05, "weight_decay": 0.01},
        "adam": {"lr": 0.05, "weight_decay": 0.001},
        "sgd": {"lr": 0.5, "weight_decay": 0.001},
        "fedadam": {"server_lr": 0.1},
    }

    def train_labels(self) -> NDArray:
        return self.examples(0, sum(SIZES))["label"].numpy()

    def train_examples(self, indices: NDArray) -> Examples:
        return {name: tensor[indices] for name, tensor in self.examples(0, sum(SIZES)).items()}

    def test_examples(self) -> Examples:
        return self.examples(1, 64)

    def examples(self, seed: int, n: int) -> Examples:
        x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
        return {"x": x, "label": (x[:, 0] > 0).long()}

    def make_model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return ToyModel()

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["label"])

    @torch.no_grad()
    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        model.eval()
        accuracy = (model(examples["x"]).argmax(1) == examples["label"]).float().mean().item()
        return {"loss": self.loss(model, examples).item(), "accuracy": accuracy}


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.positions = nn.Parameter(torch.randn(3, 4))
        self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)  # a key bias has no gradient
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x[:, :, None]) + self.positions
        return self.head((tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]).flatten(1)[:, :4])


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task "toy", whose three clients have SIZES examples."""
    ends = np.cumsum(SIZES)
    parts = [np.arange(end - size, end) for size, end in zip(SIZES, ends, strict=True)]

    def split(settings: Settings, *_: object) -> list[NDArray]:
        return parts if settings.clients == len(SIZES) else [np.arange(sum(SIZES))]

    monkeypatch.setitem(TASKS, "toy", Toy())
    for module in ("server_app", "client_app"):
        monkeypatch.setattr(f"fedact_flwr.{module}.split_indices", split)
    client_app._workplace.cache_clear()


@pytest.fixture
def settings_of(make_settings: MakeSettings) -> MakeSettings:
    """Settings of a case on three toy clients."""
    toy = {"task": "toy", "clients": 3, "clients_per_round": 3, "rounds": 3, "batch_size": 8, "name": "run"}
    return lambda case, **overrides: make_settings(**(toy | (CASES | NARROW)[case] | overrides))


def make_server(settings: Settings, state_folder: str = "run/clients") -> FederatedStrategy:
    model = Toy().make_model(1)
    return STRATEGIES[settings.method](settings, blocks=parameter_blocks(model), state_folder=state_folder)


def first_arrays() -> dict[str, NDArray]:
    return {name: t.detach().numpy().copy() for name, t in exchanged_state(Toy().make_model(1)).items()}


class Watched(InProcessGrid):
    """Keeps the train messages and their replies."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(client_app.app, settings.clients, dump(settings))
        self.sent: list[Message] = []
        self.received: list[Message] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        if messages and messages[0].metadata.message_type == "train":
            self.sent, self.received = messages, replies
        return replies


def do_rounds(
    server: FederatedStrategy, grid: InProcessGrid, rounds: Iterable[int], order: Sequence[int] = (0, 1, 2)
) -> None:
    for server_round in rounds:
        arrays = wire.to_record(server.model or first_arrays())
        messages = server.configure_train(server_round, arrays, ConfigRecord(), grid)
        replies = list(grid.send_and_receive(messages))
        replies = [replies[i] for i in order if i < len(replies)]
        _, metrics = server.aggregate_train(server_round, replies)
        assert metrics is not None
        assert metrics["failures"] == 0


def bits(server: FederatedStrategy) -> dict[str, bytes]:
    vectors = {"model": server.model, **server.state}
    return {f"{record}/{name}": a.tobytes() for record, named in vectors.items() for name, a in named.items()}


# ---- the client half


def random_message(settings: Settings) -> tuple[dict[str, dict[str, NDArray]], dict[str, Any]]:
    """A message of round 2, with something else than zeros in all that the method broadcasts."""
    server, generator = make_server(settings), np.random.default_rng(5)
    server.model = first_arrays()
    records = {
        record: {name: generator.random(x.shape, np.float32) for name, x in server.like(record).items()}
        for record in server.broadcast
    }
    config = {wire.PARTITION: 2, wire.SEED: 11, wire.LR: LR, wire.STEPS_DONE: 10.0, wire.ROUND: 2, wire.FOLDED: 1}
    config[wire.PINNED] = [1]
    return {wire.MODEL: first_arrays(), **records}, config


def own_names(settings: Settings) -> list[str]:
    """The parameters that the method keeps something of."""
    arrays, layers = first_arrays(), CLIENT_METHODS[settings.method].layers
    return [name for name in arrays if layers is None or is_in(name, layers(settings, arrays))]


def keep_random_state(settings: Settings, folder: Path) -> dict[str, list[Tensor]]:
    """Put what round 1 left on the client where it looks for it."""
    generator = torch.Generator().manual_seed(6)
    method, arrays = CLIENT_METHODS[settings.method], first_arrays()
    own = own_names(settings)
    kept = {
        what: {name: torch.rand(arrays[name].shape, generator=generator) for name in own if what != BUFFERS}
        for what in method.keeps
    }
    ClientState(folder, 2).save(1, kept, {0})
    return {what: list(tensors.values()) for what, tensors in kept.items()}


def fit(settings: Settings, folder: Path, n: int = 30) -> tuple[Any, dict[str, float]]:
    client = FedClient(Toy(), Toy().make_model(3), Toy().examples(0, n), Toy().test_examples(), settings)
    message, config = random_message(settings)
    returned, _, metrics = client.fit(message, {**config, wire.STATE_FOLDER: str(folder)})
    return returned, metrics


def kept_after(folder: Path, server_round: int = 2, partition: int = 2) -> dict[str, NDArray]:
    """What the client keeps of a round, by "what/name"."""
    path = folder / str(partition) / f"round-{server_round}.safetensors"
    return safetensors.numpy.load_file(path) if path.exists() else {}


def moved(settings: Settings, returned: Any, folder: Path) -> dict[str, NDArray]:
    """x_K - x^r: what returns, and where that is 0, since it is the client's own, what it keeps."""
    delta = dict(returned[wire.DELTA])
    if settings.method in ALONE:
        for name in own_names(settings):
            assert not delta[name].any()
            delta[name] = kept_after(folder)[f"delta/{name}"]
    return delta


@every_case
def test_a_client_writes_nothing_into_what_it_received(case: str, settings_of: MakeSettings, tmp_path: Path) -> None:
    """In one process it is the server's own memory."""
    settings = settings_of(case)
    message, config = random_message(settings)
    keep_random_state(settings, tmp_path)
    records = {record: wire.to_record(vectors) for record, vectors in message.items()}
    before = {record: [array.data for array in named.values()] for record, named in records.items()}
    copies = {record: [bytes(bytearray(data)) for data in arrays] for record, arrays in before.items()}
    client = FedClient(Toy(), Toy().make_model(3), Toy().examples(0, 8), Toy().test_examples(), settings)
    views = {record: wire.from_record(named) for record, named in records.items()}
    client.fit(views, {**config, wire.STATE_FOLDER: str(tmp_path)})
    assert before == copies


def hooked(optimizer: Optimizer, before: Callable | None = None, after: Callable | None = None) -> Optimizer:
    if before:
        optimizer.register_step_pre_hook(lambda *_: before())
    if after:
        optimizer.register_step_post_hook(lambda *_: after())
    return optimizer


def proximal(x: list[nn.Parameter], optimizer: Optimizer, start: Sequence[Tensor] = ()) -> Optimizer:
    """The gradient of mu/2 |x - x^r|^2, by autograd; ``start`` is x^r, by default x as it is."""
    start = start or [p.detach().clone() for p in x]

    def add() -> None:
        with torch.enable_grad():
            term = 0.4 / 2 * sum((p - q).square().sum() for p, q in zip(x, start, strict=True))
            for p, g in zip(x, torch.autograd.grad(term, x), strict=True):
                p.grad += g

    return hooked(optimizer, before=add)


def controlled(x: list[nn.Parameter], optimizer: Optimizer, c: list[Tensor], c_i: list[Tensor]) -> Optimizer:
    def step() -> None:
        with torch.no_grad():
            for p, a, b in zip(x, c, c_i, strict=True):
                p -= LR * (a - b)

    return hooked(optimizer, after=step)


def tracked(x: list[nn.Parameter], optimizer: Optimizer, y: list[Tensor], y_i: list[Tensor]) -> Optimizer:
    def add() -> None:
        for p, a, b in zip(x, y, y_i, strict=True):
            p.grad += a - b

    return hooked(optimizer, before=add)


class Aligned(Optimizer):
    """pflalign's step as its formula stands, from x^r + Delta."""

    def __init__(self, x: list[nn.Parameter], steps: int, k: dict[str, list[Tensor]]) -> None:
        super().__init__(x, {})
        self.x, self.steps, self.delta = x, steps, k["delta"]
        self.m = [torch.zeros_like(p) for p in x]
        self.v, self.shrinkage = ([t.clone() for t in k[what]] for what in ("second_moment", "shrinkage"))
        with torch.no_grad():
            for p, delta in zip(x, self.delta, strict=True):
                p += delta

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        b = BETAS[0]
        for i, (x, delta) in enumerate(zip(self.x, self.delta, strict=True)):
            g = x.grad + DECAY * x
            self.m[i] = m = b * self.m[i] + (1 - b) * g
            self.v[i] = v = b * self.v[i] + (1 - b) * g**2
            self.shrinkage[i] *= 1 - (1 - b) * g**2 / (v + EPS)
            self.shrinkage[i] += (1 - b) * m**2 / (v + EPS)
            certainty = torch.erf(m.abs() / (2 * (v - m**2).clamp(min=0) + EPS).sqrt())
            gamma = 0.5 - 0.5 * certainty * torch.sign(-m * delta)
            x -= LR * self.shrinkage[i] * g + gamma * delta / self.steps


def started(x: list[nn.Parameter], delta: list[Tensor], optimizer: Optimizer) -> Optimizer:
    """The last of the parameters, as many as there are in delta, begin at x^r + Delta."""
    with torch.no_grad():
        for p, d in zip(x[-len(delta) :], delta, strict=True):
            p += d
    return optimizer


def realigned(x: list[nn.Parameter], optimizer: Optimizer, delta: list[Tensor], steps: int) -> Optimizer:
    """fedact_align's second half as its formula stands, from x^r + Delta, with m and v from the gradients anew."""
    m, v = [torch.zeros_like(p) for p in x], [optimizer.state[p]["v"].clone() for p in x]
    k = 0

    @torch.no_grad()
    def after() -> None:
        nonlocal k
        k += 1
        for i, (p, d) in enumerate(zip(x, delta, strict=True)):
            m[i] = BETAS[0] * m[i] + (1 - BETAS[0]) * p.grad
            v[i] = BETAS[1] * v[i] + (1 - BETAS[1]) * p.grad**2
            m_hat, v_hat = m[i] / (1 - BETAS[0] ** k), v[i] / (1 - BETAS[1] ** (10 + k))
            certainty = torch.erf(m_hat.abs() / (2 * (v_hat - m_hat**2).clamp(min=0) + EPS).sqrt())
            p -= (0.5 - 0.5 * certainty * torch.sign(-m_hat * d)) * d / steps

    return hooked(started(x, delta, optimizer), after=after)


def spread(means: list[Tensor], x: list[nn.Parameter]) -> list[Tensor]:
    """Each block's mean at each of its entries."""
    return [m.repeat_interleave(p.numel() // m.numel()).view_as(p) for m, p in zip(means, x, strict=True)]


def sgd(x: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(x, LR, momentum=0.6, weight_decay=DECAY)


def adamw(x: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(x, LR, BETAS, EPS, DECAY)


def act(x: list[nn.Parameter], g: dict[str, list[Tensor]], **own: Any) -> Optimizer:
    v_bar = spread(g["second_moment"], x)
    shared = {"correction": g["correction"], "second_moment": v_bar, "steps_done": 10}
    return ActAdamW(x, LR, BETAS, EPS, DECAY, rho=0.3, **shared, **own)


# From the parameters, what the server sent (g) and what the client kept (k): the method's local optimizer, plainly.
REFERENCE: dict[str, Callable[..., Optimizer]] = {
    "fedavg": lambda x, g, k: sgd(x),
    "fedprox": lambda x, g, k: proximal(x, sgd(x)),
    "scaffold": lambda x, g, k: controlled(x, sgd(x), g["control"], k["control"]),
    "fedadam": lambda x, g, k: sgd(x),
    "local_adam": lambda x, g, k: torch.optim.Adam(x, LR, BETAS, EPS, DECAY),
    "local_adamw": lambda x, g, k: adamw(x),
    "fedlada": lambda x, g, k: AmendedAMSGrad(x, LR, BETAS, EPS, DECAY, 0.3, g["correction"], g["second_moment"]),
    "fadamgc": lambda x, g, k: tracked(x, adamw(x), g["control"], k["control"]),
    "local_only": lambda x, g, k: started(x, k["delta"], sgd(x)),
    "fedper": lambda x, g, k: started(x, k["delta"], sgd(x)),
    "ditto": lambda x, g, k: sgd(x),
    "pflalign": lambda x, g, k: Aligned(x, 5, k),
    "fedadamw": lambda x, g, k: act(x, g, tau=1),
    "fedact_local": lambda x, g, k: act(x, g, score="local", scope="tensor", **PHI),
    "fedact": lambda x, g, k: act(x, g, scope="tensor", **PHI),
    "fedact_align": lambda x, g, k: realigned(x, act(x, g, scope="tensor", **PHI), k["delta"], 5),
    "ditto+adamw": lambda x, g, k: adamw(x),
    "fedavg+mgup": lambda x, g, k: ActAdamW(x, LR, BETAS, EPS, DECAY, rho=0, scope="tensor", **PHI),
    "fedavg+cautious": lambda x, g, k: CautiousAdamW(x, LR, BETAS, EPS, DECAY),
    "fedprox+adamw": lambda x, g, k: proximal(x, adamw(x)),
    "scaffold+adamw": lambda x, g, k: controlled(x, adamw(x), g["control"], k["control"]),
    "fedadam+adamw": lambda x, g, k: adamw(x),
    "fedadamw+tensor": lambda x, g, k: act(x, g, tau=1),
    "fedadamw+block": lambda x, g, k: act(x, g, tau=1),
    "fedact+block": lambda x, g, k: act(x, g, scope="tensor", **PHI),
}


@every_case
def test_one_client_equals_its_local_optimizer(case: str, settings_of: MakeSettings, tmp_path: Path) -> None:
    settings = settings_of(case, local_steps=5, batch_size=8, **UNUSUAL)
    kept = keep_random_state(settings, tmp_path)
    returned, _ = fit(settings, tmp_path)

    message, _ = random_message(settings)
    received = {record: [torch.tensor(a) for a in named.values()] for record, named in message.items()}
    model = Toy().make_model(1)
    x = list(model.parameters())
    optimizer = REFERENCE[case](x, received, kept)
    train(model, Toy().loss, batches(Toy().examples(0, 30), 8, torch.Generator().manual_seed(11)), optimizer, 5)
    delta = moved(settings, returned, tmp_path)
    for (name, start), p in zip(first_arrays().items(), x, strict=True):
        np.testing.assert_allclose(delta[name], p.detach().numpy() - start, rtol=1e-4, atol=2e-6)


@every_case
def test_a_reply_has_the_names_and_shapes_that_the_server_wants(
    case: str, settings_of: MakeSettings, tmp_path: Path
) -> None:
    settings = settings_of(case)
    keep_random_state(settings, tmp_path)
    returned, metrics = fit(settings, tmp_path)
    server = make_server(settings)
    server.model = first_arrays()
    assert returned.keys() == {wire.DELTA, *server.returned}
    for record, vectors in returned.items():
        like = server.model if record == wire.DELTA else server.like(record)
        assert {n: (a.shape, a.dtype) for n, a in vectors.items()} == {n: (a.shape, a.dtype) for n, a in like.items()}
        assert any(a.any() for a in vectors.values()) or settings.method == "local_only"
    assert (metrics[wire.NUM_STEPS], metrics[wire.PARTITION]) == (10, 2)


@every_case
def test_a_client_with_one_sample(case: str, settings_of: MakeSettings, tmp_path: Path) -> None:
    settings = settings_of(case)
    keep_random_state(settings, tmp_path)
    returned, metrics = fit(settings, tmp_path, n=1)
    assert metrics[wire.NUM_EXAMPLES] == 1
    assert metrics[wire.NUM_STEPS] == 10  # the same example over and over
    assert all(np.isfinite(a).all() for vectors in returned.values() for a in vectors.values())


@every_case
def test_bfloat16_computes_and_float32_stays(case: str, settings_of: MakeSettings, tmp_path: Path) -> None:
    deltas = []
    for precision in ("float32", "bfloat16"):
        settings = settings_of(case, precision=precision)
        keep_random_state(settings, tmp_path)
        returned, _ = fit(settings, tmp_path)
        assert all(a.dtype == np.float32 for vectors in returned.values() for a in vectors.values())
        for path in tmp_path.rglob("round-2.safetensors"):
            assert all(a.dtype == np.float32 for a in safetensors.numpy.load_file(path).values())
        deltas.append(moved(settings, returned, tmp_path)["head.weight"])
    assert not np.array_equal(*deltas)
    np.testing.assert_allclose(*deltas, atol=0.1)


@every_case
def test_a_round_is_a_function_of_its_message(case: str, settings_of: MakeSettings, tmp_path: Path) -> None:
    """What another round leaves in the shared model or on disk does not reach it; and its seed does."""
    settings = settings_of(case)
    keep_random_state(settings, tmp_path)
    client = FedClient(Toy(), Toy().make_model(3), Toy().examples(0, 30), Toy().test_examples(), settings)
    message, config = random_message(settings)
    config |= {wire.STATE_FOLDER: str(tmp_path)}
    runs = []
    for seed in (11, 99, 11):
        returned = client.fit(message, config | {wire.SEED: seed})[0]
        runs.append({f"{record}/{name}": a for record in returned for name, a in returned[record].items()})
        runs[-1] |= {f"kept/{name}": a for name, a in kept_after(tmp_path).items()}
    first, other, again = ({name: a.tobytes() for name, a in left.items()} for left in runs)
    assert first == again
    heads = [name for name in first if name.endswith("head.weight") and runs[0][name].any()]
    assert heads
    assert all(first[name] != other[name] for name in heads)


# ---- both halves


@every_case_and_format
def test_the_order_of_replies_does_not_matter(case: str, settings_of: MakeSettings) -> None:
    ends = []
    for i, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 2, 0])):
        settings = settings_of(case)
        server = make_server(settings, f"{i}/clients")
        do_rounds(server, Watched(settings), (1, 2), order)
        ends.append(bits(server))
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("method", STRATEGIES)
def test_sums_of_replies_run_in_the_order_of_partitions(method: str, settings_of: MakeSettings) -> None:
    """Deltas whose float64 sum depends on the order, and a counter that is taken from the first partition."""
    scales = [np.float32(x) for x in (1e20, 3.0, -1e20)]
    x0 = {"w": np.zeros(3, np.float32), "count": np.array(0)}
    ends = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]):
        settings = settings_of(method)
        server = STRATEGIES[method](settings, buffers=frozenset({"count"}))
        messages = list(server.configure_train(1, wire.to_record(x0), ConfigRecord(), Watched(settings)))
        replies = []
        for message, scale in zip(messages, scales, strict=True):
            message.metadata.__dict__["_message_id"] = f"question {scale}"
            partition = message.content[wire.CONFIG][wire.PARTITION]
            delta = {"w": np.full(3, scale), "count": np.array(partition + 1)}
            records = {record: wire.to_record({"w": np.ones(3, np.float32)}) for record in server.returned}
            counts = {wire.PARTITION: partition, wire.NUM_EXAMPLES: 1, wire.NUM_STEPS: 10}
            content = {wire.DELTA: wire.to_record(delta), **records, wire.METRICS: MetricRecord(counts)}
            replies.append(Message(RecordDict(content), reply_to=message))
        server.aggregate_train(1, [replies[i] for i in order])
        ends.append(bits(server))
    assert all(end == ends[0] for end in ends)
    assert server.model["count"] == 1


@every_case
def test_clients_of_unequal_size(case: str, settings_of: MakeSettings) -> None:
    """1, 7 and 40 examples, one epoch in batches of 8, weighted by examples: each fold follows its formula."""
    settings = settings_of(case, local_epochs=1, weighting="examples", lr_schedule="constant")
    server, grid = make_server(settings), Watched(settings)
    do_rounds(server, grid, (1,))
    replies = {r.content[wire.METRICS][wire.PARTITION]: r.content for r in grid.received}
    metrics = [replies[i][wire.METRICS] for i in range(3)]
    assert [m[wire.NUM_EXAMPLES] for m in metrics] == list(SIZES)
    assert [m[wire.NUM_STEPS] for m in metrics] == [1, 1, 5]

    def returned(record: str, name: str) -> list[NDArray]:
        return [wire.from_record(replies[i][record])[name].astype(np.float64) for i in range(3)]

    w = np.array(SIZES) / sum(SIZES)
    for name, x in first_arrays().items():
        deltas = returned(wire.DELTA, name)
        mean = np.tensordot(w, deltas, 1)
        if settings.method == "fedadam":
            b1, b2 = settings.server_beta1, settings.server_beta2
            mean = (1 - b1) * mean / (np.sqrt((1 - b2) * mean**2) + settings.server_eps)
        np.testing.assert_allclose(server.model[name], x + settings.server_lr * mean, rtol=1e-4, atol=1e-6)
        for record in server.broadcast:
            expected = {
                wire.CORRECTION: lambda d=deltas: -np.tensordot(w / [1, 1, 5] / settings.lr, d, 1),
                wire.SECOND_MOMENT: lambda n=name: np.tensordot(w, returned(wire.SECOND_MOMENT, n), 1),
                wire.CONTROL: lambda n=name: np.mean(returned(wire.CONTROL, n), axis=0),  # 1/N whatever the weights
            }[record]()
            np.testing.assert_allclose(server.state[record][name], expected, rtol=1e-5, atol=1e-8)


def through_files(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A strategy's state, written and read again."""
    arrays = {"model": state["model"], **{f"state/{record}": named for record, named in state["state"].items()}}
    flat = {f"{record}:{name}": array for record, named in arrays.items() for name, array in named.items()}
    safetensors.numpy.save_file(flat, folder / "arrays.safetensors")
    rest = {key: value for key, value in state.items() if key not in ("model", "state")}
    (folder / "rest.json").write_text(json.dumps(rest))

    read: dict[str, Any] = json.loads((folder / "rest.json").read_text())
    read |= {"model": {}, "state": {record: {} for record in state["state"]}}
    for key, array in safetensors.numpy.load_file(folder / "arrays.safetensors").items():
        record, name = key.split(":")
        (read["model"] if record == "model" else read["state"][record.removeprefix("state/")])[name] = array
    return read


@every_case_and_format
def test_state_saved_and_loaded_gives_the_same_next_round(case: str, settings_of: MakeSettings, tmp_path: Path) -> None:
    settings = settings_of(case, clients_per_round=2)
    straight = make_server(settings, "straight/clients")
    do_rounds(straight, Watched(settings), (1, 2, 3))

    before = make_server(settings, "broken/clients")
    do_rounds(before, Watched(settings), (1, 2))
    client_app._workplace.cache_clear()  # as in new processes on both sides
    after = make_server(settings)
    after.load_state_dict(through_files(before.state_dict(), tmp_path))
    do_rounds(after, Watched(settings), (3,))
    assert bits(after) == bits(straight)
    assert (after.steps_done, after.folded) == (straight.steps_done, straight.folded)


class Crash(Exception):
    """The process is gone."""


@every_case_and_format
def test_a_resumed_run_ends_in_the_same_bits(case: str, settings_of: MakeSettings) -> None:
    """It crashes in round 4, in the middle of the clients, and goes on from the checkpoint of round 2."""
    varied = {"clients_per_round": 2, "rounds": 5, "checkpoint_every": 2}
    straight, broken = (settings_of(case, **varied, name=name) for name in ("straight", "broken"))
    server_app.run(straight, InProcessGrid(client_app.app, 3, dump(straight)))

    class Crashing(InProcessGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            answers = list(super().pull_messages(message_ids))
            if answers[0].metadata.group_id == "4":
                raise Crash
            return answers

    with pytest.raises(Crash):
        server_app.run(broken, Crashing(client_app.app, 3, dump(broken)))
    record = Path(broken.output) / "broken"
    shutil.rmtree(record / "checkpoints" / "round-3")  # the one that a process that is killed has no time for
    client_app._workplace.cache_clear()
    resumed = broken.model_copy(update={"resume": str(record)})
    server_app.run(resumed, InProcessGrid(client_app.app, 3, dump(resumed)))
    ends = [Path(settings.output) / settings.name for settings in (straight, broken)]
    assert (ends[0] / "model.safetensors").read_bytes() == (ends[1] / "model.safetensors").read_bytes()
    assert metrics_of(ends[0]) == metrics_of(ends[1])
    assert [line["round"] for line in metrics_of(ends[1])] == [0, 1, 2, 3, 4, 5]


def metrics_of(record: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (record / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


@every_case_and_format
def test_three_rounds_learn(case: str, settings_of: MakeSettings) -> None:
    settings = settings_of(
        case, clients=1, clients_per_round=1, local_steps=20, holdout=0.3, personal_every=3, finetune_lr=0.05
    )
    run_inprocess(server_app.app, client_app.app, 1, dump(settings))
    lines = (Path(settings.output) / "run" / "rounds.jsonl").read_text().splitlines()
    start = Toy().evaluate(Toy().make_model(1), Toy().test_examples())["loss"]
    end = json.loads(lines[-1])
    if settings.method not in ALONE:
        assert end["loss"] < 0.9 * start
    if CLIENT_METHODS[settings.method].take_up:
        assert end["personal_loss"] < 0.9 * start
    assert end["tuned_loss"] < (end["global_loss"] if settings.method in ALONE else 0.9 * start)


def claims(method: str) -> dict[str, tuple[int, int]]:
    """What `fedact methods` says of a method: bytes per parameter down and up, with the full v and with block means."""
    output = CliRunner().invoke(cli, ["methods"], env={"COLUMNS": "250"}).output
    part = output[output.index(f"\n{method}  " if method != "fedavg" else "fedavg  ") :]
    found = [re.search(rf"  {way} .*?: (\d+) bytes per parameter(?:, (\d+) with)?", part) for way in ("down", "up")]
    full, means = zip(*((int(m[1]), int(m[2] or m[1])) for m in found if m), strict=True)
    return {"full": full, "means": means}


@every_case
def test_bytes_on_the_wire_are_those_that_fedact_methods_claims(case: str, settings_of: MakeSettings) -> None:
    settings = settings_of(case, local_steps=1)
    server, grid = make_server(settings), Watched(settings)
    do_rounds(server, grid, (1,))
    d = sum(p.numel() for p in Toy().make_model(1).parameters())
    blocks = {"full": 0, "tensor": len(first_arrays()), "block": len(first_arrays()) + 5}  # in_proj_weight: 6, not 1
    extra = 4 * blocks[settings.second_moment]
    claimed = claims(settings.method)["full" if settings.second_moment == "full" else "means"]

    def records(message: Message) -> list[ArrayRecord]:
        return list(message.content.array_records.values())

    for messages, per_parameter, metric in (
        (grid.sent, claimed[0], "bytes_sent"),
        (grid.received, claimed[1], "bytes_received"),
    ):
        for message in messages:
            arrays = [a for record in records(message) for a in wire.from_record(record).values()]
            assert sum(a.nbytes for a in arrays) == per_parameter * d + extra
        # a round's metric counts them serialized, with 128 bytes for the shape and dtype of each array
        count = sum(len(record) for message in messages for record in records(message))
        assert server.round_metrics[metric] == 3 * (per_parameter * d + extra) + 128 * count


# ---- reductions


def same(ours: Mapping, theirs: Mapping, **tolerance: float) -> None:
    """The deltas are equal, to the bit unless a tolerance is given."""
    for name in ours[wire.DELTA]:
        if tolerance:
            np.testing.assert_allclose(ours[wire.DELTA][name], theirs[wire.DELTA][name], **tolerance)
        else:
            assert ours[wire.DELTA][name].tobytes() == theirs[wire.DELTA][name].tobytes()


def fit_with(settings: Settings, folder: Path, **records: Any) -> Any:
    """A first round from zeros in all that the server broadcasts, but for ``records``."""
    client = FedClient(Toy(), Toy().make_model(3), Toy().examples(0, 30), Toy().test_examples(), settings)
    message, config = random_message(settings)
    for record in set(message) - {wire.MODEL}:
        message[record] = records.get(record) or {name: np.zeros_like(a) for name, a in message[record].items()}
    first = {wire.ROUND: 1, wire.FOLDED: 0, wire.PINNED: [0], wire.STEPS_DONE: 0.0, wire.STATE_FOLDER: str(folder)}
    return client.fit(message, config | first)[0]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"method": "fedprox", "mu": 0.0}, {"method": "fedavg"}),
        ({"method": "fedprox", "mu": 0.0, "local_optimizer": "adamw"}, {"method": "local_adamw"}),
        ({"method": "scaffold"}, {"method": "fedavg"}),
        ({"method": "scaffold", "local_optimizer": "adamw"}, {"method": "local_adamw"}),
        ({"method": "fadamgc"}, {"method": "local_adamw"}),
        ({"method": "pflalign", "shrinkage": "off"}, {"method": "fedavg", "momentum": 0.0}),
        ({"method": "ditto"}, {"method": "fedavg"}),
        ({"method": "fedact_align", "second_moment": "block"}, {"method": "fedact", "second_moment": "block"}),
        ({"method": "fedadam", "local_optimizer": "adamw"}, {"method": "local_adamw"}),
        ({"method": "fedavg", "local_optimizer": "adam"}, {"method": "local_adam"}),
        ({"method": "fedavg", "local_optimizer": "adamw"}, {"method": "local_adamw"}),
        ({"method": "fedadamw"}, {"method": "fedact", "tau": 1.0}),
        ({"method": "fedadamw"}, {"method": "fedact_local", "alpha": 1.0, "gamma": 1.0}),
    ],
)
def test_reductions_to_the_bit(ours: dict, theirs: dict, settings_of: MakeSettings, tmp_path: Path) -> None:
    unusual = {key: UNUSUAL[key] for key in ("beta1", "beta2", "eps", "weight_decay", "momentum")}
    a, b = (fit_with(settings_of("fedavg", **(unusual | own)), tmp_path) for own in (ours, theirs))
    same(a, b)


def test_mgup_with_tau_1_is_adamw(settings_of: MakeSettings, tmp_path: Path) -> None:
    mgup = fit_with(settings_of("fedavg+mgup", tau=1.0), tmp_path)
    half = fit_with(settings_of("fedavg+mgup"), tmp_path)
    plain = fit_with(settings_of("local_adamw"), tmp_path)
    same(mgup, plain, rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):
        same(half, plain, rtol=1e-4, atol=1e-6)


def test_fedadamw_with_rho_0_is_local_adamw_from_the_shared_second_moments(
    settings_of: MakeSettings, tmp_path: Path
) -> None:
    """From v_bar = 0 it is local_adamw; from another v_bar, AdamW with v_bar in the place of its own zeros."""
    settings = settings_of("fedadamw", rho=0.0, local_steps=3)
    random, _ = random_message(settings)
    correction = {wire.CORRECTION: random[wire.CORRECTION]}  # has no part in it
    plain = fit_with(settings_of("local_adamw", local_steps=3), tmp_path)
    same(fit_with(settings, tmp_path, **correction), plain, rtol=1e-4, atol=1e-6)

    ours, _ = fit(settings, tmp_path)  # v_bar random, t from 10
    model, beta1, beta2 = Toy().make_model(1), settings.beta1, settings.beta2
    stream = batches(Toy().examples(0, 30), settings.batch_size, torch.Generator().manual_seed(11))
    v = {name: torch.tensor(a) for name, a in random[wire.SECOND_MOMENT].items()}
    m = {name: torch.zeros_like(t) for name, t in v.items()}
    for k in (1, 2, 3):
        model.zero_grad()
        Toy().loss(model, next(stream)).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                m[name] = beta1 * m[name] + (1 - beta1) * p.grad
                v[name] = beta2 * v[name] + (1 - beta2) * p.grad**2
                m_hat, v_hat = m[name] / (1 - beta1**k), v[name] / (1 - beta2 ** (10 + k))
                p -= LR * settings.weight_decay * p + LR * m_hat / (v_hat.sqrt() + settings.eps)
    expected = {name: p.detach().numpy() - first_arrays()[name] for name, p in model.named_parameters()}
    same(ours, {wire.DELTA: expected}, rtol=1e-3, atol=1e-6)


def test_fedlada_with_rho_0_is_amsgrad_from_the_shared_second_moments(
    settings_of: MakeSettings, tmp_path: Path
) -> None:
    """torch's AMSGrad divides by bias corrections, which are 1 once its step count is large."""
    settings = settings_of("fedlada", rho=0.0, local_steps=4)
    ours, _ = fit(settings, tmp_path)
    random, _ = random_message(settings)
    model = Toy().make_model(1)
    optimizer = torch.optim.Adam(
        model.parameters(), LR, (settings.beta1, settings.beta2), settings.eps, settings.weight_decay, amsgrad=True
    )
    for p, v in zip(model.parameters(), random[wire.SECOND_MOMENT].values(), strict=True):
        moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.tensor(v), "max_exp_avg_sq": torch.tensor(v)}
        optimizer.state[p] = {"step": torch.tensor(1e6), **moments}
    stream = batches(Toy().examples(0, 30), settings.batch_size, torch.Generator().manual_seed(11))
    train(model, Toy().loss, stream, optimizer, 4)
    expected = {name: p.detach().numpy() - first_arrays()[name] for name, p in model.named_parameters()}
    same(ours, {wire.DELTA: expected}, rtol=1e-4, atol=1e-7)


# ---- terms that must be there


def test_the_scaffold_term_enters_the_step(settings_of: MakeSettings, tmp_path: Path) -> None:
    """With plain SGD it is a gradient: c = g for all steps doubles a step that goes on along a constant gradient."""
    settings = settings_of("scaffold", local_steps=1, weight_decay=0.0)
    gradient = {name: -a / LR for name, a in fit_with(settings, tmp_path)[wire.DELTA].items()}
    doubled = fit_with(settings, tmp_path, control=gradient)
    same(doubled, {wire.DELTA: {name: -2 * LR * g for name, g in gradient.items()}}, rtol=1e-5, atol=1e-7)


def test_the_control_variate_of_an_unused_parameter_stays(settings_of: MakeSettings, tmp_path: Path) -> None:
    """Its gradient is 0, so c_i has nothing to learn from it, whatever c is."""

    class Unused(ToyModel):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))

    for case in ("scaffold", "scaffold+adamw", "fadamgc"):
        settings = settings_of(case, weight_decay=0.0)
        client = FedClient(Toy(), Unused(), Toy().examples(0, 30), Toy().test_examples(), settings)
        model = {name: t.detach().numpy().copy() for name, t in exchanged_state(client.model).items()}
        control = {name: np.full_like(a, 0.5) for name, a in model.items()}
        config = {wire.PARTITION: 0, wire.SEED: 1, wire.LR: 0.1, wire.STEPS_DONE: 0.0}
        for server_round in (1, 2, 3):
            place = {
                wire.ROUND: server_round,
                wire.FOLDED: server_round - 1,
                wire.PINNED: [server_round - 1],
                wire.STATE_FOLDER: str(tmp_path / case),
            }
            returned, _, _ = client.fit({wire.MODEL: model, wire.CONTROL: control}, {**config, **place})
            np.testing.assert_allclose(returned[wire.CONTROL]["unused"], 0, atol=1e-5)


@pytest.mark.parametrize("local_epochs", [0, 2])
def test_control_variates_use_the_steps_really_done(
    local_epochs: int, settings_of: MakeSettings, tmp_path: Path
) -> None:
    """Option II: the change of c_i is (x^r - x_K) / (K eta) - c with K = 5, or 2 epochs of 4 batches."""
    settings = settings_of("scaffold", local_steps=5, local_epochs=local_epochs, local_optimizer="adamw")
    kept = keep_random_state(settings, tmp_path)[wire.CONTROL]
    returned, metrics = fit(settings, tmp_path)
    steps = metrics[wire.NUM_STEPS]
    assert steps == (8 if local_epochs else 5)
    c = random_message(settings)[0][wire.CONTROL]
    after = safetensors.numpy.load_file(tmp_path / "2" / "round-2.safetensors")
    for (name, delta), c_i in zip(returned[wire.DELTA].items(), kept, strict=True):
        change = -delta.astype(np.float64) / (steps * LR) - c[name]
        np.testing.assert_allclose(returned[wire.CONTROL][name], change, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(after[f"control/{name}"], c_i.numpy() + change, rtol=1e-4, atol=1e-5)


def test_fadamgc_tracks_the_mean_of_the_uncorrected_gradients(settings_of: MakeSettings, tmp_path: Path) -> None:
    """With a learning rate of hardly anything all gradients are those at x^r."""
    settings = settings_of("fadamgc", local_steps=3, batch_size=30)
    kept = keep_random_state(settings, tmp_path)[wire.CONTROL]
    client = FedClient(Toy(), Toy().make_model(3), Toy().examples(0, 30), Toy().test_examples(), settings)
    message, config = random_message(settings)
    returned, _, _ = client.fit(message, config | {wire.LR: 1e-9, wire.STATE_FOLDER: str(tmp_path)})
    model = Toy().make_model(1)
    Toy().loss(model, Toy().examples(0, 30)).backward()
    for (name, p), y_i in zip(model.named_parameters(), kept, strict=True):
        np.testing.assert_allclose(returned[wire.CONTROL][name], (p.grad - y_i).numpy(), rtol=1e-4, atol=1e-6)


def test_fedprox_stays_nearer_to_the_global_model(settings_of: MakeSettings, tmp_path: Path) -> None:
    moved = []
    for mu in (0.0, 1.0, 10.0):
        delta = fit_with(settings_of("fedprox", mu=mu, local_steps=30), tmp_path)[wire.DELTA]
        moved.append(sum(np.abs(a).sum() for a in delta.values()))
    assert moved[0] > moved[1] > moved[2] > 0


def test_every_method_reads_only_settings_that_it_names(settings_of: MakeSettings, tmp_path: Path) -> None:
    """`fedact methods` lists a method's own settings: changing any other one of the optimizers' changes nothing."""
    others = {
        "momentum": 0.5,
        "beta1": 0.5,
        "beta2": 0.5,
        "eps": 0.1,
        "mu": 2.0,
        "rho": 0.1,
        "tau": 0.2,
        "scope": "tensor",
        "align_eps": 0.1,
        "shrinkage": "off",
        "realign": "half",
        "personal_delta": False,
        "personal_layers": "embed",
    }

    def left(settings: Settings) -> dict[str, bytes]:
        """By a first round, on the server and on the client."""
        shutil.rmtree(tmp_path / "2", ignore_errors=True)
        returned = fit_with(settings, tmp_path)
        records = {f"{record}/{name}": a for record in returned for name, a in returned[record].items()}
        kept = {f"kept/{name}": a for name, a in kept_after(tmp_path, 1).items()}
        return {name: a.tobytes() for name, a in (records | kept).items()}

    for case, own in CASES.items():
        optimizer = own.get("local_optimizer", "auto")
        names = CLIENT_METHODS[own["method"]].settings_with(optimizer)
        plain = left(settings_of(case))
        strangers = {key: value for key, value in others.items() if key not in names}
        assert left(settings_of(case, **strangers)) == plain
        without_effect = {"rho", "scope", "realign"}  # which need a Delta, or many tensors
        if own["method"] == "fedact_align":
            without_effect |= {"align_eps"}  # likewise
        for key in set(others) & set(names) - without_effect:
            assert left(settings_of(case, **{key: others[key]})) != plain, (case, key)


def test_a_local_round_gives_what_was_sent_in_the_order_of_the_parameters(make_settings: MakeSettings) -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    sent = {"model": {"b": np.array([3], np.float32), "a": np.array([1, 2], np.float32), "buffer": np.zeros(4)}}
    local = LocalRound({"a": a, "b": b}, sent, 0.1, 1, 0.0, make_settings())
    assert [t.tolist() for t in local.received(wire.MODEL)] == [[1, 2], [3]]
    assert local.parameters == [a, b]
