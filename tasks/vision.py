"""The paper's vision tasks, and Fashion-MNIST: 10 to 200 classes of images, and models from scratch."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tasks.augment import crop_and_flip
from tasks.classification import loss_and_accuracy
from tasks.images import Images, ImageSpec, load_images
from tasks.models import IMAGE_MODELS, make_image_model
from tasks.task import Defaults, Examples, Task, TaskSettings


class ImageTask(Task):
    """Classification of the images of ``spec``.

    Examples are {"image": uint8 (n, channels, height, width), "label": int64 (n,)}: bytes, so that a client's data
    stays on its device. Normalisation, and in training crops and flips, happen there when a batch is used.
    """

    spec: ClassVar[ImageSpec]
    mean: ClassVar[tuple[float, ...]]  # of each channel over the training images, in [0, 1]
    std: ClassVar[tuple[float, ...]]
    requires: Sequence[str] = ("PIL", "torchvision")
    settings_used: Sequence[str] = (
        "data",
        "augment",
        "vit_depth",
        "swin_width",
        "swin_depths",
        "cnn_width",
        "mlp_width",
    )
    models: Sequence[str] = tuple(IMAGE_MODELS)
    defaults: Mapping[str, Defaults] = {  # the paper's
        "adamw": {"lr": 3e-4, "weight_decay": 0.01},
        "adam": {"lr": 3e-4, "weight_decay": 0.001},
        "sgd": {"lr": 0.1, "weight_decay": 0.001},
    }

    settings: TaskSettings  # set by `configured`

    def configured(self, settings: TaskSettings) -> Self:
        task = copy(self)
        task.settings = settings
        return task

    def check(self, train: bool = True, test: bool = True) -> None:
        for wanted, is_train in ((train, True), (test, False)):
            if wanted:
                self._images(is_train)

    def train_labels(self) -> NDArray:
        return self._images(train=True).labels

    def train_examples(self, indices: NDArray) -> Examples:
        return _examples(self._images(train=True), indices)

    def test_examples(self) -> Examples:
        test = self._images(train=False)
        return _examples(test, np.arange(len(test.labels)))

    def _images(self, train: bool) -> Images:
        return load_images(self.spec, self.settings.data, train)

    def make_model(self, seed: int) -> nn.Module:
        return make_image_model(self.settings.model, self.spec.shape, self.spec.classes, self.settings, seed)

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        images = batch["image"]
        if self.settings.augment:
            images = crop_and_flip(images, padding=self.spec.shape[1] // 8)
        return F.cross_entropy(model(self._normalised(images)), batch["label"])

    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        return loss_and_accuracy(model, examples, self._normalised)

    def _normalised(self, images: Tensor) -> Tensor:
        mean, std = _per_channel(self.mean, images.device), _per_channel(self.std, images.device)
        return (images / 255 - mean) / std


@lru_cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """On the device once: a copy in each step would wait for it."""
    return torch.tensor(values, device=device)[:, None, None]


def _examples(images: Images, indices: NDArray) -> Examples:
    return {"image": torch.from_numpy(images.read(indices)), "label": torch.from_numpy(images.labels[indices])}


class Cifar10(ImageTask):
    summary = "CIFAR-10, 32x32 colour, 10 classes, 50,000 + 10,000 images"
    spec = ImageSpec("uoft-cs/cifar10", "img", "label", ("train", "test"), (3, 32, 32), 10)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Cifar100(ImageTask):
    summary = "CIFAR-100, 32x32 colour, 100 fine classes, 50,000 + 10,000 images"
    spec = ImageSpec("uoft-cs/cifar100", "img", "fine_label", ("train", "test"), (3, 32, 32), 100)
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


class TinyImageNet(ImageTask):
    summary = "Tiny ImageNet, 64x64 colour, 200 classes, 100,000 + 10,000 images (the validation set tests)"
    spec = ImageSpec("zh-plus/tiny-imagenet", "image", "label", ("train", "valid"), (3, 64, 64), 200)
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)


class FashionMnist(ImageTask):
    summary = "Fashion-MNIST, 28x28 grey, 10 classes, 60,000 + 10,000 images"
    spec = ImageSpec("zalando-datasets/fashion_mnist", "image", "label", ("train", "test"), (1, 28, 28), 10)
    mean, std = (0.2860,), (0.3530,)
    models: Sequence[str] = ("small_vit", "small_cnn", "vit_tiny", "swin_lite", "resnet18", "mlp")
    defaults: Mapping[str, Defaults] = {
        **ImageTask.defaults,
        "adamw": {"lr": 1e-3, "weight_decay": 0.01},
        "adam": {"lr": 1e-3, "weight_decay": 0.001},
    }
