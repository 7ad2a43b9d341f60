"""Fewer bits on the wire, from the server to the clients and back; `tests/strategies/test_codecs.py` has the codes."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from numpy.typing import NDArray

from clients.client import FedClient, exchanged_state, trainable_parameters
from clients.state import ClientState
from fedact_flwr import server_app
from fedact_flwr.client_app import _workplace
from fedact_flwr.client_app import app as client_app
from fedact_flwr.inprocess import InProcessGrid
from fedact_flwr.settings import Settings, SettingsError, dump, parse, read_defaults
from strategies import wire
from strategies.codecs import decode
from tasks import TASKS

MakeSettings = Callable[..., Settings]
ALL = ("wire_delta", "wire_correction", "wire_second_moment")
SMALL = {"rounds": 3, "clients": 3, "clients_per_round": 3, "name": "run", "split": "iid"}


class Listening(InProcessGrid):
    """Keeps what was sent and received, by round. The replies of the partitions in ``refused`` are no good."""

    def __init__(self, settings: Settings, refused: dict[int, tuple[int, ...]] | None = None) -> None:
        super().__init__(client_app, settings.clients, dump(settings))
        self.refused = refused or {}
        self.sent: dict[int, list[Message]] = {}
        self.received: dict[int, list[Message]] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == "train":
                self.sent.setdefault(int(message.metadata.group_id), []).append(message)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        answers = list(super().pull_messages(message_ids))
        for answer in answers:
            if answer.metadata.message_type == "train":
                server_round = int(answer.metadata.group_id)
                partition = answer.content[wire.METRICS][wire.PARTITION]
                if partition in self.refused.get(server_round, ()):
                    del answer.content[wire.METRICS]
                self.received.setdefault(server_round, []).append(answer)
        return answers


def final_model(settings: Settings, monkeypatch: pytest.MonkeyPatch, grid: InProcessGrid) -> dict[str, NDArray]:
    models: list[dict[str, NDArray]] = []
    write = server_app.RunRecord.write_model

    def kept(record: Any, model: Any) -> None:
        models.append({name: p.detach().numpy().copy() for name, p in model.named_parameters()})
        write(record, model)

    monkeypatch.setattr(server_app.RunRecord, "write_model", kept)
    server_app.run(settings, grid)
    return models[-1]


def distance(one: dict[str, NDArray], other: dict[str, NDArray]) -> float:
    """Relative; entry by entry Adam makes much of rounding, where gradients are nothing else (biases of keys)."""
    a, b = (np.concatenate([model[name].ravel() for name in other]) for model in (one, other))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def arrays_of(message: Message, record: str) -> dict[str, NDArray]:
    return wire.from_record(message.content[record])


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_narrow_records_say_what_float32_ones_do(
    form: str, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second round, up to the rounding: the Delta_G and v_bar that were sent, and the mean of the deltas."""
    grids = {}
    for name, travels in (("float32", "float32"), (form, form)):
        settings = make_settings(**SMALL | {"name": name, "rounds": 2} | dict.fromkeys(ALL, travels))
        grids[name] = Listening(settings)
        final_model(settings, monkeypatch, grids[name])
    shapes = arrays_of(grids["float32"].sent[2][0], wire.MODEL)
    for record in (wire.CORRECTION, wire.SECOND_MOMENT):
        wanted = arrays_of(grids["float32"].sent[2][0], record)
        got = decode(record, arrays_of(grids[form].sent[2][0], record), form, (), shapes)
        error = sum(float(((got[n] - wanted[n]) ** 2).sum()) for n in wanted)
        size = sum(float((wanted[n] ** 2).sum()) for n in wanted)
        assert error < 0.04 * size, record
        for name, array in arrays_of(grids[form].sent[2][0], record).items():
            assert array.nbytes < shapes[name].nbytes * (0.51 if form == "bfloat16" else 0.26) + 16


def test_clients_derive_the_correction_from_two_models(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta_G goes in round 1 to all, then to those alone whose last reply was refused; the model is the same."""
    models = {}
    for travels in ("float32", "derived"):
        settings = make_settings(**SMALL | {"name": travels}, method="fedadamw", server_lr=0.7, wire_correction=travels)
        grid = Listening(settings, refused={2: (1,)})
        models[travels] = final_model(settings, monkeypatch, grid)
        if travels == "derived":
            got = {r: [wire.CORRECTION in m.content for m in messages] for r, messages in grid.sent.items()}
            assert got == {1: [True] * 3, 2: [False] * 3, 3: [False, True, False]}
    assert distance(models["derived"], models["float32"]) < 2e-4


def test_arrays_that_flower_has_once_because_they_are_equal(make_settings: MakeSettings, tmp_path: Path) -> None:
    """So do messages arrive over a network; norms are ones, and biases zeros, at first."""
    settings = make_settings(**SMALL, wire_correction="derived")
    task = TASKS["digits"].configured(settings)
    model = task.make_model(0)
    examples = task.train_examples(np.arange(20))
    arrays = {name: p.detach().numpy().copy() for name, p in exchanged_state(model).items()}
    shared = {(a.shape, a.tobytes()): a for a in arrays.values()}
    arrays = {name: shared[a.shape, a.tobytes()] for name, a in arrays.items()}
    assert len(shared) < len(arrays)
    zeros = {name: np.zeros_like(a) for name, a in arrays.items()}
    message = {wire.MODEL: arrays, wire.CORRECTION: zeros, wire.SECOND_MOMENT: zeros}
    config = {wire.PARTITION: 0, wire.SEED: 1, wire.LR: 0.1, wire.STEPS_DONE: 0.0, wire.ROUND: 1, wire.FOLDED: 0}
    config |= {wire.PINNED: [0], wire.STATE_FOLDER: str(tmp_path)}
    FedClient(task, model, examples, examples, settings).fit(message, config)
    (kept,) = ClientState(tmp_path, 0).load(1, {wire.MODEL: dict(trainable_parameters(model))}).values()
    assert all(np.array_equal(a, x.numpy()) for a, x in zip(arrays.values(), kept, strict=True))


def test_after_a_failed_round_all_are_sent_the_correction(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody waits for ever for what clients have lost."""
    settings = make_settings(**SMALL | {"min_replies": 3}, wire_correction="derived")
    grid = Listening(settings, refused={2: (1,)})
    final_model(settings, monkeypatch, grid)
    got = {r: [wire.CORRECTION in m.content for m in messages] for r, messages in grid.sent.items()}
    assert got == {1: [True] * 3, 2: [False] * 3, 3: [True] * 3}


def test_the_correction_is_derived_with_the_learning_rate_that_made_it(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed with more rounds has another schedule from there on."""
    models = {}
    for travels in ("float32", "derived"):
        own = {"name": travels, "method": "fedadamw", "checkpoint_every": 1, "lr_schedule": "cosine"}
        settings = make_settings(**SMALL | own | {"rounds": 2}, wire_correction=travels)
        server_app.run(settings, Listening(settings))
        longer = settings.model_copy(update={"rounds": 4, "resume": f"{settings.output}/{travels}"})
        grid = Listening(longer)
        models[travels] = final_model(longer, monkeypatch, grid)
        assert all((wire.CORRECTION in m.content) == (travels == "float32") for m in grid.sent[3])
    assert distance(models["derived"], models["float32"]) < 2e-4


@pytest.mark.parametrize("method", ["fedact", "fedlada"])
@pytest.mark.parametrize("form", ["bfloat16", "int8", "derived"])
def test_parameters_that_are_single_numbers(
    method: str, form: str, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.0))
            self.head = torch.nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.scale * x.flatten(1))

    monkeypatch.setattr(type(TASKS["digits"]), "make_model", lambda self, seed: Scaled())
    _workplace.cache_clear()
    own = {"wire_correction": form}
    if form != "derived":
        own |= {"wire_delta": form} | ({"wire_second_moment": form} if method == "fedact" else {})
    settings = make_settings(**SMALL, method=method, **own)
    model = final_model(settings, monkeypatch, Listening(settings))
    _workplace.cache_clear()
    assert model["scale"].shape == ()
    assert model["scale"] != 1


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"wire_delta": "int4"}, "wire_delta = 'int4': allowed is one of 'float32', 'bfloat16', 'int8'"),
        ({"wire_second_moment": "int8", "second_moment": "block"}, "wire_second_moment = 'int8': allowed with second"),
        (
            {"wire_delta": "int8", "aggregation": "median"},
            "wire_delta = 'int8': rounding at random is right",
        ),
        ({"wire_correction": "derived", "local_epochs": 1}, "wire_correction = 'derived': clients that do different"),
    ],
)
def test_settings_that_can_not_be(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingsError, match=line):
        parse(read_defaults() | settings)


def test_eight_bytes_per_parameter_both_ways(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What FedAvg moves in float32, without any rounding: v as block means, and Delta_G found by the clients."""
    settings = make_settings(**SMALL, wire_correction="derived", second_moment="block", local_steps=1)
    grid = Listening(settings)
    model = final_model(settings, monkeypatch, grid)
    d = sum(x.size for x in model.values())
    for message, reply in zip(grid.sent[2], grid.received[2], strict=True):
        moved = sum(
            array.nbytes
            for content in (message.content, reply.content)
            for record in wire.array_records(content).values()
            for array in wire.from_record(record).values()
        )
        blocks = sum(means.size for means in arrays_of(message, wire.SECOND_MOMENT).values())
        assert blocks < d / 500
        assert moved == 8 * d + 2 * 4 * blocks
