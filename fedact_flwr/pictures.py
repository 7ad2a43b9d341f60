"""Pictures, drawn with matplotlib."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray


def draw_split(path: Path, histograms: NDArray, title: str) -> None:
    """Client by class: how many examples of each class each client has, and above it how many it has in all.

    ``histograms`` has shape (clients, classes). The ending of ``path`` names the format. Raises OSError, and ValueError
    for a format that matplotlib does not have.
    """
    clients, classes = histograms.shape
    figure = Figure(figsize=(max(5.0, min(12.0, 0.11 * clients)), 4.5), layout="constrained")
    sizes, cells = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    sizes.bar(np.arange(clients), histograms.sum(1), width=1.0)
    sizes.set_ylabel("examples")
    sizes.set_title(title)
    # white where a client has none of a class; logarithmic, since a few large cells would hide all others
    present = np.ma.masked_equal(histograms.T, 0)
    image = cells.imshow(present, aspect="auto", interpolation="nearest", cmap="YlGnBu", norm="log", origin="lower")
    cells.set_xlabel("client")
    cells.set_ylabel("class")
    for axis, count in ((cells.xaxis, clients), (cells.yaxis, classes)):
        axis.get_major_locator().set_params(integer=True)
        if count <= 10:
            axis.set_ticks(range(count))
    figure.colorbar(image, ax=cells, label="examples of the class")
    figure.savefig(path, dpi=110)
