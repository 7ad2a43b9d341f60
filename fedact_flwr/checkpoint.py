"""Checkpoints: all that a run needs to go on, in RECORD/checkpoints/round-ROUND/.

* arrays.safetensors: the model, and what the method keeps beside it, each tensor as RECORD/NAME
* checkpoint.json: the rest of the server's state, the metrics of the rounds so far, settings and versions, the hash of
  the arrays, and its own

A checkpoint is written under another name, put on disk and then renamed, so it is there in whole or not at all. Nothing
in it is pickled.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

from flwr.common import log
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from clients.state import sync_folder
from fedact_flwr.settings import Settings, dump
from strategies import wire
from strategies.versions import versions
from tasks.task import Task

FOLDER = "checkpoints"
ARRAYS_FILE = "arrays.safetensors"
JSON_FILE = "checkpoint.json"
FORMAT = "fedact checkpoint 1"
PREFIX, UNFINISHED = "round-", ".unfinished-"

# What a resumed run may have otherwise. `rounds` may only grow.
MAY_CHANGE = (
    "rounds", "output", "name", "resume", "metrics_to", "checkpoint_every", "checkpoints_kept", "max_failed_rounds",
    "round_timeout", "node_timeout", "client_gpus",
)  # fmt: skip


class BadCheckpoint(ValueError):
    """It can't be used; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round.

    Attributes
    ----------
    state : dict of str to Any
        `strategies.FederatedStrategy.state_dict`.
    rounds : sequence of dict
        The lines of rounds.jsonl.
    settings : dict of str to Any
        As `fedact_flwr.settings.dump` gives them.
    """

    state: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]

    @property
    def round(self) -> int:
        return self.state["rounds_done"]


def fixed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the bits of a run depend on, and that stay as they are."""
    return {key: value for key, value in settings.items() if key not in MAY_CHANGE}


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write ``folder``, which is not there yet. Raises OSError and SafetensorError, and leaves nothing then."""
    unfinished = folder.with_name(f"{UNFINISHED}{folder.name}-{os.getpid()}-{threading.get_ident()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        records = {wire.MODEL: checkpoint.state["model"], **checkpoint.state["state"]}
        arrays = unfinished / ARRAYS_FILE
        save_file({f"{record}/{name}": a for record, vectors in records.items() for name, a in vectors.items()}, arrays)
        body = {
            "state": {key: value for key, value in checkpoint.state.items() if key not in ("model", "state")},
            "rounds": list(checkpoint.rounds),
            "settings": dict(checkpoint.settings),
            "versions": versions(),
            ARRAYS_FILE: _hash_of_file(arrays),
        }
        text = json.dumps(body)
        (unfinished / JSON_FILE).write_text(json.dumps({"format": FORMAT, "sha256": _hash(text), "body": text}))
        for path in (arrays, unfinished / JSON_FILE):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(unfinished)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def read(folder: Path, settings: Settings) -> Checkpoint:
    """Read a checkpoint of a run with these settings, but for what may change. Raises `BadCheckpoint`."""
    body = _read_body(folder)
    if fixed(body["settings"]) != fixed(dump(settings)):
        raise BadCheckpoint("it is of a run with other settings")
    try:
        if _hash_of_file(folder / ARRAYS_FILE) != body[ARRAYS_FILE]:
            raise BadCheckpoint(f"{ARRAYS_FILE} has another hash than {JSON_FILE} says")
        flat = load_file(folder / ARRAYS_FILE)
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"{ARRAYS_FILE}: {error}") from error
    records: dict[str, dict[str, Any]] = {}
    for key, array in flat.items():
        record, _, name = key.partition("/")
        records.setdefault(record, {})[name] = array
    if others := [
        f"{name} {body['versions'].get(name)}" for name in versions() if versions()[name] != body["versions"].get(name)
    ]:
        log(WARNING, "%s was written with %s: the run's bits depend on it", folder.name, ", ".join(others))
    state = body["state"] | {"model": records.pop(wire.MODEL, {}), "state": records}
    return Checkpoint(state, body["rounds"], body["settings"])


def _read_body(folder: Path) -> dict[str, Any]:
    """What checkpoint.json says, without the arrays. Raises `BadCheckpoint`."""
    try:
        outer = json.loads((folder / JSON_FILE).read_text())
        if outer["format"] != FORMAT:
            raise BadCheckpoint(f"{JSON_FILE} has the format {outer['format']!r}, not {FORMAT!r}")
        if outer["sha256"] != _hash(outer["body"]):
            raise BadCheckpoint(f"{JSON_FILE} has another content than its hash says")
        body: dict[str, Any] = json.loads(outer["body"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"{JSON_FILE}: {error!r}") from error
    return body


class Checkpoints:
    """The checkpoints of one record: the newest ones, and the best.

    Parameters
    ----------
    record : Path
        The record's folder.
    settings : Settings
    task : Task
        Its target says which is the best.
    """

    def __init__(self, record: Path, settings: Settings, task: Task) -> None:
        self.folder = record / FOLDER
        self.settings = settings
        self.task = task
        self._latest: Checkpoint | None = None
        self._closed = False
        self._writing = threading.RLock()  # a signal's handler may write while another thread or frame does

    def newest(self) -> Checkpoint | None:
        """The newest that can be used; others are named in the log."""
        for folder in reversed(self._folders()):
            try:
                return read(folder, self.settings)
            except BadCheckpoint as reason:
                log(WARNING, "%s is not used: %s", folder, reason)
        return None

    def pinned(self) -> list[dict[int, int]]:
        """`strategies.FederatedStrategy.pinned`, for all that are there."""
        found = []
        for folder in self._folders():
            try:
                folded = _read_body(folder)["state"]["folded"]
            except BadCheckpoint:
                continue
            found.append({int(partition): r for partition, r in folded.items()})
        return found

    def after_round(self, checkpoint: Checkpoint) -> bool:
        """Remember it, and write it where one is due. True where it was written.

        Raises SystemExit after `close`: a round more would let clients forget what the checkpoint needs.
        """
        with self._writing:
            if self._closed:
                raise SystemExit("the run is being stopped")
            every = self.settings.checkpoint_every
            self._latest = checkpoint if every and checkpoint.round else None
            return every > 0 and checkpoint.round % every == 0 and self._write_latest()

    def close(self) -> None:
        """Write the last round's, unless it is there. Also a signal's handler, at any moment of the run."""
        with self._writing:
            self._closed = True
            self._write_latest()
            self._latest = None

    def _write_latest(self) -> bool:
        """A disk that is full ends no run: False, and a line in the log."""
        latest = self._latest
        if latest is None:
            return False
        folder = self.folder / f"{PREFIX}{latest.round}"
        try:
            if not folder.exists():  # as it does where a signal came just after it was written
                write(folder, latest)
            self._latest = None
            self._remove_others()
        except (OSError, SafetensorError) as error:
            log(ERROR, "round %s: no checkpoint could be written: %s; the run goes on", latest.round, error)
            return False
        return True

    def remove_after(self, server_round: int) -> None:
        """Remove what is newer, which was bad, and what was left unfinished."""
        for folder in self._folders():
            if _round_of(folder) > server_round:
                shutil.rmtree(folder, ignore_errors=True)
        for unfinished in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def _remove_others(self) -> None:
        folders = self._folders()
        kept = set(folders[-self.settings.checkpoints_kept :])
        if best := self._best(folders):
            kept.add(best)
        for folder in set(folders) - kept:
            shutil.rmtree(folder, ignore_errors=True)

    def _best(self, folders: Sequence[Path]) -> Path | None:
        lines = {}
        for folder in folders:
            try:
                line = _read_body(folder)["rounds"][-1]
            except (BadCheckpoint, LookupError):
                continue
            if line.get(self.task.target) is not None:
                lines[folder] = line[self.task.target]
        sign = 1 if self.task.higher_is_better else -1
        return max(lines, key=lambda folder: sign * lines[folder]) if lines else None

    def _folders(self) -> list[Path]:
        """The finished ones, the oldest first."""
        return sorted((f for f in self.folder.glob(f"{PREFIX}*") if _round_of(f) > 0), key=_round_of)


def _round_of(folder: Path) -> int:
    number = folder.name.removeprefix(PREFIX)
    return int(number) if number.isascii() and number.isdecimal() else 0


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
