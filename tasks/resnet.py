"""ResNet-18 for small images: He et al. 2016, arXiv:1512.03385."""

import torch
from torch import nn


def resnet18(channels: int, classes: int) -> nn.Module:
    """torchvision's ResNet-18 with the stem that small images need: 3x3 at stride 1, and no max-pooling.

    With BatchNorm, untrained, in the memory format that convolutions are fastest in.
    """
    from torchvision.models import resnet18

    model = resnet18(weights=None, num_classes=classes)
    model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's own
    model.maxpool = nn.Identity()
    return model.to(memory_format=torch.channels_last)
