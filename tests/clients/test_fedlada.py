"""FedLADA's optimizer against its algorithm in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from clients.fedlada import AmendedAMSGrad


def reference(x, gradients, v_bar, correction, lr, betas, eps, weight_decay, rho):
    m, v, v_max = np.zeros_like(x), v_bar.copy(), v_bar.copy()
    for noise in gradients:
        g = x**3 + noise + weight_decay * x  # coupled
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        v_max = np.maximum(v_max, v)
        x = x - lr * ((1 - rho) * m / (np.sqrt(v_max) + eps) + rho * correction)
    return x, v_max


@pytest.mark.parametrize("rho", [0.0, 0.4])
def test_follows_the_algorithm(rho: float) -> None:
    generator = np.random.default_rng(0)
    x, correction = generator.normal(size=(2, 5))
    v_bar = np.array([0.0, 0.1, 1.0, 50.0, 100.0])  # the maximum starts at v_bar, and the last two never leave it
    gradients = generator.normal(size=(6, 5))
    expected_x, expected_v = reference(x, gradients, v_bar, correction, 0.1, (0.8, 0.6), 1e-3, 0.3, rho)

    p = nn.Parameter(torch.tensor(x))
    optimizer = AmendedAMSGrad([p], 0.1, (0.8, 0.6), 1e-3, 0.3, rho, [torch.tensor(correction)], [torch.tensor(v_bar)])
    for noise in gradients:
        p.grad = p.detach() ** 3 + torch.tensor(noise)
        optimizer.step()
    np.testing.assert_allclose(p.detach().numpy(), expected_x, rtol=1e-12)
    (v_max,) = optimizer.second_moments()
    np.testing.assert_allclose(v_max.numpy(), expected_v, rtol=1e-12)
    assert v_max[3:].tolist() == [50, 100]


def test_decay_enters_the_moments() -> None:
    """Without any other gradient a step goes by the sign of x: m = .1 g, v_max = .001 g g, no bias correction."""
    p = nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = AmendedAMSGrad([p], 0.01, (0.9, 0.999), 0.0, 0.5, 0.0, [torch.zeros(2)], [torch.zeros(2)])
    p.grad = torch.zeros(2)
    optimizer.step()
    assert p.tolist() == pytest.approx([2 - 0.01 * 0.1 / 0.001**0.5, -1 + 0.01 * 0.1 / 0.001**0.5])
