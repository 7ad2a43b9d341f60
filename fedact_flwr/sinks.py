"""Where a run's metrics go beside rounds.jsonl: rounds.csv always, and what the setting ``metrics_to`` names."""

import contextlib
import csv
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import ERROR
from pathlib import Path
from typing import Any, Protocol

from flwr.common import log

from fedact_flwr.failure import COMPLETED, FAILED, INTERRUPTED
from fedact_flwr.files import write_whole

CSV_FILE = "rounds.csv"
MLFLOW_ID, WANDB_ID = "mlflow.id", "wandb.id"  # in the record, so that a resumed run goes on in the same one
MLFLOW_DATABASE = "mlflow.db"  # beside the records, where MLFLOW_TRACKING_URI names no other
NAME = "fedact"  # of MLflow's experiment and W&B's project, where their own variables name no other

Config = Mapping[str, Any]
Lines = Sequence[Mapping[str, Any]]


class Sink(Protocol):
    """One place that metrics go to, made from the settings, the record's folder and the lines so far.

    It may raise whatever it likes, also when it is made: `Sinks` reports it.
    """

    def log(self, line: Mapping[str, Any]) -> None:
        """A round, as a line of rounds.jsonl has it."""

    def close(self, status: str) -> None:
        """The run has ended: ``status`` is `COMPLETED`, `FAILED` or `INTERRUPTED`."""


class Csv:
    """rounds.csv: a row a round. Where a key is new the file is written anew, since its first line names them all."""

    def __init__(self, config: Config, folder: Path, lines: Lines) -> None:
        self._path = folder / CSV_FILE
        self._rows = [_numbers(line) for line in lines]
        self._keys = list(dict.fromkeys(["round", "seconds", *(key for row in self._rows for key in row)]))
        write_whole(self._path, self._text(self._rows, header=True))

    def log(self, line: Mapping[str, Any]) -> None:
        row = _numbers(line)
        self._rows.append(row)
        if new := [key for key in row if key not in self._keys]:
            self._keys += new
            write_whole(self._path, self._text(self._rows, header=True))
        else:
            with self._path.open("a") as file:
                file.write(self._text([row]))

    def close(self, status: str) -> None:
        pass

    def _text(self, rows: Lines, header: bool = False) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._keys, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


class TensorBoard:
    """Scalars in the record's folder ``tensorboard``."""

    def __init__(self, config: Config, folder: Path, lines: Lines) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first = lines[-1]["round"] + 1 if lines else None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first)

    def log(self, line: Mapping[str, Any]) -> None:
        for key, value in _numbers(line).items():
            self._writer.add_scalar(key, value, line["round"])
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()


class Mlflow:
    """A run of MLflow, named like the record, on the server or in the database that MLFLOW_TRACKING_URI names."""

    STATUS = {COMPLETED: "FINISHED", FAILED: "FAILED", INTERRUPTED: "KILLED"}  # noqa: RUF012

    def __init__(self, config: Config, folder: Path, lines: Lines) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the run waits for it: seconds, not minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(ERROR)  # the terminal is ours
        database = f"sqlite:///{folder.parent / MLFLOW_DATABASE}"
        kept = folder / MLFLOW_ID
        with _alone(folder.parent / f".{MLFLOW_DATABASE}.lock"):  # MLflow makes tables and experiments twice otherwise
            self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or database)
            if not kept.exists():
                experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or NAME)
        if kept.exists():
            self._id = kept.read_text()
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        # once and for all: MLflow refuses another value, so a resumed run can't say that it has more rounds
        self._client.log_batch(self._id, params=[Param(key, str(value)) for key, value in config.items()])
        kept.write_text(self._id)

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def log(self, line: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, line["round"]) for key, value in _numbers(line).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, status: str) -> None:
        self._client.set_terminated(self._id, self.STATUS[status])


class Wandb:
    """A run of Weights & Biases, named like the record, where wandb's own variables and login say."""

    def __init__(self, config: Config, folder: Path, lines: Lines) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # else it asks for a key where there is a terminal, and waits
        import wandb

        kept = folder / WANDB_ID
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or NAME,
            name=folder.name,
            config=dict(config),
            dir=str(folder),
            id=kept.read_text() if kept.exists() else None,
            resume="allow",
            reinit="create_new",
            # a server that does not answer costs the run a minute, not for ever
            settings=wandb.Settings(console="off", init_timeout=30, finish_timeout=60, finish_timeout_raises=True),
        )
        kept.write_text(self._run.id)

    def log(self, line: Mapping[str, Any]) -> None:
        self._run.log(_numbers(line), step=line["round"])

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == COMPLETED else 1)


SINKS: Mapping[str, Callable[[Config, Path, Lines], Sink]] = {
    "tensorboard": TensorBoard,
    "mlflow": Mlflow,
    "wandb": Wandb,
}


class Sinks:
    """rounds.csv and all that ``names`` says; one that fails is reported, gets nothing more, and ends no run.

    Parameters
    ----------
    names : sequence of str
        Keys of `SINKS`.
    config : dict of str to Any
        The settings.
    folder : Path
        The record's.
    lines : sequence of dict
        Those of rounds.jsonl so far, of a run that is resumed.
    """

    def __init__(self, names: Sequence[str], config: Config, folder: Path, lines: Lines) -> None:
        self._sinks: dict[str, Sink] = {}
        self._reports: list[str] = []
        for name, make in {CSV_FILE: Csv, **{name: SINKS[name] for name in names}}.items():
            with self._reported(name):
                self._sinks[name] = make(config, folder, lines)

    def log(self, line: Mapping[str, Any]) -> None:
        for name, sink in list(self._sinks.items()):
            with self._reported(name):
                sink.log(line)

    def close(self, status: str) -> None:
        for name, sink in list(self._sinks.items()):
            with self._reported(name):
                sink.close(status)

    def take_reports(self) -> list[str]:
        """What has failed since this was asked last, in sentences."""
        taken, self._reports = self._reports, []
        return taken

    @contextlib.contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is: a picture of the run is no reason to end it
            cause = " ".join(str(error).split())
            self._reports.append(f"{name} gets no more metrics: {type(error).__name__}: {cause}")
            log(ERROR, self._reports[-1])
            self._sinks.pop(name, None)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process is here, where the system can tell."""
    if os.name != "posix":
        yield
        return
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Without what was not finite, and without ``failed``, which is text."""
    return {key: value for key, value in line.items() if isinstance(value, int | float)}
