"""A personalized evaluation: what the clients measured, in numbers of the round and in a file of the record."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedact_flwr.files import write_whole
from strategies import wire
from tasks.task import Task

PERSONAL_FILE = "personal.csv"  # in a run's record: a row for each client and evaluation
SD, WORST = "sd", "worst"
PERSONAL_FAILURES, TUNED_FAILURES = "personal_failures", "tuned_failures"

Row = Mapping[str, float]


def spread_over_clients(clients: Sequence[Row], task: Task) -> dict[str, float]:
    """Of each metric the mean over clients, each counted once; of the task's target also how far they lie apart.

    That is the standard deviation (of these clients, not of more that they would stand for) and the worst decile: the
    mean of the tenth of the clients, rounded up, that have the worst values. A metric that some client lacks, as it
    does where its fine-tuning diverged, has none of these; ``tuned_failures`` counts those.
    """
    if not clients:
        return {}
    found: dict[str, float] = {}
    for key in sorted(set.intersection(*(set(_measured(client)) for client in clients))):
        values = [client[key] for client in clients]
        found[key] = statistics.fmean(values)
        if key in targets(task):
            worst = sorted(values, reverse=not task.higher_is_better)[: math.ceil(len(values) / 10)]
            found[f"{key}_{SD}"] = statistics.pstdev(values)
            found[f"{key}_{WORST}"] = statistics.fmean(worst)
    found[TUNED_FAILURES] = sum(f"{wire.TUNED}_{task.target}" not in client for client in clients)
    return found


def targets(task: Task) -> list[str]:
    """The task's target with the global, the personal and the fine-tuned model."""
    return [f"{kind}_{task.target}" for kind in wire.KINDS]


def measured(task: Task, own_models: bool) -> list[str]:
    """Those of them that every client must measure: fine-tuning may fail, and not every method has personal models."""
    return [f"{kind}_{task.target}" for kind in ((wire.GLOBAL, wire.PERSONAL) if own_models else (wire.GLOBAL,))]


def in_words(line: Mapping[str, Any], task: Task) -> str:
    """A round's line, if it has such an evaluation, for people; else nothing."""
    found = [
        f"{kind} {line[key]:.4f} (worst tenth {line[f'{key}_{WORST}']:.4f})"
        for kind, key in zip(wire.KINDS, targets(task), strict=True)
        if line.get(key) is not None
    ]
    return f"{task.target} on what the clients hold out: {', '.join(found + lacking(line))}" if found else ""


def lacking(line: Mapping[str, Any]) -> list[str]:
    """What the evaluation of a round's line lacks, in words."""
    counts = {PERSONAL_FAILURES: "clients without a good answer", TUNED_FAILURES: "clients whose fine-tuning diverged"}
    return [f"{words}: {line[key]:g}" for key, words in counts.items() if line.get(key)]


def write_clients(folder: Path, server_round: int, clients: Sequence[Row]) -> None:
    """Add the rows of a round."""
    rows = [
        {"round": server_round, "client": int(c[wire.PARTITION]), "held_out": c[wire.NUM_EXAMPLES], **_measured(c)}
        for c in clients
    ]
    _write(folder, _rows(folder) + rows)


def drop_clients_after(folder: Path, server_round: int) -> None:
    """Drop the rows of later rounds, which a run that goes on from ``server_round`` makes again."""
    if rows := _rows(folder):
        _write(folder, [row for row in rows if int(row["round"]) <= server_round])


def _write(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / PERSONAL_FILE, text.getvalue())


def read_clients(folder: Path) -> list[dict[str, float]]:
    """The rows of a record's file, none where there is no such file, without what a client did not measure.

    Raises ValueError and OSError.
    """
    try:
        return [{key: float(value) for key, value in row.items() if value != ""} for row in _rows(folder)]
    except (ValueError, TypeError, csv.Error) as error:  # TypeError: fewer or more values than the header has names
        raise ValueError(f"{PERSONAL_FILE}: not a table of numbers") from error


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / PERSONAL_FILE
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _measured(client: Row) -> dict[str, float]:
    kinds = tuple(f"{kind}_" for kind in wire.KINDS)
    return {key: value for key, value in client.items() if key.startswith(kinds)}
