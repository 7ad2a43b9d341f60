"""Pictures, drawn with matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

INK = "#0a0b0c"  # stands for the page's own colour while a picture is drawn
INKED = (
    "text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color", "legend.edgecolor",
)  # fmt: skip
STYLE: Any = {
    **dict.fromkeys(INKED, INK), "axes.facecolor": "none", "legend.framealpha": 0.0, "svg.fonttype": "none",
    "svg.hashsalt": "fedact", "text.parse_math": False, "font.size": 9.0, "axes.grid": True, "grid.alpha": 0.25,
}  # fmt: skip
COLOURS = [matplotlib.colormaps["tab10"](i) for i in range(10) if i != 7]  # which is grey
DASHES = ("-", "--", ":", "-.")
PANELS = 3  # beside each other
TITLE = 40  # characters of a line of a panel's title


class Curve(NamedTuple):
    """A line over x with a band of one standard deviation, which is 0 where there is none. All of shape (n,)."""

    x: NDArray
    mean: NDArray
    deviation: NDArray


def mean_curve(x: NDArray, values: NDArray) -> Curve:
    """The mean of ``values``, shape (runs, n), and their standard deviation, which one run has none of."""
    return Curve(x, values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(x)))


def curves(panels: Mapping[str, Mapping[str, Curve]], x_label: str, y_label: str, labels: Sequence[str]) -> str:
    """An SVG with a panel for each title, of curves by label; the place of a label in ``labels`` gives its colour."""

    def draw(axes: Axes, title: str) -> None:
        for label, curve in panels[title].items():
            i = labels.index(label)
            colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
            marker = "o" if len(curve.x) < 10 else ""
            axes.plot(curve.x, curve.mean, dash, label=label, color=colour, linewidth=1.4, marker=marker, markersize=3)
            low, high = curve.mean - curve.deviation, curve.mean + curve.deviation
            axes.fill_between(curve.x, low, high, color=colour, alpha=0.15, linewidth=0)
        if all(np.equal(curve.x, np.round(curve.x)).all() for curve in panels[title].values()):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(fill(title, TITLE))
        axes.set_xlabel(x_label)

    return _panels(list(panels), draw, y_label, legend=len(labels) if len(labels) > 1 else 0)


class Grid(NamedTuple):
    """Values, shape (rows, columns), NaN where there is none, with the names of both."""

    values: NDArray
    rows: Sequence[str]
    columns: Sequence[str]


def maps(panels: Mapping[str, Grid], x_label: str, y_label: str) -> str:
    """An SVG with a map for each title, a colour and a number for each value, on one scale in all of them."""
    low = min(np.nanmin(grid.values) for grid in panels.values())
    high = max(np.nanmax(grid.values) for grid in panels.values())
    high = high if high > low else low + 1

    def draw(axes: Axes, title: str) -> None:
        values, rows, columns = panels[title]
        axes.imshow(values, cmap="viridis", aspect="auto", vmin=low, vmax=high)
        axes.grid(False)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                dark = (value - low) < 0.6 * (high - low)
                axes.text(
                    j, i, f"{value:.4g}", ha="center", va="center", color="white" if dark else "black", fontsize=8
                )
        axes.set_title(fill(title, TITLE))
        axes.set_xlabel(x_label)

    return _panels(list(panels), draw, y_label, legend=0)


def _panels(titles: Sequence[str], draw: Callable[[Axes, str], None], y_label: str, legend: int) -> str:
    """``legend`` is how many entries it has room for."""
    across = min(PANELS, len(titles))
    down = -(-len(titles) // across)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.5 + 3.4 * across, max(2.9 * down, 0.4 + 0.165 * legend)), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False, sharey=True)
        for axes, title in zip(grid.flat, titles, strict=False):
            draw(axes, title)
        for axes in grid.flat[len(titles) :]:
            axes.set_axis_off()
        figure.supylabel(y_label, fontsize=9)
        if legend:
            handles = {
                label: h for axes in grid.flat for h, label in zip(*axes.get_legend_handles_labels(), strict=True)
            }
            figure.legend(handles.values(), handles.keys(), loc="outside right upper")
        return _svg(figure)


def split_svg(histograms: NDArray, title: str) -> str:
    """What `draw_split` draws, as an SVG."""
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        return _svg(_split(histograms, title))


def draw_split(path: Path, histograms: NDArray, title: str) -> None:
    """Client by class: how many examples of each class each client has, and above it how many it has in all.

    ``histograms`` has shape (clients, classes). The ending of ``path`` names the format. Raises OSError, and ValueError
    for a format that matplotlib does not have.
    """
    _split(histograms, title).savefig(path, dpi=110)


def _split(histograms: NDArray, title: str) -> Figure:
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
    return figure


def _svg(figure: Figure) -> str:
    text = StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue().replace(INK, "currentColor")
