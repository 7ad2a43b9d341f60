import math

import numpy as np
import pytest
import torch

from clients.diagnostics import direction_consistency, positive_score_ratio, top_score_mass


def test_direction_consistency_by_hand() -> None:
    same = torch.tensor([1.0, 2.0])
    assert direction_consistency([same, 3 * same]) == pytest.approx(1)
    right, up = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert direction_consistency([right, up]) == pytest.approx(1 / math.sqrt(2))
    # mean (0.5, 0): cosines 1 and 0 for the zero vector
    assert direction_consistency([right, torch.zeros(2)]) == pytest.approx(0.5)
    assert direction_consistency([right, -right]) == 0  # the mean is zero


def test_direction_consistency_of_models_in_parts() -> None:
    whole = [torch.tensor([3.0, 4.0, 1.0]), torch.tensor([-1.0, 2.0, 5.0])]
    parts = [[v[:2].numpy().reshape(2, 1), v[2:].numpy()] for v in whole]
    assert direction_consistency(parts) == pytest.approx(direction_consistency(whole))
    assert direction_consistency(np.stack([v.numpy() for v in whole])) == pytest.approx(direction_consistency(whole))


def test_positive_score_ratio() -> None:
    assert positive_score_ratio(torch.tensor([1.0, 0.0, -1.0, 2.0])) == 0.5
    assert positive_score_ratio(torch.tensor([])) == 0


def test_top_score_mass() -> None:
    score = torch.tensor([1.0, -4.0, 2.0, 3.0])
    assert top_score_mass(score, 0.5) == pytest.approx(0.7)
    assert top_score_mass(score, 0.3) == pytest.approx(0.7)  # ceil(1.2) = 2
    assert top_score_mass(score, 1.0) == pytest.approx(1)
    assert top_score_mass(torch.zeros(3), 0.5) == 0
