from collections.abc import Callable

import numpy as np
import pytest
import torch

from clients.training import batches, train
from fedact_flwr.settings import Settings
from tasks import TASKS
from tasks.vit import ViT

DIGITS = TASKS["digits"]


def test_data_is_the_real_one_with_a_fixed_balanced_test_set() -> None:
    labels = DIGITS.train_labels()
    test = DIGITS.test_examples()
    assert len(labels) == 1437
    assert test["image"].shape == (360, 1, 8, 8)
    assert test["image"].dtype == torch.float32
    assert test["image"].min() == -1
    assert test["image"].max() == 1
    counts = np.bincount(test["label"])
    assert counts.min() >= 34
    assert counts.max() <= 37


def test_examples_follow_the_indices() -> None:
    examples = DIGITS.train_examples(np.array([5, 2]))
    assert examples["label"].tolist() == DIGITS.train_labels()[[5, 2]].tolist()
    assert examples["image"].shape == (2, 1, 8, 8)


def test_models_are_a_function_of_the_seed_and_leave_the_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, same, other = (DIGITS.make_model(seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)


def test_the_small_cnn_has_its_width(make_settings: Callable[..., Settings]) -> None:
    model = DIGITS.configured(make_settings(model="small_cnn", cnn_width=4)).make_model(0)
    convolutions = 9 * 4 + 9 * 4 * 8
    assert sum(p.numel() for p in model.parameters()) == convolutions + 2 * (4 + 8) + 8 * 2**2 * 10 + 10
    assert isinstance(DIGITS.configured(make_settings()).make_model(0), ViT)


def test_evaluate_counts_right_answers() -> None:
    class Constant(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.eye(10)[3].expand(len(images), 10)

    labels = torch.tensor([3] * 600 + [4] * 200)  # more than one evaluation batch
    metrics = DIGITS.evaluate(Constant(), {"image": torch.zeros(800, 1, 8, 8), "label": labels})
    right, wrong = np.log(9 + np.e) - 1, np.log(9 + np.e)
    assert metrics["accuracy"] == pytest.approx(0.75)
    assert metrics["loss"] == pytest.approx(0.75 * right + 0.25 * wrong)


def test_the_vit_learns_the_digits_centrally() -> None:
    model = DIGITS.make_model(0)
    examples = DIGITS.train_examples(np.arange(1437))
    stream = batches(examples, 32, torch.Generator().manual_seed(0))
    train(model, DIGITS.loss, stream, torch.optim.AdamW(model.parameters(), 3e-3), steps=300)
    assert DIGITS.evaluate(model, DIGITS.test_examples())["accuracy"] > 0.8


def test_vit_shapes() -> None:
    model = ViT(image_size=12, patch=3, channels=3, classes=7, width=16, depth=1, heads=2, mlp=32)
    assert model.positions.shape == (1, 17, 16)
    assert model(torch.zeros(5, 3, 12, 12)).shape == (5, 7)
