"""Second moments as means over blocks: n numbers stand for n runs of equal length, in the tensor's memory order."""

from collections.abc import Sequence

from torch import Tensor


def block_means(vectors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The means over blocks, as many per tensor as its ``like`` has; tensors shaped like it are given back as such."""
    return [
        v if v.shape == means.shape else v.reshape(len(means), -1).mean(1)
        for v, means in zip(vectors, like, strict=True)
    ]


def from_block_means(means: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors shaped as ``like`` with each entry at its block's mean."""
    return [
        m if m.shape == v.shape else m[:, None].expand(len(m), v.numel() // len(m)).reshape(v.shape)
        for m, v in zip(means, like, strict=True)
    ]
