"""Swin-Lite, a small Swin Transformer: Liu et al. 2021, arXiv:2103.14030."""

from torch import nn

PATCH, WINDOW = 2, 4
WIDTH_PER_HEAD = 16


def swin_lite(size: int, channels: int, classes: int, width: int, depths: tuple[int, ...]) -> nn.Module:
    """torchvision's Swin with patches of 2, windows of 4 and heads of width 16, untrained, without stochastic depth.

    The FedACT paper compares a "Swin-Lite" whose shape it does not give; this one is the choice made here. Each stage
    but the first halves the side and doubles the width; windows are padded where they don't fit.
    """
    from torchvision.models import SwinTransformer

    model = SwinTransformer(
        patch_size=[PATCH, PATCH],
        embed_dim=width,
        depths=list(depths),
        num_heads=[width * 2**stage // WIDTH_PER_HEAD for stage in range(len(depths))],
        window_size=[WINDOW, WINDOW],
        stochastic_depth_prob=0.0,
        num_classes=classes,
    )
    if channels != 3:
        model.features[0][0] = nn.Conv2d(channels, width, PATCH, PATCH)
    return model
