"""The Hugging Face hub, as a place that may be out of reach, and is asked only for what this machine does not have."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.task import BadData, first_line

SECONDS = 5  # for the hub to answer at all


def load_from_hub(name: str, *configuration: str, **options: Any) -> Any:
    """`datasets.load_dataset`. Raises `BadData`."""
    import datasets

    datasets.disable_progress_bars()
    try:
        return _cached_or_not(lambda: datasets.load_dataset(name, *configuration, **options))
    except Exception as error:  # no network, no such data set, no space: many kinds of many libraries
        raise BadData(
            f"{name} can't be loaded from the Hugging Face hub ({first_line(error)}); download it where there is a "
            f"network and set data to its folder"
        ) from error


def load_pretrained(kind: Any, name: str, key: str, **options: Any) -> Any:
    """``kind.from_pretrained`` of Transformers, from a folder or the hub. Raises `BadData` that names ``key``."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        if Path(name).is_dir():
            return kind.from_pretrained(name, **options)
        return _cached_or_not(lambda: kind.from_pretrained(name, **options))
    except Exception as error:
        raise BadData(f"{name} can't be loaded: {first_line(error)}", key) from error


def _cached_or_not(load: Callable[[], Any]) -> Any:
    """From the cache without a word to the hub; only where that fails, with it."""
    import huggingface_hub

    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    _set_offline(True)
    try:
        return load()
    except Exception:
        _set_offline(offline)
        if offline or not _answers():
            raise
        return load()
    finally:
        _set_offline(offline)


def _set_offline(offline: bool) -> None:
    import datasets
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline


@lru_cache(maxsize=1)
def _answers() -> bool:
    """Whether the hub does, asked once in a process: each of its libraries' calls would try for half a minute."""
    import huggingface_hub

    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # of many kinds, by version
        return False
    return True
