"""The report's section on personalized evaluations: three models on the examples that each client holds out."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from fedact_flwr.experiments.comparison import Column, Comparison, Row
from fedact_flwr.experiments.document import Block, Figure, Heading, Paragraph, Table
from fedact_flwr.experiments.pictures import Curve, curves, mean_curve
from fedact_flwr.experiments.runs import Run
from fedact_flwr.experiments.wording import scale_of, spread, target_words
from fedact_flwr.personal import PERSONAL_FILE, SD, WORST, lacking, read_clients
from strategies import wire

MODELS = (
    "After the last round, on the examples that each client holds out: global is the server's model, personal is the "
    "client's own (- where the method has none), and tuned is the global one after an epoch on the client's other "
    "examples. Each client that answered counts once, however many examples it has. Means over clients; the best of "
    "a condition in bold."
)
DRAWN = {wire.PERSONAL: "its own model", wire.TUNED: "the fine-tuned global model"}


def personalized(comparison: Comparison) -> list[Block]:
    """Nothing where no run made such an evaluation."""
    targets = dict.fromkeys(column.task.target for column in comparison.columns)
    blocks = [block for target in targets for block in _of_target(comparison, target)]
    return [Heading("Personalized"), Paragraph(MODELS), *blocks] if blocks else []


def _of_target(comparison: Comparison, target: str) -> list[Block]:
    cells = [
        (row, column)
        for column in comparison.columns
        if column.task.target == target
        for row in comparison.rows
        if any(_finals(comparison.cells.get((row, column), ()), f"{kind}_{target}") for kind in wire.KINDS)
    ]
    if not cells:
        return []
    means = {f"{kind}_{target}": f"{kind}: {target_words(target)}" for kind in wire.KINDS}
    apart = {
        f"{kind}_{target}_{measure}": f"{kind}: {words}"
        for measure, words in ((SD, "sd"), (WORST, "worst decile"))
        for kind in wire.KINDS
    }
    words = (
        f"How far the clients lie apart, in {target_words(target)}: sd is the standard deviation over clients, and "
        f"worst decile the mean of the worst tenth of them, the best of a condition in bold."
    )
    return [
        _table(comparison, cells, means),
        Paragraph(words),
        _table(comparison, cells, apart),
        *_without(comparison, cells),
        *_client_by_client(comparison, cells, target),
    ]


def _without(comparison: Comparison, cells: Sequence[tuple[Row, Column]]) -> list[Block]:
    """Which runs lack clients."""
    runs = [run for cell in cells for run in comparison.cells[cell]]
    found = [f"`{run.folder.name}`: {', '.join(words)}" for run in runs if (words := lacking(run.rounds[-1]))]
    return [Paragraph(f"Not of all clients, {len(found)}: {'; '.join(found)}")] if found else []


def _table(comparison: Comparison, cells: Sequence[tuple[Row, Column]], keys: Mapping[str, str]) -> Table:
    """A row for each cell, a column for each of these keys of a round's line, with its header."""
    finals = {(cell, key): _finals(comparison.cells[cell], key) for cell in cells for key in keys}
    rows = [
        [
            column.label,
            row.label,
            *(spread(finals[(row, column), key], column.task.target, comparison.usual_seeds) for key in keys),
        ]
        for row, column in cells
    ]
    bold = set()
    for column in dict.fromkeys(column for _, column in cells):
        best = max if column.task.higher_is_better else min
        for j, key in enumerate(keys):
            in_column = [i for i, cell in enumerate(cells) if cell[1] == column]
            mean = {i: statistics.fmean(values) for i in in_column if (values := finals[cells[i], key])}
            if len(mean) > 1 and not key.endswith(f"_{SD}"):  # clients that are all as bad are no better for it
                bold.add((best(mean, key=mean.__getitem__), j + 2))
    return Table(["condition", "method", *keys.values()], rows, frozenset(bold))


def _finals(runs: Sequence[Run], key: str) -> list[float]:
    """After the last round, of the runs that have it; no earlier evaluation takes its place."""
    return [run.rounds[-1][key] for run in runs if run.rounds[-1].get(key) is not None]


def _client_by_client(comparison: Comparison, cells: Sequence[tuple[Row, Column]], target: str) -> list[Block]:
    """The figure, and what is not in it."""
    panels: dict[str, dict[str, Curve]] = {}
    drawn: dict[str, dict[str, None]] = {}  # methods by model
    left_out = []
    for row, column in cells:
        own = bool(_finals(comparison.cells[row, column], f"{wire.PERSONAL}_{target}"))
        kind = wire.PERSONAL if own else wire.TUNED
        by_run = []
        for run in comparison.cells[row, column]:
            if f"{wire.GLOBAL}_{target}" in run.rounds[-1]:
                try:
                    by_run.append(_of_clients(run, f"{kind}_{target}"))
                except (OSError, ValueError) as error:
                    left_out.append(f"`{run.folder.name}`: {' '.join(str(error).split())}")
        if len({len(values) for values in by_run}) > 1:
            left_out.append(f"{row.label}, {column.label}: not as many clients in each run")
        elif by_run:
            curve = sorted_clients(by_run, column.task.higher_is_better, scale_of(target))
            panels.setdefault(column.label, {})[row.label] = curve
            drawn.setdefault(kind, {})[row.method] = None
    blocks: list[Block] = []
    if panels:
        models = " or ".join(f"{words} ({', '.join(drawn[kind])})" for kind, words in DRAWN.items() if kind in drawn)
        what = target_words(target)
        caption = (
            f"{what[0].upper()}{what[1:]} of the clients, from the worst to the best, each with {models}: mean over "
            f"seeds of the sorted values, band of one standard deviation."
        )
        labels = [row.label for row in comparison.rows]
        svg = curves(panels, "share of clients %, from the worst", what, labels)
        blocks.append(Figure(f"personal-{target}", caption, svg))
    if left_out:
        blocks.append(Paragraph(f"Not in the figure of the clients, {len(left_out)}: {'; '.join(left_out)}"))
    return blocks


def _of_clients(run: Run, key: str) -> list[float]:
    """What each client measured after the last round. Raises ValueError and OSError."""
    last = run.rounds[-1]["round"]
    values = [client.get(key, math.nan) for client in read_clients(run.folder) if client.get("round") == last]
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"no {PERSONAL_FILE} with the {key} of each client after the last round")
    return values


def sorted_clients(by_run: Sequence[Sequence[float]], higher_is_better: bool, scale: float) -> Curve:
    """The clients of each run from the worst to the best, over the share of them that are no better; as many in each.

    The mean over runs is of the worst clients, the second worst, and so on, and not of a client.
    """
    values = scale * np.array([sorted(values, reverse=not higher_is_better) for values in by_run])
    share = 100 * np.arange(1, values.shape[1] + 1) / values.shape[1]
    return mean_curve(share, values)
