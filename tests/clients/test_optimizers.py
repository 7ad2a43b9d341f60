"""ActAdamW against the algorithm in float64, its reductions to known optimizers, and its edges."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clients.optimizers import ActAdamW, StabilityWarning, stability_note, trust_modulation

# ---- trust_modulation


def test_trusts_exactly_the_largest() -> None:
    phi = trust_modulation(torch.tensor([0.1, 3.0, -2.0, 2.0, 0.5]), tau=0.4, alpha=2.5, gamma=0.4)
    assert phi.tolist() == pytest.approx([0.4, 2.5, 0.4, 2.5, 0.4])


def test_ties_go_to_the_lower_index() -> None:
    phi = trust_modulation(torch.tensor([1.0, 5.0, 1.0, 1.0, 1.0]), tau=0.6, alpha=1.0, gamma=0.0)
    assert phi.tolist() == [1, 1, 1, 0, 0]
    phi = trust_modulation(torch.zeros(4), tau=0.5, alpha=1.0, gamma=0.0)
    assert phi.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("d", "tau", "trusted"),
    [
        (5, 0.5, 2),
        (1, 0.5, 0),
        (1, 1.0, 1),
        (3, 1.0, 3),
        (3, 0.0, 0),
        (100, 0.29, 29),
        (10, 0.7, 7),
        (3, 0.34, 1),
    ],
)
def test_floor_of_tau_d_are_trusted(d: int, tau: float, trusted: int) -> None:
    phi = trust_modulation(torch.arange(float(d)), tau, alpha=1.0, gamma=0.0)
    assert phi.sum().item() == trusted
    assert phi[d - trusted :].all()


@given(
    st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 7.0]), min_size=1, max_size=40),
    st.integers(0, 100),
)
def test_agrees_with_a_stable_sort(scores: list[float], percent: int) -> None:
    trusted = percent * len(scores) // 100
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    expected = [3.0 if i in order[:trusted] else 0.25 for i in range(len(scores))]
    assert trust_modulation(torch.tensor(scores), percent / 100, 3.0, 0.25).tolist() == expected


# ---- against the algorithm


def reference_round(x, gradients, v, correction, t, lr, betas, eps, weight_decay, rho, tau, alpha, gamma, score):
    """One client's round of Algorithm 1 on one float64 vector; gives x_K and v_K."""
    m = np.zeros_like(x)
    b1, b2 = betas
    for k, gradient in enumerate(gradients, start=1):
        g = gradient(x)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        m_hat = m / (1 - b1**k)
        v_hat = v / (1 - b2 ** (t + k))
        local = m_hat / (np.sqrt(v_hat) + eps)
        u = (1 - rho) * local + rho * correction
        s = (u if score == "corrected" else local) * g
        top = np.argsort(-s, kind="stable")[: math.floor(tau * len(x))]
        phi = np.full_like(x, gamma)
        phi[top] = alpha
        x = (1 - lr * weight_decay) * x - lr * phi * u
    return x, v


@pytest.mark.parametrize("score", ["corrected", "local"])
@pytest.mark.parametrize(
    ("rho", "tau", "alpha", "gamma"), [(0.5, 0.5, 2.0, 0.5), (0.3, 0.25, 3.0, 0.1), (0.9, 1.0, 1.0, 1.0)]
)
def test_several_rounds_follow_the_algorithm(score: str, rho: float, tau: float, alpha: float, gamma: float) -> None:
    """Three rounds with the server's part by hand: v_bar, Delta_G and t carried between them."""
    generator = np.random.default_rng(0)
    steps, lr, betas, eps, weight_decay = 4, 0.05, (0.9, 0.99), 1e-8, 0.1
    x = generator.normal(size=12)
    v = np.zeros(12)
    correction = np.zeros(12)
    for server_round in range(3):
        noise = generator.normal(size=(steps, 12))
        gradients = [lambda x, n=n: x**3 + n for n in noise]
        t = server_round * steps
        expected_x, expected_v = reference_round(
            x, gradients, v, correction, t, lr, betas, eps, weight_decay, rho, tau, alpha, gamma, score
        )

        shapes = [(2, 3), (1,), (5,)]  # the same vector in three tensors
        parameters = [nn.Parameter(p) for p in as_tensors(x, shapes)]
        optimizer = ActAdamW(
            parameters, lr, betas, eps, weight_decay, rho, tau, alpha, gamma, score=score,
            correction=as_tensors(correction, shapes), second_moment=as_tensors(v, shapes), steps_done=t,
        )  # fmt: skip
        for n in noise:
            for p, part in zip(parameters, as_tensors(n, shapes), strict=True):
                p.grad = p.detach() ** 3 + part
            optimizer.step()

        actual_x, actual_v = as_vector(parameters), as_vector(optimizer.second_moments())
        np.testing.assert_allclose(actual_x, expected_x, rtol=1e-12)
        np.testing.assert_allclose(actual_v, expected_v, rtol=1e-12)
        correction = -(actual_x - x) / (steps * lr)
        x, v = actual_x, actual_v


def as_tensors(vector: np.ndarray, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    parts = np.split(vector, np.cumsum([math.prod(s) for s in shapes])[:-1])
    return [torch.tensor(part.reshape(shape)) for part, shape in zip(parts, shapes, strict=True)]


def as_vector(tensors: list[torch.Tensor]) -> np.ndarray:
    return np.concatenate([t.detach().numpy().ravel() for t in tensors])


def test_first_step_by_hand() -> None:
    """From v = 0, m_hat / sqrt(v_hat) is the sign of g; tau = 2/4 trusts the two largest u g."""
    x = nn.Parameter(torch.zeros(4))
    optimizer = ActAdamW([x], lr=0.1, weight_decay=0, rho=0, tau=0.5, eps=0)
    x.grad = torch.tensor([1.0, -4.0, 2.0, -3.0])
    optimizer.step()  # scores 1, 4, 2, 3; phi .5, 2, .5, 2
    assert x.tolist() == pytest.approx([-0.05, 0.2, -0.05, 0.2])


def test_scope_tensor_selects_within_each_tensor() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    for scope, expected in (("global", [0.5, 0.5, 2, 2]), ("tensor", [0.5, 2, 0.5, 2])):
        with torch.no_grad():
            a.zero_(), b.zero_()
        optimizer = ActAdamW([a, b], lr=1.0, weight_decay=0, rho=0, tau=0.5, eps=0, scope=scope)
        a.grad, b.grad = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        optimizer.step()
        assert (-torch.cat([a, b])).tolist() == pytest.approx(expected)


# ---- reductions


def train_network(make_optimizer, steps: int = 6) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    inputs, targets = torch.randn(20, 5).double(), torch.randint(3, (20,))
    optimizer = make_optimizer(list(model.parameters()))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13)


def test_rho_0_phi_1_from_zeros_is_adamw() -> None:
    ours = train_network(lambda p: ActAdamW(p, 0.01, weight_decay=0.1, rho=0, tau=1))
    theirs = train_network(lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1))
    assert_same(ours, theirs)


def test_rho_0_phi_1_is_adamw_started_from_v_bar() -> None:
    """AdamW after 10 steps whose first moment is dropped and whose bias correction of m starts anew."""
    t = 10

    class Started(torch.optim.AdamW):
        """Where b1 = 0, m is g and has no bias, so AdamW's own step count can start at t."""

        def __init__(self, p: list[torch.Tensor]) -> None:
            super().__init__(p, 0.01, (0.0, 0.99), weight_decay=0.1)
            for x in p:
                v = torch.full_like(x, 0.3)
                self.state[x] = {
                    "step": torch.tensor(float(t)),
                    "exp_avg": torch.zeros_like(x),
                    "exp_avg_sq": v,
                }

    ours = train_network(
        lambda p: ActAdamW(
            p, 0.01, (0.0, 0.99), weight_decay=0.1, rho=0, tau=1,
            second_moment=[torch.full_like(x, 0.3) for x in p], steps_done=t,
        )
    )  # fmt: skip
    assert_same(ours, train_network(Started))


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_alpha_equal_gamma_is_a_scaled_learning_rate(factor: float) -> None:
    modulated = train_network(lambda p: ActAdamW(p, 0.01, weight_decay=0, rho=0.2, alpha=factor, gamma=factor))
    scaled = train_network(lambda p: ActAdamW(p, 0.01 * factor, weight_decay=0, rho=0.2, tau=1))
    assert_same(modulated, scaled)


def test_weight_decay_is_scaled_by_neither_rho_nor_phi() -> None:
    x = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = ActAdamW([x], lr=0.1, weight_decay=0.5, rho=0.7, tau=0.5, alpha=9.0, gamma=0.0)
    x.grad = torch.zeros(2)
    optimizer.step()
    assert x.tolist() == pytest.approx([0.95, -1.9])


# ---- edges


def test_frozen_and_gradient_less_parameters_take_no_part() -> None:
    """d counts the two parameters with a gradient: floor(2 / 2) = 1 is trusted, not floor(6 / 2)."""
    used, unused, frozen = (
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2)),
    )
    frozen.requires_grad_(False)
    optimizer = ActAdamW(
        [unused, used, frozen], lr=1.0, weight_decay=0.1, rho=0, tau=0.5, eps=0,
        second_moment=[torch.full((2,), 5.0), torch.zeros(2)],
    )  # fmt: skip
    used.grad = torch.tensor([1.0, 2.0])
    optimizer.step()
    assert used.tolist() == pytest.approx([-0.5, -2.0])
    assert unused.tolist() == frozen.tolist() == [1, 1]
    moments = optimizer.second_moments()
    assert moments[0].tolist() == [5, 5]
    assert moments[1].tolist() == pytest.approx([0.001, 0.004])
    assert len(moments) == 2


def test_a_parameter_unused_in_one_step_goes_on_from_its_own_count() -> None:
    late = nn.Parameter(torch.zeros(1))
    other = nn.Parameter(torch.zeros(1))
    optimizer = ActAdamW([late, other], lr=1.0, weight_decay=0, rho=0, tau=1, eps=0)
    other.grad = torch.ones(1)
    optimizer.step()
    late.grad = torch.full((1,), 3.0)
    optimizer.step()
    assert late.item() == pytest.approx(-1.0)  # its first step: m_hat / sqrt(v_hat) = 1


def test_tied_parameters_count_once() -> None:
    embedding, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = embedding.weight
    tied = nn.ModuleList([embedding, head])
    assert len(ActAdamW(tied.parameters(), 0.1).second_moments()) == 1
    assert len(ActAdamW([embedding.weight, head.weight], 0.1).second_moments()) == 1


def test_a_step_without_any_gradient_does_nothing() -> None:
    x = nn.Parameter(torch.ones(3))
    ActAdamW([x], 0.1).step()
    assert x.tolist() == [1, 1, 1]


def test_tiny_tensors() -> None:
    x = nn.Parameter(torch.tensor(0.0))  # floor(.5 * 1) = 0 trusted: phi = gamma
    optimizer = ActAdamW([x], lr=1.0, weight_decay=0, rho=0, tau=0.5, eps=0)
    x.grad = torch.tensor(4.0)
    optimizer.step()
    assert x.item() == pytest.approx(-0.5)


def test_groups_keep_their_own_lr_and_weight_decay_and_share_the_selection() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = ActAdamW(
        [{"params": [a], "lr": 0.1}, {"params": [b], "weight_decay": 0.5}],
        lr=1.0,
        weight_decay=0,
        rho=0,
        tau=0.5,
        eps=0,
    )
    a.grad, b.grad = torch.tensor([1.0]), torch.tensor([2.0])
    optimizer.step()  # b has the larger score: phi 2 for b, .5 for a
    assert a.item() == pytest.approx(1 - 0.1 * 0.5)
    assert b.item() == pytest.approx(0.5 - 2)


def test_state_dict_restores_the_next_step() -> None:
    def fresh() -> tuple[nn.Parameter, ActAdamW]:
        x = nn.Parameter(torch.ones(3))
        return x, ActAdamW([x], 0.1, correction=[torch.tensor([1.0, 0, -1])])

    x, optimizer = fresh()
    x.grad = torch.tensor([1.0, 2, 3])
    optimizer.step()
    y, restored = fresh()
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        y.copy_(x)
    for p, o in ((x, optimizer), (y, restored)):
        p.grad = torch.tensor([0.5, -1, 2])
        o.step()
    assert torch.equal(x, y)


def test_keeps_scores_of_the_step_asked_for() -> None:
    x = nn.Parameter(torch.zeros(2))
    optimizer = ActAdamW([x], lr=0.1, rho=0, eps=0)
    optimizer.keep_scores_at = 2
    for step in (1, 2):
        x.grad = torch.tensor([1.0, -2.0])
        optimizer.step()
        assert (optimizer.scores is not None) == (step == 2)
    assert optimizer.scores is not None
    assert optimizer.scores.tolist() == pytest.approx([1.0, 2.0])  # constant g: u is its sign


def test_given_moments_are_copied() -> None:
    x = nn.Parameter(torch.zeros(2))
    v = torch.ones(2)
    optimizer = ActAdamW([x], 0.1, second_moment=[v])
    x.grad = torch.ones(2)
    optimizer.step()
    assert v.tolist() == [1, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1}, {"betas": (1.0, 0.9)}, {"eps": -1}, {"weight_decay": -1}, {"rho": 1.5}, {"tau": 2}, {"tau": 0},
        {"alpha": -1}, {"gamma": -1}, {"scope": "layer"}, {"score": "both"}, {"steps_done": -1},
        {"correction": [torch.zeros(3)]}, {"second_moment": []},
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ActAdamW([nn.Parameter(torch.zeros(2))], **({"lr": 0.1} | wrong))


def test_half_precision_parameters_are_refused() -> None:
    x = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = ActAdamW([x], 0.1)
    x.grad = torch.ones_like(x)
    with pytest.raises(ValueError, match="autocast"):
        optimizer.step()


def test_edge_of_stability_is_said_with_the_numbers() -> None:
    assert stability_note(rho=0.3, tau=0.5, alpha=2) is None
    note = stability_note(rho=0.5, tau=0.5, alpha=2)
    assert note is not None
    assert "2 * 0.5 = 1" in note
    assert "tau = 0.5" in note
    with pytest.warns(StabilityWarning, match="edge of stability"):
        ActAdamW([nn.Parameter(torch.zeros(1))], 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ActAdamW([nn.Parameter(torch.zeros(1))], 0.1, rho=0.2)
