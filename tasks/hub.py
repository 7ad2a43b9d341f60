"""Data sets of the Hugging Face hub."""

from typing import Any

from tasks.task import BadData, first_line

SECONDS = 5  # to answer at all


def load_from_hub(name: str, *configuration: str, **options: Any) -> Any:
    """`datasets.load_dataset`; where the hub does not answer, at once from the cache. Raises `BadData`.

    By itself it would try again and again for half a minute.
    """
    import datasets
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=SECONDS)
    except huggingface_hub.errors.HfHubHTTPError:
        pass  # it answered; what is wrong the next call says
    except Exception:  # of many kinds, by version
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, *configuration, **options)
    except Exception as error:  # no network, no such data set, no space: many kinds of many libraries
        raise BadData(
            f"{name} can't be loaded from the Hugging Face hub ({first_line(error)}); download it where there is a "
            f"network and set data to its folder"
        ) from error
