"""`exchange` on a clock of its own."""

from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Message, RecordDict

from fedact_flwr.inprocess import InProcessGrid
from strategies.exchange import exchange


class TimedGrid(InProcessGrid):
    """Message i can be sent unless ``answered[i]`` is None, and is answered after so many seconds."""

    def __init__(self, answered: list[float | None], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(None, 1, {})  # type: ignore[arg-type]
        self.answered, self.now, self.asked = answered, 0.0, []
        monkeypatch.setattr("strategies.exchange.time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for i, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(i)
        return [str(i) for i, seconds in enumerate(self.answered) if seconds is not None]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        (message_id,) = message_ids
        self.asked.append(message_id)
        seconds = self.answered[int(message_id)]
        return [f"answer {message_id}"] if seconds is not None and seconds <= self.now else []


def answers(grid: TimedGrid, timeout: float) -> list[Any]:
    node = next(iter(grid.get_node_ids()))
    return list(exchange(grid, [Message(RecordDict(), node, "train") for _ in grid.answered], timeout))


def test_answers_come_in_the_order_of_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = TimedGrid([5, 2, 0], monkeypatch)
    assert answers(grid, 60) == ["answer 0", "answer 1", "answer 2"]
    assert 5 <= grid.now < 6  # the later ones were there by then
    assert grid.asked[-3:] == ["0", "1", "2"]


def test_after_the_time_only_what_is_there_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = TimedGrid([100, 3, 200, 0], monkeypatch)
    assert answers(grid, 10) == [None, "answer 1", None, "answer 3"]
    assert 10 <= grid.now < 11


def test_a_question_that_could_not_be_sent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = TimedGrid([0, None], monkeypatch)
    assert answers(grid, 60) == ["answer 0", None]
    assert grid.now == 0
