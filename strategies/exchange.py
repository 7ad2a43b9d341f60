"""Questions to nodes, and their answers one at a time."""

import time
from collections.abc import Iterator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # seconds between two looks for an answer, the longer the longer it takes


def exchange(grid: Grid, questions: Sequence[Message], timeout: float) -> Iterator[Message | None]:
    """Send all questions, and give the answer to each, in their order; None where there was none in time.

    Flower's own ``send_and_receive`` gathers all answers before it gives any, and looks for them every three seconds.
    Here answers that are not looked for yet stay with the SuperLink (in a simulation, with Flower's state in this
    process), so that memory does not grow with their number. The time counts from the first to the last of them.
    """
    sent = set(grid.push_messages(questions))
    deadline = time.monotonic() + timeout
    for question in questions:
        number = question.metadata.message_id
        pause = FIRST_PAUSE
        answers: list[Message] = []
        while number in sent and not (answers := list(grid.pull_messages([number]))) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        yield answers.pop() if answers else None
