"""What a step of FedACT's local training takes on this machine, tried on random inputs."""

import platform
import time
import warnings
from typing import cast

import numpy as np
import torch
from torch import nn

from clients.client import trainable_parameters
from clients.device import memory_errors_explained
from clients.local_round import LocalRound
from clients.methods import CLIENT_METHODS
from clients.optimizers import StabilityWarning
from clients.training import batches, train
from fedact_flwr.settings import Settings
from strategies import wire
from tasks import TASKS
from tasks.dpo import SIDES, PreferenceTuning
from tasks.pretrain import PretrainC4
from tasks.sft import InstructionTuning
from tasks.task import Examples, Task
from tasks.vision import ImageTask

WARM_UP, STEPS = 3, 20
SLOW = 3.0  # seconds a step of fewer examples, from which on the batch is reckoned from them

warnings.filterwarnings("ignore", category=StabilityWarning)  # what is trained here is nothing anyway


def device_name(settings: Settings) -> str:
    if settings.device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {settings.device}, {settings.threads} thread(s)"


def seconds_per_step(settings: Settings) -> tuple[float, int]:
    """Seconds of one optimizer step, and from how many examples of the batch: all, unless the device is slow.

    Neither data nor tokenizer is needed; sequences of text are as long as they may be. Raises `tasks.task.BadData`
    where there is no base model, ImportError, `clients.device.OutOfMemory` and `clients.training.NonFinite`.
    """
    with memory_errors_explained(settings):
        task, batch = TASKS[settings.task].configured(settings), settings.batch_size
        device = torch.device(settings.device)
        model = task.make_model(0).to(device)
        inputs = random_examples(task, model, batch)
        examples = {name: tensor.to(device) for name, tensor in inputs.items()}
        trainable = dict(trainable_parameters(model))
        zeros = {name: np.zeros(p.shape, np.float32) for name, p in trainable.items()}
        message = {wire.CORRECTION: zeros, wire.SECOND_MOMENT: zeros}
        local = LocalRound(trainable, message, settings.lr, STEPS, steps_done=0.0, settings=settings)
        optimizer = CLIENT_METHODS["fedact"].make_optimizer(local)

        def seconds(trained: nn.Module, size: int, steps: int) -> float:
            stream = batches(examples, size, torch.Generator().manual_seed(0))
            started = time.perf_counter()
            train(  # which waits for the device
                trained, task.loss, stream, optimizer, steps, settings.precision, settings.clip_norm,
                settings.micro_batch_size, task.terms,
            )  # fmt: skip
            return (time.perf_counter() - started) / steps

        seconds(model, 1, steps=1)
        size, took = 1, seconds(model, 1, steps=1)
        while size < batch and took < SLOW:
            size = min(2 * size, batch)
            took = seconds(model, size, steps=1)
        if size < batch:
            return took * batch / size, size
        trained = cast(nn.Module, torch.compile(model)) if settings.compile else model
        seconds(trained, batch, WARM_UP)
        return seconds(trained, batch, STEPS), batch


def random_examples(task: Task, model: nn.Module, n: int) -> Examples:
    """Examples of the form that ``task`` has, on the CPU."""
    if isinstance(task, ImageTask):
        return {
            "image": torch.randint(0, 256, (n, *task.spec.shape), dtype=torch.uint8),
            "label": torch.randint(0, task.spec.classes, (n,)),
        }
    assert isinstance(task, PretrainC4 | InstructionTuning | PreferenceTuning)
    assert callable(model.get_input_embeddings)
    ids = torch.randint(0, model.get_input_embeddings().num_embeddings, (n, task.max_length), dtype=torch.int32)
    if isinstance(task, PretrainC4):
        return {"input_ids": ids}
    response = {
        "ids": ids,
        "prompt": torch.ones(n, dtype=torch.int64),
        "length": torch.full((n,), task.max_length),
    }
    if isinstance(task, InstructionTuning):
        return response
    return {f"{side}_{name}": tensor for side in SIDES for name, tensor in response.items()}
