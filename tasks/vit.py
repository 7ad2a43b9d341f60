"""A plain Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929), pre-norm, without dropout."""

import torch
from torch import Tensor, nn


class ViT(nn.Module):
    """Patches, class token, learned positions, ``depth`` blocks, linear head on the class token.

    Images of shape (batch, channels, image_size, image_size) to logits of shape (batch, classes). ``width`` must
    be a multiple of ``heads``, ``image_size`` one of ``patch``.
    """

    def __init__(
        self,
        image_size: int,
        patch: int,
        channels: int,
        classes: int,
        width: int,
        depth: int,
        heads: int,
        mlp: int,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + (image_size // patch) ** 2, width))
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, mlp, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))
