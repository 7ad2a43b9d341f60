"""Methods whose clients have models of their own, and the evaluation of those models."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clients.client import FedClient, exchanged_state
from clients.fedact_align import RealignedActAdamW
from clients.personal import is_in, personal_layers
from clients.training import batches
from fedact_flwr.settings import Settings
from strategies import wire
from strategies.seeds import derive_seed
from tasks.digits import Digits
from tasks.task import Examples

MakeSettings = Callable[..., Settings]
SGD: dict[str, Any] = {"local_steps": 3, "batch_size": 4, "weight_decay": 0.0, "diagnostics": False}
LR = 0.1


class Normed(nn.Module):
    """A linear map of normalised inputs: buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)).squeeze(1)


class Line(Digits):
    """Squared errors."""

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        model.eval()
        return {"loss": self.loss(model, examples).item()}


def examples(n: int, seed: int) -> Examples:
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)) + 1
    return {"x": x, "y": 2 * x[:, 0] - x[:, 1]}


TRAIN, HELD_OUT = examples(10, 0), examples(5, 1)


def model_of(arrays: Mapping[str, NDArray]) -> Normed:
    model = Normed()
    model.load_state_dict({name: torch.tensor(a) for name, a in arrays.items()})
    return model


def arrays_of(model: nn.Module) -> dict[str, NDArray]:
    return {name: t.detach().numpy().copy() for name, t in exchanged_state(model).items()}


def received(seed: int) -> dict[str, NDArray]:
    torch.manual_seed(seed)
    model = Normed()
    model.norm.running_mean.fill_(0.3)
    return arrays_of(model)


def config(folder: Path, server_round: int, **own: Any) -> dict[str, Any]:
    before = max(server_round - 1, 0)
    place = {wire.ROUND: server_round, wire.FOLDED: before, wire.PINNED: [before], wire.STATE_FOLDER: str(folder)}
    return {wire.PARTITION: 0, wire.SEED: 10 + server_round, wire.LR: LR, wire.STEPS_DONE: 0.0} | place | own


def client_of(settings: Settings) -> FedClient:
    return FedClient(Line(), Normed(), TRAIN, HELD_OUT, settings)


def sgd_steps(model: nn.Module, seed: int, steps: int = 3, mu: float = 0.0, near: NDArray | Any = None) -> None:
    """Plain steps with the examples in the order of ``seed``; with mu those of Ditto's own model."""
    stream = batches(TRAIN, 4, torch.Generator().manual_seed(seed))
    model.train()
    for _ in range(steps):
        model.zero_grad()
        Line().loss(model, next(stream)).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= LR * (p.grad + (mu * (p - torch.tensor(near[name])) if mu else 0))


def kept(folder: Path, server_round: int) -> dict[str, NDArray]:
    return safetensors.numpy.load_file(folder / "0" / f"round-{server_round}.safetensors")


def close(ours: NDArray, theirs: Tensor | NDArray) -> None:
    np.testing.assert_allclose(ours, theirs.detach().numpy() if isinstance(theirs, Tensor) else theirs, atol=1e-5)


# ---- what is a client's own


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("auto", ["head.weight", "head.bias"]),
        ("auto, norm.bias", ["norm.bias", "head.weight", "head.bias"]),
        ("norm", ["norm.weight", "norm.bias"]),
        ("norm.bias, head.weight", ["norm.bias", "head.weight"]),
        ("norm,head", ["norm.weight", "norm.bias", "head.weight", "head.bias"]),
        ("hea", []),
    ],
)
def test_personal_layers(layers: str, names: list[str], make_settings: MakeSettings) -> None:
    settings = make_settings(method="fedper", personal_layers=layers)
    all_names = [name for name, _ in Normed().named_parameters()]
    found = personal_layers(settings, all_names)
    assert [name for name in all_names if is_in(name, found)] == names


@pytest.mark.parametrize(
    ("last", "auto"),
    [
        ("head.bias", "head"),
        ("model.layers.3.v_proj.lora_B.default.weight", "model.layers.3.v_proj"),  # and so its lora_A
        ("temperature", "temperature"),
    ],
)
def test_the_last_layer(last: str, auto: str, make_settings: MakeSettings) -> None:
    assert personal_layers(make_settings(method="fedper"), ["first.weight", last]) == [auto]


def test_a_client_alone_trains_as_if_there_were_no_server(make_settings: MakeSettings, tmp_path: Path) -> None:
    """Buffers and all; what the server hears is a model that does not move."""
    client, x = client_of(make_settings(method="local_only", **SGD)), received(0)
    alone = model_of(x)
    for r in (1, 2, 3):
        returned, _, _ = client.fit({wire.MODEL: x}, config(tmp_path, r))
        assert not any(returned[wire.DELTA][name].any() for name in x)
        sgd_steps(alone, 10 + r)
    metrics = client.evaluate_personally({wire.MODEL: x}, config(tmp_path, 4))
    for what, named in (("delta", alone.named_parameters()), ("buffers", alone.named_buffers())):
        for name, t in named:
            close(kept(tmp_path, 3)[f"{what}/{name}"] + (x[name] if what == "delta" else 0), t)
    assert metrics["personal_loss"] == pytest.approx(Line().evaluate(alone, HELD_OUT)["loss"], rel=1e-4)
    assert metrics["global_loss"] == pytest.approx(Line().evaluate(model_of(x), HELD_OUT)["loss"], rel=1e-6)


def test_fedpers_head_goes_on_and_its_body_is_the_servers(make_settings: MakeSettings, tmp_path: Path) -> None:
    client = client_of(make_settings(method="fedper", **SGD))
    client.fit({wire.MODEL: received(0)}, config(tmp_path, 1))
    head = {name: received(0)[name] + kept(tmp_path, 1)[f"delta/{name}"] for name in ("head.weight", "head.bias")}
    assert kept(tmp_path, 1).keys() == {"delta/head.weight", "delta/head.bias"}

    second = received(0) | {name: received(5)[name] for name in ("norm.weight", "norm.running_var")}
    second["norm.weight"] = second["norm.weight"] + 1
    expected = model_of(second | head)
    metrics = client.evaluate_personally({wire.MODEL: second}, config(tmp_path, 2))
    assert metrics["personal_loss"] == pytest.approx(Line().evaluate(expected, HELD_OUT)["loss"], rel=1e-5)

    returned, _, _ = client.fit({wire.MODEL: second}, config(tmp_path, 2))
    sgd_steps(expected, 12)
    ends = arrays_of(expected)
    close(second["norm.weight"] + returned[wire.DELTA]["norm.weight"], ends["norm.weight"])
    close(second["norm.running_mean"] + returned[wire.DELTA]["norm.running_mean"], ends["norm.running_mean"])
    close(second["head.weight"] + kept(tmp_path, 2)["delta/head.weight"], ends["head.weight"])
    assert not returned[wire.DELTA]["head.weight"].any()


def test_dittos_own_model_trains_near_the_global_one(make_settings: MakeSettings, tmp_path: Path) -> None:
    """From x^r in its first round, from itself in the next; the global model's steps know nothing of it."""
    client = client_of(make_settings(method="ditto", mu=0.7, **SGD))
    v = model_of(received(0))
    for r, x in ((1, received(0)), (2, received(7))):
        returned, _, _ = client.fit({wire.MODEL: x}, config(tmp_path, r))
        sgd_steps(v, derive_seed(10 + r, "again"), mu=0.7, near=x)
        for name, p in v.named_parameters():
            close(kept(tmp_path, r)[f"personal/{name}"], p)
        close(kept(tmp_path, r)["buffers/norm.running_mean"], v.norm.running_mean)
        shared = model_of(x)
        sgd_steps(shared, 10 + r)
        for name, end in arrays_of(shared).items():
            close(returned[wire.DELTA][name] + (x[name] if end.dtype == np.float32 else 0), end)
    metrics = client.evaluate_personally({wire.MODEL: received(7)}, config(tmp_path, 3))
    assert metrics["personal_loss"] == pytest.approx(Line().evaluate(v, HELD_OUT)["loss"], rel=1e-4)


def test_statistics_of_a_layer_of_its_own_stay_with_the_client(make_settings: MakeSettings, tmp_path: Path) -> None:
    """Both rounds as if norm and its buffers were a client's alone, and the head the server's."""
    client = client_of(make_settings(method="fedper", personal_layers="norm", **SGD))
    client.fit({wire.MODEL: received(0)}, config(tmp_path, 1))
    assert kept(tmp_path, 1).keys() == {
        "delta/norm.weight", "delta/norm.bias",
        "buffers/norm.running_mean", "buffers/norm.running_var", "buffers/norm.num_batches_tracked",
    }  # fmt: skip
    expected = model_of(received(0))
    sgd_steps(expected, 11)
    second = received(7)
    with torch.no_grad():
        expected.head.weight.copy_(torch.tensor(second["head.weight"]))
        expected.head.bias.copy_(torch.tensor(second["head.bias"]))
    metrics = client.evaluate_personally({wire.MODEL: second}, config(tmp_path, 2))
    assert metrics["personal_loss"] == pytest.approx(Line().evaluate(expected, HELD_OUT)["loss"], rel=1e-4)
    returned, _, _ = client.fit({wire.MODEL: second}, config(tmp_path, 2))
    sgd_steps(expected, 12)
    for name, end in arrays_of(expected).items():
        if name.startswith("head"):
            close(second[name] + returned[wire.DELTA][name], end)
    close(kept(tmp_path, 2)["buffers/norm.running_mean"], expected.norm.running_mean)
    for name in ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"):
        assert not returned[wire.DELTA][name].any()


# ---- fedact_align


def test_a_realigned_step_by_hand() -> None:
    """One step from m = v = 0: m_hat = g, v_hat = g g, so v_hat - m_hat m_hat = 0 and erf(|g| / sqrt(eps)) = 1.

    -m Delta of (1, -2, 0) and (.2, .4, .3): descent opposes the first Delta and follows the second, gamma = 1, 0, 1/2.
    rho = 0, phi = 1: u = (1, -1, 0), lr = .1: x = (1, 1, 1) - .1 u - gamma Delta / 2 = (.8, 1.1, .925).
    """
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = RealignedActAdamW(
        [p], 0.1, (0.9, 0.999), 0.0, 0.0, rho=0.0, tau=1.0, alpha=1.0, gamma=1.0,
        delta=[torch.tensor([0.2, 0.4, 0.3], dtype=torch.float64)], align_eps=1e-12, realign="probability", steps=2,
    )  # fmt: skip
    optimizer.state[p]["v"].fill_(1e-30)  # 0 / 0 where g is 0
    p.grad = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    optimizer.step()
    assert p.tolist() == pytest.approx([0.8, 1.1, 0.925], abs=1e-6)
    assert optimizer.let_go()[0].tolist() == pytest.approx([0.1, 0.0, 0.075], abs=1e-6)


def test_delta_g_is_made_of_the_steps_alone(make_settings: MakeSettings, tmp_path: Path) -> None:
    """x_K - x^r = Delta_i + K moved - what was let go, half of Delta_i here; whatever Delta_i is."""
    client = client_of(make_settings(method="fedact_align", realign="half", tau=1.0, alpha=1.0, gamma=1.0, **SGD))
    x = received(0)
    parameters = {name: a for name, a in x.items() if name.startswith("head") or name in ("norm.weight", "norm.bias")}
    zeros = {name: np.zeros_like(a) for name, a in parameters.items()}
    message = {wire.MODEL: x, wire.CORRECTION: zeros, wire.SECOND_MOMENT: zeros}
    client.fit(message, config(tmp_path, 1))
    delta = kept(tmp_path, 1)
    returned, _, _ = client.fit(message, config(tmp_path, 2))
    assert returned.keys() == {wire.DELTA, wire.SECOND_MOMENT, wire.CORRECTION}
    for name in parameters:
        moved = returned[wire.DELTA][name] - delta[f"delta/{name}"] / 2
        close(3 * returned[wire.CORRECTION][name], moved)
        assert kept(tmp_path, 2)[f"delta/{name}"].tobytes() == returned[wire.DELTA][name].tobytes()


# ---- the evaluation


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedper", "pflalign"])
def test_three_models_are_evaluated_and_nothing_is_kept(
    method: str, make_settings: MakeSettings, tmp_path: Path
) -> None:
    """The tuned one: three steps of four of the ten examples from the received model, at the message's rate."""
    settings = make_settings(method=method, local_optimizer="auto", **SGD)
    client, x = client_of(settings), received(0)
    client.fit({wire.MODEL: x}, config(tmp_path, 1))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    metrics = client.evaluate_personally({wire.MODEL: x}, config(tmp_path, 2))
    assert metrics == client.evaluate_personally({wire.MODEL: x}, config(tmp_path, 2))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == before
    assert metrics["global_loss"] == pytest.approx(Line().evaluate(model_of(x), HELD_OUT)["loss"], rel=1e-6)
    assert ("personal_loss" in metrics) == (method != "fedavg")
    assert metrics[wire.NUM_EXAMPLES] == 5
    if method != "pflalign":  # whose steps are its own
        tuned = model_of(x)
        sgd_steps(tuned, 12)
        assert metrics["tuned_loss"] == pytest.approx(Line().evaluate(tuned, HELD_OUT)["loss"], rel=1e-4)


def test_a_client_that_never_took_part_has_the_global_model(make_settings: MakeSettings, tmp_path: Path) -> None:
    for method in ("local_only", "fedper", "ditto", "pflalign"):
        client = client_of(make_settings(method=method, **SGD))
        metrics = client.evaluate_personally({wire.MODEL: received(0)}, config(tmp_path, 0))
        assert metrics["personal_loss"] == metrics["global_loss"]


def test_tuning_is_a_round_of_a_client_without_a_past(make_settings: MakeSettings, tmp_path: Path) -> None:
    """pflalign from Delta = v = P = 0, as in its first round, whatever it has kept since."""
    settings = make_settings(method="pflalign", **SGD)
    x = received(0)
    client = client_of(settings)
    returned, _, _ = client.fit({wire.MODEL: x}, config(tmp_path, 1))
    metrics = client.evaluate_personally({wire.MODEL: x}, config(tmp_path, 2, **{wire.SEED: 11}))
    tuned = {name: a + x[name] if a.dtype == np.float32 else a for name, a in returned[wire.DELTA].items()}
    assert metrics["tuned_loss"] == pytest.approx(Line().evaluate(model_of(tuned), HELD_OUT)["loss"], rel=1e-5)


def test_a_fine_tuning_that_diverges_costs_no_other_number(make_settings: MakeSettings, tmp_path: Path) -> None:
    client, x = client_of(make_settings(method="ditto", **SGD)), received(0)
    client.fit({wire.MODEL: x}, config(tmp_path, 1))
    good = client.evaluate_personally({wire.MODEL: x}, config(tmp_path, 2))
    bad = client.evaluate_personally({wire.MODEL: x}, config(tmp_path, 2, **{wire.LR: 1e30}))
    assert bad == {key: value for key, value in good.items() if not key.startswith("tuned")}


def test_identical_clients_are_one_client(make_settings: MakeSettings, tmp_path: Path) -> None:
    """The mean over clients with the same data, each in whole batches, is what one of them alone comes to.

    Without shrinkage and without a Delta of its own, plain averaging is what remains: FedAvg's model.
    """
    ends = {}
    for name, own, clients in (
        ("one", {"method": "pflalign"}, 1),
        ("three", {"method": "pflalign"}, 3),
        ("plain", {"method": "pflalign", "shrinkage": "off", "personal_delta": False}, 3),
        ("fedavg", {"method": "fedavg"}, 3),
    ):
        settings = make_settings(**(SGD | {"batch_size": 10} | own))
        client, x = client_of(settings), received(0)
        for r in (1, 2, 3):
            deltas = []
            for partition in range(clients):
                place = {wire.PARTITION: partition, wire.SEED: 100 * partition + r}
                returned, _, _ = client.fit({wire.MODEL: x}, config(tmp_path / name, r) | place)
                deltas.append(returned[wire.DELTA])
            x = x | {key: x[key] + np.mean([d[key] for d in deltas], 0) for key in x if x[key].dtype == np.float32}
        ends[name] = x
    for key, end in ends["one"].items():
        close(ends["three"][key], end)
        close(ends["plain"][key], ends["fedavg"][key])
    assert np.abs(ends["three"]["head.weight"] - ends["fedavg"]["head.weight"]).max() > 0.01
