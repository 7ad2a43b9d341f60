"""Writing a file in whole."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """In whole, or not at all: what was there before stays where the disk is full. Raises `OSError`."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
