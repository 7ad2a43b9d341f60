"""The Hugging Face hub, as a place that may be out of reach."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.task import BadData, first_line

SECONDS = 5  # for the hub to answer at all


def load_from_hub(name: str, *configuration: str, **options: Any) -> Any:
    """`datasets.load_dataset`. Raises `BadData`."""
    import datasets

    prefer_cache()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, *configuration, **options)
    except Exception as error:  # no network, no such data set, no space: many kinds of many libraries
        raise BadData(
            f"{name} can't be loaded from the Hugging Face hub ({first_line(error)}); download it where there is a "
            f"network and set data to its folder"
        ) from error


def load_pretrained(kind: Any, name: str, key: str, **options: Any) -> Any:
    """``kind.from_pretrained`` of Transformers, from a folder or the hub. Raises `BadData` that names ``key``."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not Path(name).is_dir():
        prefer_cache()
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:
        raise BadData(f"{name} can't be loaded: {first_line(error)}", key) from error


@lru_cache(maxsize=1)
def prefer_cache() -> None:
    """Where the hub does not answer, let this process ask its cache alone; else each call tries for half a minute."""
    import datasets
    import huggingface_hub

    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # of many kinds, by version
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
