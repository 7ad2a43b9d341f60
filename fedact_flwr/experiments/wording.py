"""Numbers and names of metrics as a report writes them."""

import statistics
from collections.abc import Sequence


def scale_of(key: str) -> float:
    """Shares in percent."""
    return 100.0 if key.endswith("accuracy") else 1.0


def target_words(key: str) -> str:
    return key.replace("_", " ") + (" %" if scale_of(key) != 1 else "")


def spread(values: Sequence[float], target: str, usual: int) -> str:
    """Mean and standard deviation, and of how many where that is not the usual number."""
    if not values:
        return "-"
    scaled = [scale_of(target) * value for value in values]
    digits = 1 if scale_of(target) != 1 else 3
    text = f"{statistics.fmean(scaled):.{digits}f}"
    if len(scaled) > 1:
        text += f" ± {statistics.stdev(scaled):.{digits}f}"
    return text if len(values) == usual else f"{text} ({len(values)})"
