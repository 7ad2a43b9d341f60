"""Data, model, loss and metrics of every task. A task imports what only it needs when it is used."""

from tasks.digits import Digits
from tasks.task import Task

TASKS: dict[str, Task] = {
    "digits": Digits(),
}

__all__ = ["TASKS", "Task"]
