"""Data, model, loss and metrics of every task. A task imports what only it needs when it is used."""

from tasks.digits import Digits
from tasks.dpo import PreferenceTuning
from tasks.pretrain import PretrainC4
from tasks.sft import InstructionTuning
from tasks.task import Task, TaskSettings
from tasks.vision import Cifar10, Cifar100, FashionMnist, TinyImageNet

TASKS: dict[str, Task] = {
    "digits": Digits(),
    "fashion_mnist": FashionMnist(),
    "cifar10": Cifar10(),
    "cifar100": Cifar100(),
    "tiny_imagenet": TinyImageNet(),
    "pretrain_c4": PretrainC4(),
    "sft": InstructionTuning(),
    "dpo": PreferenceTuning(),
}

__all__ = ["TASKS", "Task", "TaskSettings"]
