"""Handwritten digits, 8 x 8 grey, 10 classes: the 1,797 real images that come with scikit-learn."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tasks.classification import cross_entropy, loss_and_accuracy
from tasks.cnn import SmallCNN
from tasks.task import Defaults, Examples, Task, TaskSettings
from tasks.vit import ViT

TEST_SHARE = 0.2


class Digits(Task):
    """A small ViT, or a convolutional network, on the optical digits of UCI (Alpaydin and Kaynak 1998).

    There are 1,437 to train and 360 to test. The test set is one fifth of each class, the same in every run whatever
    its seed.
    """

    summary = "scikit-learn's handwritten digits, 8x8 grey, 10 classes; ViT of 2 blocks, width 48, or a small CNN"
    settings_used: Sequence[str] = ("cnn_width",)
    models: Sequence[str] = ("vit", "small_cnn")
    defaults: Mapping[str, Defaults] = {
        "adamw": {"lr": 3e-3, "weight_decay": 0.01},
        "adam": {"lr": 3e-3, "weight_decay": 0.001},
        "sgd": {"lr": 0.1, "weight_decay": 0.001},
    }

    cnn_width = 0  # of small_cnn; 0 is vit

    def configured(self, settings: TaskSettings) -> Self:
        task = copy(self)
        task.cnn_width = settings.cnn_width if settings.model == "small_cnn" else 0
        return task

    def train_labels(self) -> NDArray:
        return _data()["train"][1]

    def train_examples(self, indices: NDArray) -> Examples:
        images, labels = _data()["train"]
        return {"image": torch.from_numpy(images[indices]), "label": torch.from_numpy(labels[indices])}

    def test_examples(self) -> Examples:
        images, labels = _data()["test"]
        return {"image": torch.from_numpy(images), "label": torch.from_numpy(labels)}

    def make_model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.cnn_width:
                return SmallCNN(8, 1, 10, self.cnn_width)
            return ViT(image_size=8, patch=2, channels=1, classes=10, width=48, depth=2, heads=4, mlp=96)

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        return cross_entropy(model, batch)

    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        return loss_and_accuracy(model, examples)


@lru_cache
def _data() -> dict[str, tuple[NDArray, NDArray]]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 1, 8, 8) / 8 - 1).astype("float32")  # pixels 0..16 to -1..1
    parts = train_test_split(images, labels, test_size=TEST_SHARE, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = parts
    return {"train": (train_images, train_labels), "test": (test_images, test_labels)}
