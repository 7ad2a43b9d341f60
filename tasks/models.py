"""Image models from scratch, by name."""

from collections.abc import Callable

import torch
from torch import nn

from tasks.cnn import SmallCNN
from tasks.mlp import MLP
from tasks.resnet import resnet18
from tasks.swin import swin_lite
from tasks.task import TaskSettings
from tasks.vit import ViT

# From the side of an image, its channels, the number of classes and the settings.
IMAGE_MODELS: dict[str, Callable[[int, int, int, TaskSettings], nn.Module]] = {
    "vit_tiny": lambda size, channels, classes, s: ViT(
        size, 8 if size == 64 else 4, channels, classes, width=192, depth=s.vit_depth, heads=3, mlp=768
    ),
    "swin_lite": lambda size, channels, classes, s: swin_lite(
        size, channels, classes, s.swin_width, tuple(int(depth) for depth in s.swin_depths.split(","))
    ),
    "resnet18": lambda size, channels, classes, s: resnet18(channels, classes),
    "small_vit": lambda size, channels, classes, s: ViT(
        size, size // 4, channels, classes, width=48, depth=2, heads=4, mlp=96
    ),
    "small_cnn": lambda size, channels, classes, s: SmallCNN(size, channels, classes, s.cnn_width),
    "mlp": lambda size, channels, classes, s: MLP(size**2 * channels, classes, s.mlp_width),
}


def make_image_model(
    name: str, shape: tuple[int, int, int], classes: int, settings: TaskSettings, seed: int
) -> nn.Module:
    """A freshly initialised model for images of ``shape`` (channels, height, width), float32 on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return IMAGE_MODELS[name](shape[1], shape[0], classes, settings)
