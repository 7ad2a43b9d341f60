"""The NumPyClient and the training loop on a toy model with a buffer, a counter, a frozen and a tied parameter."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.client import NumPyClient
from torch import Tensor, nn

from clients.client import FedClient, exchanged_state, load_state
from clients.device import OutOfMemory, UnavailableDevice, prepare_device
from clients.training import NonFinite, batches, train
from fedact_flwr.settings import Settings
from strategies import STRATEGIES, wire
from tasks.task import Examples

MakeSettings = Callable[..., Settings]


class Toy(nn.Module):
    """y = head(norm(x)) + tail(x), with tail's weight tied to head's and head's bias frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)
        self.tail = nn.Linear(3, 2, bias=False)
        self.tail.weight = self.head.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)) + self.tail(x)


class ToyTask:
    def terms(self, batch: Examples) -> int:
        return len(batch["x"])

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            accuracy = (model(examples["x"]).argmax(1) == examples["y"]).float().mean().item()
            return {"loss": self.loss(model, examples).item(), "accuracy": accuracy}


def toy_examples(n: int = 30) -> Examples:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return {"x": x, "y": (x[:, 0] > 0).long()}


def toy_model() -> Toy:
    torch.manual_seed(3)
    return Toy()


def make_client(settings: Settings, n: int = 30) -> FedClient:
    return FedClient(ToyTask(), toy_model(), toy_examples(n), toy_examples(n=8), settings)  # type: ignore[arg-type]


def message_for(method: str, **config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    model = {name: t.detach().numpy().copy() for name, t in exchanged_state(toy_model()).items()}
    trainable = {name: model[name] for name in ("norm.weight", "norm.bias", "head.weight")}
    zeros = {name: np.zeros_like(x) for name, x in trainable.items()}
    records = {wire.MODEL: model, **dict.fromkeys(STRATEGIES[method].broadcast, zeros)}
    server = {wire.PARTITION: 4, wire.SEED: 11, wire.LR: 0.05, wire.STEPS_DONE: 0.0, wire.ROUND: 1, wire.FOLDED: 0}
    server[wire.PINNED] = [0]
    return records, server | {wire.STATE_FOLDER: tempfile.mkdtemp()} | config


def test_only_trainable_parameters_and_persistent_buffers_travel() -> None:
    assert list(exchanged_state(toy_model())) == [
        "norm.weight", "norm.bias", "head.weight", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip


def test_a_model_with_other_names_is_refused() -> None:
    arrays = {name: t.detach().numpy() for name, t in exchanged_state(toy_model()).items()}
    with pytest.raises(ValueError, match=r"norm\.bias"):
        load_state(toy_model(), {name: a for name, a in arrays.items() if name != "norm.bias"})


def test_fit_returns_deltas_of_all_that_travels_and_second_moments_of_what_trains(make_settings: MakeSettings) -> None:
    client = make_client(make_settings(local_steps=7))
    assert isinstance(client, NumPyClient)
    parameters, config = message_for("fedact")
    returned, n, metrics = client.fit(parameters, config)
    assert returned.keys() == {wire.DELTA, wire.SECOND_MOMENT}
    assert returned[wire.DELTA].keys() == parameters[wire.MODEL].keys()
    assert returned[wire.SECOND_MOMENT].keys() == {"norm.weight", "norm.bias", "head.weight"}
    assert all((v >= 0).all() and v.any() for v in returned[wire.SECOND_MOMENT].values())
    assert returned[wire.DELTA]["norm.num_batches_tracked"] == 7
    assert returned[wire.DELTA]["head.weight"].any()
    assert (n, metrics[wire.NUM_STEPS], metrics[wire.PARTITION]) == (30, 7, 4)


def test_fedact_local_differs_from_fedact_once_there_is_a_correction(make_settings: MakeSettings) -> None:
    """With Delta_G = 0 both scores order alike; with it they don't."""
    deltas = {}
    for scale in (0.0, 5.0):
        for method in ("fedact", "fedact_local"):
            parameters, config = message_for(method)
            head = np.linspace(-scale, scale, 6, dtype=np.float32).reshape(2, 3)
            parameters[wire.CORRECTION] = parameters[wire.CORRECTION] | {"head.weight": head}
            returned, _, _ = make_client(make_settings(method=method)).fit(parameters, config)
            deltas[method, scale] = returned[wire.DELTA]["head.weight"].tobytes()
    assert deltas["fedact", 0.0] == deltas["fedact_local", 0.0]
    assert deltas["fedact", 5.0] != deltas["fedact_local", 5.0]


def test_trust_diagnostics_can_be_off(make_settings: MakeSettings) -> None:
    on = make_client(make_settings()).fit(*message_for("fedact"))[2]
    off = make_client(make_settings(diagnostics=False)).fit(*message_for("fedact"))[2]
    assert 0 <= on["positive_score_ratio"] <= 1
    assert 0.1 <= on["top_score_mass"] <= 1  # the largest tenth carries at least a tenth
    assert not {"positive_score_ratio", "top_score_mass"} & off.keys()


def test_top_p_sets_how_much_of_the_score_counts(make_settings: MakeSettings) -> None:
    mass = [
        make_client(make_settings(top_p=p)).fit(*message_for("fedact"))[2]["top_score_mass"] for p in (0.1, 0.5, 1.0)
    ]
    assert mass[0] < mass[1] < mass[2] == pytest.approx(1)


def test_training_after_an_evaluation_is_training_again(make_settings: MakeSettings) -> None:
    client = make_client(make_settings(local_steps=7))
    client.evaluate(*message_for("fedact"))
    returned, _, _ = client.fit(*message_for("fedact"))
    assert returned[wire.DELTA]["norm.num_batches_tracked"] == 7


def test_local_epochs_set_the_number_of_steps(make_settings: MakeSettings) -> None:
    client = make_client(make_settings(local_epochs=3, batch_size=16))
    assert client.fit(*message_for("fedact"))[2][wire.NUM_STEPS] == 6  # 3 passes of ceil(30 / 16)


def test_bfloat16_compute_keeps_float32_state(make_settings: MakeSettings) -> None:
    exact = make_client(make_settings()).fit(*message_for("fedact"))[0]
    rounded = make_client(make_settings(precision="bfloat16")).fit(*message_for("fedact"))[0]
    assert rounded[wire.DELTA]["head.weight"].dtype == np.float32
    assert rounded[wire.SECOND_MOMENT]["head.weight"].dtype == np.float32
    assert rounded[wire.DELTA]["head.weight"].tobytes() != exact[wire.DELTA]["head.weight"].tobytes()


def test_clipping_comes_before_the_moments(make_settings: MakeSettings) -> None:
    returned, _, _ = make_client(make_settings(clip_norm=1e-3, local_steps=1)).fit(*message_for("fedact"))
    squared_norm = sum(v.sum() for v in returned[wire.SECOND_MOMENT].values()) / 0.001  # v = (1 - b2) g g
    assert squared_norm == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("size", [0, 1, 2, 4, 5, 9])
def test_micro_batches_give_the_gradient_of_the_whole_batch(size: int) -> None:
    """Loss sum(w x^2) / sum(w) over five examples of 1 to 5 terms w: its mean is not the mean of its parts' means.

    With w = 1, 2, 3, 4, 5 and x = 1, 0, 2, 1, 3 times p = 1: loss (1 + 0 + 12 + 4 + 45) / 15, gradient twice that.
    """
    examples = {"x": torch.tensor([1.0, 0.0, 2.0, 1.0, 3.0], dtype=torch.float64), "w": torch.arange(1, 6)}
    model = nn.ParameterList([nn.Parameter(torch.ones((), dtype=torch.float64))])
    seen = []

    def loss(net: nn.Module, batch: Examples) -> Tensor:
        seen.append(len(batch["x"]))
        return (batch["w"] * (next(net.parameters()) * batch["x"]) ** 2).sum() / batch["w"].sum()

    value = train(
        model,
        loss,
        iter([examples]),
        torch.optim.SGD(model.parameters(), lr=1.0),
        steps=1,
        micro_batch_size=size,
        terms=lambda batch: int(batch["w"].sum()),
    )
    assert value == pytest.approx(62 / 15, rel=1e-6)
    assert 1.0 - model[0].item() == pytest.approx(124 / 15, rel=1e-12)
    assert max(seen) <= (size or 5)


def test_micro_batches_are_a_setting(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = ToyTask.loss
    monkeypatch.setattr(ToyTask, "loss", lambda self, m, b: sizes.append(len(b["x"])) or original(self, m, b))
    make_client(make_settings(batch_size=8, micro_batch_size=3, local_steps=2)).fit(*message_for("fedact"))
    assert sizes == [3, 3, 2, 3, 3, 2]


def test_what_draws_while_training_does_not_follow_the_order_of_the_data(make_settings: MakeSettings) -> None:
    """The same numbers for both would tie an image's crop to its place in the data."""
    drawn = []

    class Drawing(ToyTask):
        def loss(self, model: nn.Module, batch: Examples) -> Tensor:
            drawn.append(torch.rand(4))
            return super().loss(model, batch)

    client = FedClient(Drawing(), toy_model(), toy_examples(), toy_examples(), make_settings(local_steps=1))  # type: ignore[arg-type]
    for _ in range(2):
        client.fit(*message_for("fedact"))
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != torch.rand(4, generator=torch.Generator().manual_seed(11))).all()


def test_evaluate_uses_the_held_out_examples(make_settings: MakeSettings) -> None:
    loss, n, metrics = make_client(make_settings()).evaluate(*message_for("fedact"))
    assert n == metrics[wire.NUM_EXAMPLES] == 8
    assert loss == metrics["loss"] > 0


# ---- batches


def test_batches_pass_over_the_data_in_fresh_orders() -> None:
    examples = {"x": torch.arange(10)}
    stream = batches(examples, 4, torch.Generator().manual_seed(0))
    drawn = torch.cat([next(stream)["x"] for _ in range(5)]).tolist()
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]


def test_a_client_smaller_than_a_batch_cycles_its_data() -> None:
    stream = batches({"x": torch.arange(3)}, 8, torch.Generator().manual_seed(0))
    for _ in range(4):
        assert sorted(next(stream)["x"].tolist()) == [0, 1, 2]


def test_one_example_is_enough(make_settings: MakeSettings) -> None:
    """BatchNorm can't train on one example; a model without it can."""
    model, task = nn.Linear(3, 2), ToyTask()
    loss = train(
        model,
        task.loss,
        batches(toy_examples(1), 16, torch.Generator().manual_seed(0)),
        torch.optim.SGD(model.parameters(), 0.1),
        steps=3,
    )
    assert np.isfinite(loss)


# ---- device


def test_a_device_that_is_not_there_is_refused() -> None:
    missing = next(d for d in ("mps", "cuda") if d != prepare_device("auto", 1).type)
    with pytest.raises(UnavailableDevice, match=f"device = '{missing}'.*'cpu'"):
        prepare_device(missing, 1)


def test_threads_are_set_each_time() -> None:
    for threads in (2, 1, 2, 1):
        prepare_device("cpu", threads)
        assert torch.get_num_threads() == threads


# ---- failure


class FailingTask(ToyTask):
    """In the given step the loss is ``fault(model)``."""

    def __init__(self, step: int, fault: Callable[[nn.Module], Tensor]) -> None:
        self.step, self.fault = step, fault

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        self.step -= 1
        return self.fault(model) if self.step == 0 else super().loss(model, batch)


def failing_client(settings: Settings, step: int, fault: Callable[[nn.Module], Tensor]) -> FedClient:
    return FedClient(FailingTask(step, fault), toy_model(), toy_examples(), {}, settings)  # type: ignore[arg-type]


def nan_loss(model: nn.Module) -> Tensor:
    return sum(p.sum() for p in model.parameters()) * float("nan")


def nan_gradient(model: nn.Module) -> Tensor:
    """0, where its derivative is 0 * inf."""
    w = model.head.weight
    return (w - w.detach()).abs().sqrt().sum()


@pytest.mark.parametrize("method", ["fedact", "scaffold", "local_only"])
@pytest.mark.parametrize(
    ("step", "fault", "message"),
    [
        (3, nan_loss, "the loss of step 3 of 10 is nan; a lower lr, or clip_norm, may help"),
        (10, nan_gradient, "is not finite after 10 steps; a lower lr, or clip_norm, may help"),
    ],
)
def test_what_is_not_finite_is_not_sent_and_not_kept(
    method: str, step: int, fault: Any, message: str, make_settings: MakeSettings
) -> None:
    parameters, config = message_for(method)
    with pytest.raises(NonFinite, match=message):
        failing_client(make_settings(method=method, lr=0.05), step, fault).fit(parameters, config)
    assert list(Path(config[wire.STATE_FOLDER]).iterdir()) == []


@pytest.mark.parametrize(
    "fault",
    [
        lambda model: torch.empty(2**50).sum(),
        lambda model: torch.from_numpy(np.ones(2**50)).sum(),
        lambda model: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    ],
    ids=["torch's CPU", "numpy", "CUDA"],
)
def test_out_of_memory_says_what_to_lower(fault: Any, make_settings: MakeSettings) -> None:
    client = failing_client(make_settings(batch_size=16), 2, fault)
    with pytest.raises(OutOfMemory, match=r"out of memory with 16 examples at once .*set micro_batch_size below that"):
        client.fit(*message_for("fedact"))
    assert np.isfinite(client.fit(*message_for("fedact"))[0][wire.DELTA]["head.weight"]).all()  # it can go on


def test_other_errors_are_left_as_they_are(make_settings: MakeSettings) -> None:
    client = failing_client(make_settings(), 1, lambda model: model(torch.zeros(4, 99)).sum())
    with pytest.raises(RuntimeError, match="running_mean should contain 99"):
        client.fit(*message_for("fedact"))
