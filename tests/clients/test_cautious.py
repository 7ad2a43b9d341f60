"""Cautious AdamW against its algorithm in float64, and by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from clients.cautious import CautiousAdamW


def test_follows_the_algorithm_tensor_by_tensor() -> None:
    generator = np.random.default_rng(0)
    tensors = [generator.normal(size=4), generator.normal(size=(2, 3))]
    parameters = [nn.Parameter(torch.tensor(x)) for x in tensors]
    optimizer = CautiousAdamW(parameters, 0.1, (0.8, 0.6), 1e-3, 0.3)
    moments = [(np.zeros_like(x), np.zeros_like(x)) for x in tensors]
    shares = set()
    for k in range(1, 7):
        for i, p in enumerate(parameters):
            g = generator.normal(size=p.shape)
            p.grad = torch.tensor(g)
            m, v = 0.8 * moments[i][0] + 0.2 * g, 0.6 * moments[i][1] + 0.4 * g * g
            moments[i] = m, v
            u = m / (1 - 0.8**k) / (np.sqrt(v / (1 - 0.6**k)) + 1e-3)
            agree = u * g > 0
            shares.add(agree.mean())
            tensors[i] = (1 - 0.1 * 0.3) * tensors[i] - 0.1 * np.where(agree, u, 0) / max(agree.mean(), 1e-3)
        optimizer.step()
    assert len(shares) > 3  # some coordinates disagreed, at different times
    for p, x in zip(parameters, tensors, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-12)


def test_coordinates_that_disagree_stand_still_and_the_rest_steps_further() -> None:
    p = nn.Parameter(torch.tensor([0.0, 0.0]))
    optimizer = CautiousAdamW([p], 1.0, (0.9, 0.0), 0.0, 0.0)
    p.grad = torch.tensor([1.0, 1.0])
    optimizer.step()
    assert p.tolist() == pytest.approx([-1, -1])  # all agree: AdamW's first step
    p.grad = torch.tensor([-0.5, 1.0])
    optimizer.step()
    # m = .9 * .1 + .1 g = (.04, .19), v = g g, m_hat = m / .19: the first would step against its gradient -.5
    assert p.tolist() == pytest.approx([-1, -1 - 2 * 1.0])


def test_a_gradient_of_zero_is_no_agreement() -> None:
    p = nn.Parameter(torch.tensor([0.0, 0.0]))
    optimizer = CautiousAdamW([p], 1.0, (0.9, 0.9), 1e-8, 0.0)
    p.grad = torch.tensor([1.0, 1.0])
    optimizer.step()
    before = p.tolist()
    p.grad = torch.tensor([0.0, 1.0])  # the first still has momentum
    optimizer.step()
    assert p.tolist()[0] == before[0]
    assert p.tolist()[1] < before[1] - 1.5  # one of two agrees: twice AdamW's step


def test_the_share_is_the_tensors_own() -> None:
    """One of five agrees: it takes five times AdamW's step."""
    p = nn.Parameter(torch.zeros(5))
    optimizer = CautiousAdamW([p], 1.0, (0.9, 0.0), 0.0, 0.0)
    p.grad = torch.ones(5)
    optimizer.step()
    p.grad = torch.tensor([1.0, -0.5, -0.5, -0.5, -0.5])
    optimizer.step()
    assert p.tolist() == pytest.approx([-1 - 5, -1, -1, -1, -1])


def test_without_any_agreement_nothing_moves_and_decay_stays() -> None:
    p = nn.Parameter(torch.tensor([2.0]))
    optimizer = CautiousAdamW([p], 0.1, (0.9, 0.9), 1e-8, 0.5)
    p.grad = torch.tensor([0.0])
    optimizer.step()
    assert p.tolist() == pytest.approx([2 * (1 - 0.1 * 0.5)])
    p.grad = None
    optimizer.step()
    assert p.tolist() == pytest.approx([2 * (1 - 0.1 * 0.5)])
