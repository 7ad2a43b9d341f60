"""Rows of text with named columns, from the Hugging Face hub or from local files.

A local path may be what `datasets` saves (``save_to_disk``), or one file or a folder of parquet, JSON lines, JSON (each
also gzipped) or plain text, one document a file. Files and splits with the word validation, valid, val, test or dev in
their name evaluate, the others train; where there are none of the former, a twentieth of the rows is held out.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tasks.hub import load_from_hub
from tasks.task import BadData, first_line

HELD_OUT = 0.05
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
EVALUATES = re.compile(r"(?<![a-z])(validation|valid|val|test|dev)(?![a-z])")


@dataclass(frozen=True)
class TextSpec:
    """What a data set of text is.

    Attributes
    ----------
    hub : str
        Its name on the Hugging Face hub.
    configuration : tuple of str
        Which one there; empty where there is one only.
    evaluates : str or None
        Its split there that evaluates; None where a share of "train" is held out.
    streams : bool
        Too large to download: only as many rows as asked for are read.
    """

    hub: str
    configuration: tuple[str, ...] = ()
    evaluates: str | None = None
    streams: bool = False


@lru_cache(maxsize=4)
def load_rows(spec: TextSpec, data: str, train: bool, most: int) -> Any:
    """The rows that train or evaluate, a `datasets.Dataset`: ``most`` of them, or all where it is 0.

    Raises `BadData`.
    """
    rows = _from_hub(spec, train, most) if data == "auto" else _from_path(Path(data).expanduser(), train)
    if not len(rows):
        raise BadData(f"{spec.hub if data == 'auto' else data} has no rows")
    return rows.select(range(min(most or len(rows), len(rows))))


def require_text(rows: Any, columns: Sequence[str], source: str) -> None:
    """Raise `BadData` where ``rows`` lack one of ``columns``, or it is not text in all rows."""
    for column in columns:
        if column not in rows.column_names:
            raise BadData(f"{source} has no column {column}; it has {', '.join(rows.column_names)}")
        values = rows.select_columns([column]).with_format("arrow")[:][column]
        if "string" not in str(values.type) or values.null_count:
            raise BadData(f"{source}: the column {column} does not hold text in every row")


def _from_hub(spec: TextSpec, train: bool, most: int) -> Any:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    split = "train" if train or spec.evaluates is None else spec.evaluates
    if not spec.streams:
        rows = load_from_hub(spec.hub, *spec.configuration, split=split)
        return rows if spec.evaluates else _share(rows, train)
    options = {"name": spec.hub, "configuration": spec.configuration, "split": split, "most": most}
    try:
        # through the cache, so that all processes on this machine read the stream once
        return Dataset.from_generator(_stream, gen_kwargs=options)
    except Exception as error:
        cause = error.__cause__ or error
        raise cause if isinstance(cause, BadData) else BadData(f"{spec.hub}: {first_line(cause)}") from error


def _stream(name: str, configuration: Sequence[str], split: str, most: int) -> Iterator[Any]:
    yield from islice(load_from_hub(name, *configuration, split=split, streaming=True), most)


def _from_path(path: Path, train: bool) -> Any:
    from datasets import DatasetDict, concatenate_datasets, disable_progress_bars, load_dataset, load_from_disk

    disable_progress_bars()
    if not path.exists():
        raise BadData(f"{path} is not there")
    try:
        if any((path / name).exists() for name in ("dataset_dict.json", "dataset_info.json")):
            saved = load_from_disk(str(path))
            splits = dict(saved) if isinstance(saved, DatasetDict) else {"train": saved}
            names, whole = _names(list(splits), train, path)
            rows = concatenate_datasets([splits[name] for name in names])
        else:
            files = {file.name: file for file in ([path] if path.is_file() else path.iterdir()) if _format(file)}
            names, whole = _names(sorted(files), train, path)
            kind = _format(files[names[0]])
            if odd := [name for name in names if _format(files[name]) != kind]:
                raise BadData(f"{path} mixes formats: {names[0]} and {odd[0]}")
            options = {"sample_by": "document"} if kind == "text" else {}
            rows = load_dataset(kind, data_files=[str(files[name]) for name in names], split="train", **options)
    except BadData:
        raise
    except Exception as error:  # what datasets and pyarrow raise for damaged files has many kinds
        raise BadData(f"{path} can't be read: {first_line(error)}") from error
    return rows if whole else _share(rows, train)


def _format(file: Path) -> str | None:
    return FORMATS.get(Path(file.name.removesuffix(".gz")).suffix)


def _names(names: Sequence[str], train: bool, path: Path) -> tuple[Sequence[str], bool]:
    """Those of ``names`` that train or evaluate, and whether they do with all their rows."""
    if not names:
        raise BadData(f"{path} holds no format known here: save_to_disk, {', '.join(FORMATS)}")
    evaluate = [name for name in names if EVALUATES.search(name.lower())]
    if train and len(evaluate) == len(names):
        raise BadData(f"{path}: all of it evaluates ({', '.join(evaluate)}), nothing trains")
    if not evaluate:
        return names, False
    return [name for name in names if (name in evaluate) != train], True


def _share(rows: Any, train: bool) -> Any:
    """The rows that train, or those held out: the same ones in every process."""
    order = np.random.default_rng(0).permutation(len(rows))
    held_out = max(1, round(HELD_OUT * len(rows)))
    return rows.select(np.sort(order[held_out:] if train else order[:held_out]))
