"""Decoded and tokenised training data on disk, for nodes that start a fresh process for each message.

Files are named by a hash of all that decides their content: the task's code, its settings, and, where a setting is a
local path, every byte that lies there. So a changed data set is another file, and the folder may be emptied at any
time.
"""

import hashlib
import json
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save

import tasks
from fedact_flwr.settings import Settings
from tasks import TASKS
from tasks.task import Examples

PATHS = ("model", "data", "tokenizer")  # settings that may be one
# Of a model's folder; they don't decide how text is tokenised, and may be gigabytes.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
PACKAGES = ("scikit-learn", "pillow", "transformers", "tokenizers")  # what decodes and tokenises


class ExampleCache:
    """Training data of ``settings.task`` in ``folder``; with no folder, nothing is kept."""

    def __init__(self, folder: Path | None, settings: Settings) -> None:
        # a data set on the hub may change, and only `datasets` knows
        keeps = folder is not None and not (settings.data == "auto" and "data" in TASKS[settings.task].settings_used)
        self._stem = folder / _fingerprint(settings) if folder and keeps else None

    def labels(self, make: Callable[[], NDArray]) -> NDArray:
        return self._get("labels", lambda: {"labels": torch.from_numpy(make())})["labels"].numpy()

    def examples(self, indices: NDArray, make: Callable[[], Examples]) -> Examples:
        """Those at ``indices``: as they were kept, or what ``make`` gives. Raises what ``make`` raises."""
        return self._get(hashlib.sha256(indices.astype(np.int64).tobytes()).hexdigest()[:32], make)

    def _get(self, name: str, make: Callable[[], Examples]) -> Examples:
        if self._stem is None:
            return make()
        path = self._stem / f"{name}.safetensors"
        try:
            return load_file(path)
        except (OSError, SafetensorError):  # not there, or cut short
            made = make()
            _write(path, save({key: tensor.contiguous() for key, tensor in made.items()}))
            return made


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing, whichever of several processes is first. Raises ValueError where the folder is no place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as error:
        raise ValueError(f"cache = {str(path.parent.parent)!r}: {error}; allowed is a folder to write to") from error


def _fingerprint(settings: Settings) -> str:
    digest = hashlib.sha256()
    for package in PACKAGES:
        try:
            digest.update(f"{package} {version(package)} ".encode())
        except PackageNotFoundError:
            digest.update(f"{package} none ".encode())
    for file in sorted(Path(tasks.__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    for key in ("model", *TASKS[settings.task].settings_used):
        value = getattr(settings, key)
        digest.update(f"\n{key} {json.dumps(value)}".encode())
        if key not in PATHS:
            continue
        if (path := Path(value).expanduser()).exists():
            _add_files(digest, path, but=WEIGHTS if key == "model" else ())
        elif "/" in value:  # on the hub: the path of what is here of it says which revision
            from huggingface_hub import try_to_load_from_cache

            digest.update(str(try_to_load_from_cache(value, "tokenizer_config.json")).encode())
    return digest.hexdigest()[:32]


def _add_files(digest: "hashlib._Hash", path: Path, but: tuple[str, ...]) -> None:
    """Names and content of what lies at ``path``."""
    folders = os.walk(path, followlinks=True)
    files = [path] if path.is_file() else [Path(folder, name) for folder, _, names in folders for name in names]
    for file in sorted(files):
        if file.suffix not in but:
            with file.open("rb") as opened:
                content = hashlib.file_digest(opened, hashlib.sha256).hexdigest()
            digest.update(f"{file.relative_to(path)} {content} ".encode())
