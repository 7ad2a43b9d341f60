"""What a run shows while it goes on."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedact_flwr.progress import Follow


def shown(folder: Path, lines: list[dict[str, Any]], terminal: bool, width: int = 80, encoding: str = "utf-8") -> str:
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, force_terminal=terminal, width=width, color_system=None)
    with Follow(folder, len(lines) - 1, "accuracy", console):
        pass  # it reads all that is there before it ends
    file.seek(0)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.read())


def line(number: int, accuracy: float | None, **more: float) -> dict[str, Any]:
    return {"round": number, "accuracy": accuracy, "loss": 0.5, "train_loss": 0.25, "seconds": 2.0 * number} | more


# of 0 to 0.7 in steps of 0.1, eight blocks, one each
RISING = [line(i, accuracy) for i, accuracy in enumerate((0.0, 0.1, None, 0.3, 0.7))]


def test_a_terminal_shows_a_bar_the_last_values_and_a_sparkline(tmp_path: Path) -> None:
    last = shown(tmp_path, RISING, terminal=True).splitlines()[-1]
    assert re.match(r"round 4/4 ━{8} accuracy 0\.7000  loss 0\.5000  0 s left  ▁▂▄█$", last.rstrip()), last


def test_the_sparkline_has_the_newest_values_that_fit(tmp_path: Path) -> None:
    many = [line(i, i / 100) for i in range(41)]
    sparkline = re.compile("[▁▂▃▄▅▆▇█]+$")
    last = shown(tmp_path, many, terminal=True).splitlines()[-1].rstrip()
    assert sparkline.search(last)[0] == "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██"  # type: ignore[index]  # 16: i * 7 / 15, rounded
    narrow = shown(tmp_path, many, terminal=True, width=71).splitlines()[-1].rstrip()
    assert len(narrow) == 71
    assert sparkline.search(narrow)[0] == "▁▂▃▃▄▅▆▆▇█"  # type: ignore[index]  # 10: i * 7 / 9, rounded


@pytest.mark.parametrize(("width", "encoding"), [(50, "utf-8"), (80, "ascii")])
def test_no_sparkline_without_room_or_unicode(width: int, encoding: str, tmp_path: Path) -> None:
    output = shown(tmp_path, RISING, terminal=True, width=width, encoding=encoding)
    assert "accuracy 0.7000" in output
    assert not set("▁▂▃▄▅▆▇█") & set(output)


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    assert shown(tmp_path, RISING[:3], terminal=False).splitlines() == [
        "round 0/2  accuracy 0.0000  loss 0.5000  train_loss 0.2500",
        "round 1/2  accuracy 0.1000  loss 0.5000  train_loss 0.2500",
        "round 2/2  accuracy -  loss 0.5000  train_loss 0.2500  0 s left",
    ]
