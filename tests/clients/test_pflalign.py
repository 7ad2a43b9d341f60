"""pflalign's optimizer by hand and against its formula in float64, and what its clients keep."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from clients.client import FedClient, exchanged_state
from clients.pflalign import AlignedSGD
from fedact_flwr.settings import Settings, SettingsError, check_own_settings, parse, read_defaults
from strategies import wire
from tasks.digits import Digits
from tasks.task import Examples

MakeSettings = Callable[..., Settings]


def aligned(
    x: Sequence[float] | NDArray,
    delta: Sequence[float] | NDArray,
    v: Sequence[float] | NDArray,
    shrinkage: Sequence[float] | NDArray,
    dtype: torch.dtype = torch.float64,
    *,
    beta: float = 0.9,
    lr: float = 0.1,
    eps: float = 1e-12,
    decay: float = 0.0,
    steps: int = 1,
    **own: Any,
) -> tuple[nn.Parameter, AlignedSGD]:
    """A parameter at ``x``, which is x^r + Delta already, and its optimizer."""
    p = nn.Parameter(torch.tensor(x, dtype=dtype))
    kept = {
        name: [torch.tensor(a, dtype=dtype)]
        for name, a in (("delta", delta), ("second_moment", v), ("shrinkage", shrinkage))
    }
    return p, AlignedSGD([p], lr, beta, eps, decay, steps, **kept, **own)


def step(p: nn.Parameter, optimizer: AlignedSGD, gradient: Sequence[float] | NDArray) -> None:
    p.grad = torch.tensor(gradient, dtype=p.dtype)
    optimizer.step()


# ---- one step by hand


def test_a_step_by_hand() -> None:
    """b = 1/2, eta = .1, T = 2, v = (1, 0, 2), P = (.5, 0, 1), Delta = (.2, -.4, 0), g = (1, -2, 0).

    m = g/2 = (.5, -1, 0), v = v/2 + g g/2 = (1, 2, 1).
    P = P (1 - g g / (2 v)) + m m / (2 v): .5 * .5 + .25/2 = .375; 0 + 1/4 = .25; 1 * 1 + 0 = 1.
    |m| / sqrt(2 (v - m m)): .5 / sqrt(1.5) = .408248, whose erf is .436298; 1 / sqrt(2) = .707107: .682689; 0: 0.
    -m Delta: -.1, -.4, 0: of the first two, descent opposes Delta, so gamma = .718149, .841345; and .5.
    x = x - .1 P g - gamma Delta / 2: 1 - .0375 - .0718149; 2 + .05 + .168269; 3.
    """
    p, optimizer = aligned([1, 2, 3], [0.2, -0.4, 0], [1, 0, 2], [0.5, 0, 1], beta=0.5, steps=2)
    step(p, optimizer, [1, -2, 0])
    assert optimizer.second_moments()[0].tolist() == [1, 2, 1]
    assert optimizer.shrinkages()[0].tolist() == pytest.approx([0.375, 0.25, 1], abs=1e-9)
    assert p.tolist() == pytest.approx([0.8906851, 2.2182690, 3], abs=1e-6)


def test_descent_along_delta_keeps_more_of_it() -> None:
    """As above with the other sign of g: gamma = 1 - .718149 = .281851."""
    p, optimizer = aligned([1], [0.2], [1], [0.5], beta=0.5, steps=2)
    step(p, optimizer, [-1])
    assert p.tolist() == pytest.approx([1 + 0.0375 - 0.0281851], abs=1e-6)


@pytest.mark.parametrize(
    ("realign", "gamma"),
    [("sign", [1, 0, 0.5, 0.5]), ("never", [0] * 4), ("half", [0.5] * 4), ("always", [1] * 4)],
)
def test_other_gammas(realign: str, gamma: list[float]) -> None:
    """-m opposes Delta, agrees with it, is 0, and has no Delta to oppose."""
    delta, g = [0.2, 0.2, 0.2, 0.0], [1e-30, -1.0, 0.0, 1.0]
    p, optimizer = aligned([0] * 4, delta, [1] * 4, [0] * 4, lr=0.0, steps=4, realign=realign)
    step(p, optimizer, g)
    assert p.tolist() == pytest.approx([-c * d / 4 for c, d in zip(gamma, delta, strict=True)], abs=1e-12)


def test_a_certain_direction_is_followed_in_float32() -> None:
    """Without spread, v = m m, and down where the product of m and Delta is too small for a float."""
    p, optimizer = aligned([0.0], [1e-25], [0.0], [0.0], torch.float32, beta=0.0, lr=0.0)
    step(p, optimizer, [1e-5])
    assert p.tolist() == pytest.approx([-1e-25])
    p, optimizer = aligned([0.0], [1e-25], [0.0], [0.0], torch.float32, beta=0.0, lr=0.0, eps=1e-37)
    step(p, optimizer, [1e-22])
    assert p.item() < -0.5e-25


def test_without_shrinkage_and_realignment_it_is_sgd_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    x, delta, v, shrinkage = torch.rand(4, 50, generator=generator).unbind()
    ours, theirs = (nn.Parameter(x.clone()) for _ in range(2))
    own: dict[str, Any] = {"delta": [delta], "second_moment": [v], "shrinkage": [shrinkage]}
    aligned = AlignedSGD([ours], 0.1, 0.9, 1e-12, 0.3, 5, **own, shrink=False, realign="never")
    sgd = torch.optim.SGD([theirs], 0.1, weight_decay=0.3)
    for _ in range(5):
        ours.grad = torch.randn(50, generator=generator)
        theirs.grad = ours.grad.clone()
        aligned.step()
        sgd.step()
        assert torch.equal(ours, theirs)


def test_each_ablation_changes_what_it_says() -> None:
    """From one state: without shrinkage the part of eta P g, with another gamma the part of Delta, v and P in none."""
    x, delta, v, shrinkage, g = np.random.default_rng(3).normal(size=(5, 20))
    ends, parts = [], {}
    for own in ({}, {"shrink": False}, {"realign": "never"}, {"shrink": False, "realign": "never"}):
        p, optimizer = aligned(x, delta, np.abs(v), np.abs(shrinkage), **own)
        step(p, optimizer, g)
        parts[tuple(own)] = p.detach().numpy()
        ends.append((optimizer.second_moments()[0], optimizer.shrinkages()[0]))
    assert all(torch.equal(a, b) for end in ends[1:] for a, b in zip(end, ends[0], strict=True))
    after = ends[0][1].numpy()
    np.testing.assert_allclose(parts["shrink",], parts[()] - 0.1 * (1 - after) * g)
    np.testing.assert_allclose(parts["realign",], x - 0.1 * after * g)
    np.testing.assert_allclose(parts["shrink", "realign"], x - 0.1 * g)


def test_a_parameter_without_a_gradient_takes_no_part() -> None:
    kept = [[torch.tensor([a]), torch.tensor([a])] for a in (0.5, 2.0, 0.7)]
    p, q = (nn.Parameter(torch.tensor([1.0])) for _ in range(2))
    optimizer = AlignedSGD([p, q], 0.1, 0.9, 1e-12, 0.3, 2, delta=kept[0], second_moment=kept[1], shrinkage=kept[2])
    p.grad = torch.tensor([1.0])
    optimizer.step()
    assert p.item() != 1
    assert q.item() == 1
    assert optimizer.second_moments()[1].item() == 2
    assert optimizer.shrinkages()[1].item() == pytest.approx(0.7)
    assert optimizer.state[q]["m"].item() == 0
    p.grad = None
    optimizer.step()  # nobody has one


def test_what_is_not_allowed_is_refused() -> None:
    with pytest.raises(ValueError, match="realign = 'sometimes': allowed is one of probability, sign, never"):
        aligned([0.0], [0.0], [0.0], [0.0], realign="sometimes")
    with pytest.raises(ValueError, match="shorter"):
        AlignedSGD([nn.Parameter(torch.zeros(1))], 0.1, 0.9, 1e-12, 0, 1, delta=[], second_moment=[], shrinkage=[])


# ---- the range of P


@given(
    beta=st.sampled_from([0.0, 0.3, 0.9, 0.99]),
    eps=st.sampled_from([1e-12, 1e-3]),
    rounds=st.lists(
        st.lists(st.one_of(st.just(0.0), st.floats(-1, 1), st.sampled_from([1e-6, -1e3])), min_size=1, max_size=12),
        min_size=1,
        max_size=4,
    ),
)
@given_settings(deadline=None, max_examples=60)
def test_p_stays_in_its_range(beta: float, eps: float, rounds: list[list[float]]) -> None:
    """m starts again each round, v and P go on."""
    v, shrinkage = torch.zeros(1).tolist(), torch.zeros(1).tolist()
    for gradients in rounds:
        p, optimizer = aligned([0.0], [0.0], v, shrinkage, beta=beta, eps=eps)
        for g in gradients:
            step(p, optimizer, [g])
            assert 0 <= optimizer.shrinkages()[0].item() <= (1 + math.sqrt(beta)) ** 2 * (1 + 1e-9)
        v, shrinkage = optimizer.second_moments()[0].tolist(), optimizer.shrinkages()[0].tolist()


def shrinkage_after(gradients: Sequence[float], dtype: torch.dtype = torch.float64) -> float:
    p, optimizer = aligned([0.0], [0.0], [0.0], [0.0], dtype, beta=0.9, eps=1e-30, lr=0.0)
    for g in gradients:
        step(p, optimizer, [g])
    return optimizer.shrinkages()[0].item()


def test_p_may_be_above_1() -> None:
    """1 after a constant gradient, 1 + b after that stops, and near (1 + sqrt(b))^2 where it shrinks by sqrt(b)."""
    assert shrinkage_after([1.0] * 400) == pytest.approx(1)
    assert shrinkage_after([1.0] * 400 + [0.0] * 200) == pytest.approx(1.9)
    assert 3.5 < shrinkage_after([0.9 ** (k / 2) for k in range(500)]) < (1 + math.sqrt(0.9)) ** 2


@pytest.mark.parametrize("mean", [0.0, 0.5, 2.0])
def test_p_estimates_the_share_of_signal(mean: float) -> None:
    """Noise of deviation 1 around a mean: E[m m] / E[g g], where E[m m] = mean^2 + (1 - b) / (1 + b)."""
    generator, zeros = np.random.default_rng(0), np.zeros(2000)
    p, optimizer = aligned(zeros, zeros, zeros, zeros, lr=0.0)
    for _ in range(100):
        step(p, optimizer, mean + generator.normal(size=2000))
    share = (mean**2 + 0.1 / 1.9) / (mean**2 + 1)
    assert optimizer.shrinkages()[0].mean().item() == pytest.approx(share, rel=0.2)


# ---- whole rounds


def reference(
    x: NDArray, gradient: Callable[[NDArray], NDArray], rounds: int, steps: int, lr: float, b: float, eps: float
) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """A federation of one client, coordinate by coordinate: x^r after its rounds, and Delta, v and P."""
    n = len(x)
    delta, v, shrinkage = [0.0] * n, [0.0] * n, [0.0] * n
    x_glob = [float(a) for a in x]
    for _ in range(rounds):
        local, m = [a + d for a, d in zip(x_glob, delta, strict=True)], [0.0] * n
        for _ in range(steps):
            g = gradient(np.array(local))
            for i in range(n):
                m[i] = b * m[i] + (1 - b) * g[i]
                v[i] = b * v[i] + (1 - b) * g[i] ** 2
                ratio = (1 - b) / (v[i] + eps)
                shrinkage[i] = shrinkage[i] * (1 - ratio * g[i] ** 2) + ratio * m[i] ** 2
                certainty = math.erf(abs(m[i]) / math.sqrt(2 * max(v[i] - m[i] ** 2, 0) + eps))
                gamma = 0.5 - 0.5 * certainty * np.sign(-m[i] * delta[i])
                local[i] -= lr * shrinkage[i] * g[i] + gamma * delta[i] / steps
        delta = [a - d for a, d in zip(local, x_glob, strict=True)]
        x_glob = local
    return np.array(x_glob), np.array(delta), np.array(v), np.array(shrinkage)


TARGET = torch.tensor([1.0, -2.0, 0.5])


class Bowl(Digits):
    """Half the squared distance to TARGET, whatever the examples are."""

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        return (model.w - TARGET).square().sum() / 2  # type: ignore[operator]


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.unused = nn.Parameter(torch.ones(2))


def do_rounds(settings: Settings, folder: Path, rounds: int) -> tuple[NDArray, dict[str, NDArray], list[NDArray]]:
    """A federation of one client: w at the end, what the client has kept, and its deltas."""
    client = FedClient(Bowl(), Point(), {"x": torch.zeros(4)}, {}, settings)
    x = {name: t.detach().numpy().copy() for name, t in exchanged_state(client.model).items()}
    deltas = []
    for r in range(1, rounds + 1):
        config = {wire.PARTITION: 0, wire.SEED: r, wire.LR: settings.lr, wire.STEPS_DONE: 0.0}
        place = {wire.ROUND: r, wire.FOLDED: r - 1, wire.PINNED: [r - 1], wire.STATE_FOLDER: str(folder)}
        returned, _, _ = client.fit({wire.MODEL: x}, {**config, **place})
        assert returned.keys() == {wire.DELTA}
        deltas.append(returned[wire.DELTA]["w"])
        x = {name: a + returned[wire.DELTA][name] for name, a in x.items()}
    kept = safetensors.numpy.load_file(folder / "0" / f"round-{rounds}.safetensors")
    return x["w"], kept, deltas


SMALL: dict[str, Any] = {"method": "pflalign", "local_steps": 4, "lr": 0.3, "weight_decay": 0.0, "beta1": 0.6}


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_rounds_follow_the_algorithm(rounds: int, make_settings: MakeSettings, tmp_path: Path) -> None:
    """From the second on, Delta is not 0, m starts again, v and P go on."""
    x, kept, deltas = do_rounds(make_settings(**SMALL), tmp_path, rounds)
    expected = reference(np.zeros(3), lambda w: w - TARGET.numpy(), rounds, 4, 0.3, 0.6, 1e-12)
    np.testing.assert_allclose(x, expected[0], rtol=1e-5)
    for name, values in zip(("delta", "second_moment", "shrinkage"), expected[1:], strict=True):
        np.testing.assert_allclose(kept[f"{name}/w"], values, rtol=1e-4, atol=1e-6)
        assert kept[f"{name}/w"].dtype == np.float32
        assert not kept[f"{name}/unused"].any()
    assert kept["delta/w"].tobytes() == deltas[-1].tobytes()  # the reply's delta is the next Delta, to the bit


def test_without_a_delta_of_its_own_a_client_starts_at_the_global_model(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    """Then gamma does not matter, and without shrinkage it is FedAvg in all rounds; else round 2 is another."""
    fedavg = do_fedavg(3)
    without, off = {"personal_delta": False}, {"shrinkage": "off"}
    for realign in ("probability", "always"):
        settings = make_settings(**SMALL, **without, **off, realign=realign)
        x, kept, _ = do_rounds(settings, tmp_path / realign, 3)
        np.testing.assert_allclose(x, fedavg, rtol=1e-5)
        assert not kept["delta/w"].any()
        assert kept["second_moment/w"].all()
    other, _, _ = do_rounds(make_settings(**SMALL, **off), tmp_path / "other", 3)
    assert np.abs(other - fedavg).max() > 0.01
    never, _, _ = do_rounds(make_settings(**SMALL, **off, realign="never"), tmp_path / "never", 3)
    assert np.abs(never - other).max() > 0.01


def do_fedavg(rounds: int) -> NDArray:
    w = np.zeros(3)
    for _ in range(4 * rounds):
        w -= 0.3 * (w - TARGET.numpy())
    return w


# ---- settings


def test_its_settings_are_its_own() -> None:
    defaults = read_defaults()
    settings = parse(defaults | {"method": "pflalign"})
    assert (settings.beta1, settings.align_eps, settings.shrinkage) == (0.9, 1e-12, "on")
    assert (settings.realign, settings.personal_delta, settings.server_lr) == ("probability", True, 1.0)
    assert settings.lr == parse(defaults | {"method": "fedavg"}).lr
    own = {"beta1": 0.5, "align_eps": 1e-6, "shrinkage": "off", "realign": "half", "personal_delta": False}
    check_own_settings(parse(defaults | {"method": "pflalign"} | own))
    for key, value in own.items():
        with pytest.raises(SettingsError, match=f"{key} = {value!r}: fedavg .* has no such setting"):
            check_own_settings(parse(defaults | {"method": "fedavg", key: value}))
    for key in ("eps", "momentum", "mu"):
        with pytest.raises(SettingsError, match=f"{key} = 0.5: pflalign has no such setting"):
            check_own_settings(parse(defaults | {"method": "pflalign", key: 0.5}))
    for key, value in {"realign": 0.5, "shrinkage": True, "align_eps": 0.0, "personal_delta": "off"}.items():
        with pytest.raises(SettingsError, match=f"{key} = {value!r}: allowed is"):
            parse(defaults | {"method": "pflalign", key: value})


def test_its_replies_count_by_examples_unless_told_otherwise() -> None:
    defaults = read_defaults()
    assert parse(defaults | {"method": "pflalign"}).weighting == "examples"
    assert parse(defaults | {"method": "pflalign", "weighting": "uniform"}).weighting == "uniform"
    assert parse(defaults | {"method": "fedavg"}).weighting == "uniform"
    with pytest.raises(SettingsError, match="weighting = 'examples': allowed with aggregation = 'median' is 'uniform'"):
        parse(defaults | {"method": "pflalign", "aggregation": "median"})
    with pytest.raises(SettingsError, match="weighting = 3: allowed is one of 'uniform', 'examples' or \"auto\""):
        parse(defaults | {"weighting": 3})
