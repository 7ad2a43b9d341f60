"""Runs for the accuracy benchmarks: in-process, one torch thread each, several at a time, those completed not again."""

import logging
import multiprocessing
import shutil
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.progress import track

from fedact_flwr.failure import COMPLETED
from fedact_flwr.record import read_summary
from fedact_flwr.settings import SETTINGS_FILE, dump, parse, read_defaults, read_file, read_override
from strategies import RunFailed

Own = Mapping[str, Any]  # settings of a run that are not the defaults


def variant_settings(variant: str) -> dict[str, Any]:
    """The settings that METHOD[:KEY=VALUE] stands for."""
    method, _, own = variant.partition(":")
    return {"method": method, **(dict([read_override(own)]) if own else {})}


def final_rounds(runs: Mapping[str, Own], output: Path, workers: int) -> dict[str, dict[str, float]]:
    """The metrics of each run's last round, by the run's name, which is also its record's in ``output``.

    A run whose record is complete and has the same settings is not repeated; remove ``output`` after a change of the
    code. A run that diverged has an accuracy of 0.
    """
    jobs = [(name, dict(own), str(output.resolve())) for name, own in runs.items()]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        finals = track(pool.map(_final_round, jobs), "runs", total=len(jobs))
        return dict(zip(runs, finals, strict=True))


def tune(
    cells: Mapping[str, Own], grids: Mapping[str, Sequence[float]], seeds: Sequence[int], output: Path, workers: int
) -> dict[str, dict[float, float]]:
    """The mean final accuracy in percent over ``seeds``, by cell and by each learning rate of the cell's grid."""
    trials = [(cell, lr, seed) for cell in cells for lr in grids[cell] for seed in seeds]
    runs = {run_name(*trial): {**cells[trial[0]], "lr": trial[1], "seed": trial[2]} for trial in trials}
    finals = final_rounds(runs, output, workers)
    return {
        cell: {
            lr: statistics.mean(100 * finals[run_name(cell, lr, seed)]["accuracy"] for seed in seeds)
            for lr in grids[cell]
        }
        for cell in cells
    }


def run_name(cell: str, lr: float, seed: int) -> str:
    return f"{cell.replace(':', '-')}-lr{lr:g}-s{seed}"


def best(by_lr: Mapping[float, float]) -> float:
    """The learning rate of the highest accuracy; of equal ones the first."""
    return max(by_lr, key=lambda lr: by_lr[lr])


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def _final_round(job: tuple[str, dict[str, Any], str]) -> dict[str, float]:
    name, own, output = job
    folder = Path(output) / name
    settings = parse(read_defaults() | own | {"device": "cpu", "threads": 1, "output": output, "name": name})
    summary = read_summary(folder)
    if summary is None or summary["status"] != COMPLETED or read_file(folder / SETTINGS_FILE) != dump(settings):
        from fedact_flwr.client_app import app as client_app
        from fedact_flwr.inprocess import run_inprocess
        from fedact_flwr.server_app import app as server_app

        logging.getLogger("flwr").setLevel(logging.ERROR)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            run_inprocess(server_app, client_app, settings.clients, dump(settings))
        except RunFailed:  # every client's loss was nan: this learning rate is too large
            return {"accuracy": 0.0}
        summary = read_summary(folder)
        assert summary is not None
    return summary["final"]
