"""Random crops and flips of a batch at once, on whatever device it is."""

import torch
from torch import Tensor


def crop_and_flip(images: Tensor, padding: int) -> Tensor:
    """Each image shifted by up to ``padding`` pixels each way, with zeros moving in, and mirrored with chance 1/2.

    Images of any dtype, shape (batch, channels, height, width); the result is laid out channels-last. Draws come from
    the device's default generator, so whoever seeds that decides them.
    """
    n, _, height, width = images.shape
    device = images.device
    padded = torch.nn.functional.pad(images, (padding,) * 4).permute(0, 2, 3, 1)
    top, left = torch.randint(0, 2 * padding + 1, (2, n, 1), device=device)
    rows = top + torch.arange(height, device=device)
    columns = torch.arange(width, device=device)
    mirrored = torch.rand(n, 1, device=device) < 0.5
    columns = left + torch.where(mirrored, width - 1 - columns, columns)
    batch = torch.arange(n, device=device)[:, None, None]
    return padded[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
