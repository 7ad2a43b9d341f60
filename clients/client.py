"""The client: a Flower NumPyClient that trains and evaluates one partition's data."""

import math
import time
import warnings
from collections.abc import Mapping
from functools import cache
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.client import NumPyClient
from flwr.common import log
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from clients.device import memory_errors_explained, prepare_device, seed_draws
from clients.diagnostics import positive_score_ratio, top_score_mass
from clients.local_round import LocalRound
from clients.methods import CLIENT_METHODS, keeps
from clients.optimizers import ActAdamW
from clients.personal import BUFFERS, is_in
from clients.settings import LocalSettings
from clients.state import ClientState
from clients.training import WHAT_HELPS, NonFinite, batches, num_examples, train
from strategies import wire
from strategies.codecs import decode, encode
from strategies.seeds import derive_seed
from strategies.wire import Vectors
from tasks.task import Examples, Task

Named = Mapping[str, Vectors]  # named arrays by record name

# What is received is the message's own memory, and read only.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class FedClient(NumPyClient):
    """One partition's client.

    ``fit`` and ``evaluate`` are Flower's, but take and give arrays by record and name where Flower has a bare
    list: a method exchanges more than the model, and an order of layers is a poor contract between versions.

    Parameters
    ----------
    task : Task
    model : nn.Module
        A scratch model, overwritten by what each call receives. Clients of one process share it.
    examples, held_out : Examples
        The partition's training examples and those kept for ``evaluate``, on the device.
    settings : LocalSettings
    trained : nn.Module, optional
        What training calls in the place of ``model``: the same one, compiled.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        examples: Examples,
        held_out: Examples,
        settings: LocalSettings,
        trained: nn.Module | None = None,
    ) -> None:
        self.task = task
        self.device = prepare_device(settings.device, settings.threads)
        self.model = model.to(self.device)
        self.trained = self.model if trained is None else trained
        self.examples = examples
        self.held_out = held_out
        self.settings = settings

    def fit(  # type: ignore[override]
        self, parameters: Named, config: Mapping[str, Any]
    ) -> tuple[Named, int, dict[str, float]]:
        """Train from ``parameters``; config holds what `strategies.wire` lists, with a local path for STATE_FOLDER.

        Returns the delta and what the method returns beside it, the number of training examples, and metrics. What the
        method keeps is on disk when this returns. Raises `clients.state.LostState`, OSError where it can't be written,
        `clients.training.NonFinite` where training leaves the numbers, and `clients.device.OutOfMemory`.
        """
        with memory_errors_explained(self.settings):
            return self._fit(parameters, config)

    def _fit(self, parameters: Named, config: Mapping[str, Any]) -> tuple[Named, int, dict[str, float]]:
        started = time.perf_counter()
        settings, method = self.settings, CLIENT_METHODS[self.settings.method]
        epochs = settings.local_epochs
        steps = epochs * self._steps_per_epoch() if epochs else settings.local_steps
        local = self._begin(parameters, config, steps, config[wire.FOLDED])
        trainable, buffers = local.trainable, parameters[wire.MODEL].keys() - local.trainable.keys()
        optimizer = method.make_optimizer(local)
        if settings.diagnostics and isinstance(optimizer, ActAdamW):
            optimizer.keep_scores_at = steps
        loss = self._train(optimizer, steps, config[wire.SEED])

        n = num_examples(self.examples)
        metrics = {
            wire.PARTITION: config[wire.PARTITION],
            wire.NUM_EXAMPLES: n,
            wire.NUM_STEPS: steps,
            wire.TRAIN_LOSS: loss,
        }
        if isinstance(optimizer, ActAdamW):
            _say_once(f"ACT-AdamW's step: {optimizer.path}")
        if isinstance(optimizer, ActAdamW) and optimizer.scores is not None:
            metrics["positive_score_ratio"] = positive_score_ratio(optimizer.scores)
            metrics["top_score_mass"] = top_score_mass(optimizer.scores, settings.top_p)
        finished = method.finish(local, optimizer)
        returned: dict[str, dict[str, NDArray]] = {
            record: {name: t.cpu().numpy() for name, t in zip(trainable, tensors, strict=True)}
            for record, tensors in finished.returned.items()
        }
        returned[wire.DELTA] = {}
        for name, tensor in exchanged_state(self.model).items():
            new = tensor.detach().cpu().numpy()
            moved = new - parameters[wire.MODEL][name] if tensor.is_floating_point() else new.copy()
            returned[wire.DELTA][name] = np.asarray(moved)
        for record, named in returned.items():
            if odd := [name for name, array in named.items() if not wire.all_finite(array)]:
                raise NonFinite(f"{record} {odd[0]} is not finite after {steps} steps{WHAT_HELPS}")
        if odd := [what for what, tensors in finished.kept.items() if not all(t.isfinite().all() for t in tensors)]:
            raise NonFinite(f"the client's own {odd[0]} is not finite after {steps} steps{WHAT_HELPS}")
        if keeps(settings):
            new_state = dict(finished.kept)
            if settings.derives_correction:
                # copies: equal arrays of a message are the same memory, which safetensors refuses
                new_state[wire.MODEL] = [x.clone() for x in local.received(wire.MODEL)]
            names = {wire.MODEL: list(trainable), BUFFERS: list(local.buffers)}
            to_keep = {
                what: dict(zip(names.get(what, list(local.own)), tensors, strict=True))
                for what, tensors in new_state.items()
            }
            self._state(config).save(config[wire.ROUND], to_keep, config[wire.PINNED])
        seed = config[wire.SEED]
        encoded = {record: encode(record, v, settings.format(record), buffers, seed) for record, v in returned.items()}
        metrics["client_seconds"] = time.perf_counter() - started
        return encoded, n, metrics

    def _begin(self, parameters: Named, config: Mapping[str, Any], steps: int, folded: int) -> LocalRound:
        """A round of ``steps``: the model as received, and what the client kept in round ``folded``."""
        settings, method = self.settings, CLIENT_METHODS[self.settings.method]
        # for what draws while training, e.g. crops and dropout: not the numbers that order the data
        seed_draws(self.device, derive_seed(config[wire.SEED], "draws"))
        model = parameters[wire.MODEL]
        load_state(self.model, model)
        trainable = dict(trainable_parameters(self.model))
        message = {
            record: decode(record, v, settings.format(record), model.keys() - trainable.keys(), model)
            for record, v in parameters.items()
        }
        layers = method.layers(settings, trainable) if method.layers else None
        in_layers = {n: t for n, t in exchanged_state(self.model).items() if layers is None or is_in(n, layers)}
        own = {name: t for name, t in in_layers.items() if name in trainable}
        buffers = {name: t for name, t in in_layers.items() if name not in trainable}
        like = {what: buffers if what == BUFFERS else own for what in method.keeps}
        derives = settings.derives_correction and wire.CORRECTION not in message
        kept = self._state(config).load(folded, {**like, wire.MODEL: trainable} if derives else like)
        if derives:
            size = np.float32(config[wire.STEP_SIZE])
            message[wire.CORRECTION] = {
                name: np.asarray((before.numpy(force=True) - model[name]) / size)
                for name, before in zip(trainable, kept.pop(wire.MODEL), strict=True)
            }
        return LocalRound(
            trainable=trainable,
            message=message,
            lr=config[wire.LR],
            steps=steps,
            steps_done=config[wire.STEPS_DONE],
            settings=settings,
            kept=kept,
            folded=folded,
            own=own,
            buffers=buffers,
            train=lambda optimizer: self._train(optimizer, steps, derive_seed(config[wire.SEED], "again")),
        )

    def _train(self, optimizer: Optimizer, steps: int, seed: int) -> float:
        """The mean loss over ``steps``; the order of the examples follows from ``seed``."""
        settings = self.settings
        return train(
            self.trained,
            self.task.loss,
            batches(self.examples, settings.batch_size, torch.Generator().manual_seed(seed)),
            optimizer,
            steps,
            settings.precision,
            settings.clip_norm,
            settings.micro_batch_size,
            self.task.terms,
        )

    def _steps_per_epoch(self) -> int:
        return -(-num_examples(self.examples) // self.settings.batch_size)

    def _state(self, config: Mapping[str, Any]) -> ClientState:
        return ClientState(Path(config[wire.STATE_FOLDER]), config[wire.PARTITION])

    def evaluate(  # type: ignore[override]
        self, parameters: Named, config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, float]]:
        """Evaluate the received model on the held-out examples. Raises `clients.device.OutOfMemory`."""
        load_state(self.model, parameters[wire.MODEL])
        with memory_errors_explained(self.settings):
            metrics = self.task.evaluate(self.model, self.held_out)
        n = num_examples(self.held_out)
        bookkeeping = {wire.PARTITION: config[wire.PARTITION], wire.NUM_EXAMPLES: n}
        return metrics["loss"], n, metrics | bookkeeping

    def evaluate_personally(self, parameters: Named, config: Mapping[str, Any]) -> dict[str, float]:
        """Evaluate three models on the held-out examples; ``parameters`` and ``config`` are as for `fit`.

        * global: the received one
        * personal: the client's own, where the method has such
        * tuned: the received one after an epoch on the client's examples, in whole batches, at config's learning rate,
          with the method's local optimizer as a client has it that takes part for the first time; no metrics where
          that leaves the numbers

        Nothing is kept. Returns the task's metrics, each with the model's kind before its name. Raises as `fit` does,
        but for `clients.training.NonFinite`.
        """
        with memory_errors_explained(self.settings):
            return self._evaluate_personally(parameters, config)

    def _evaluate_personally(self, parameters: Named, config: Mapping[str, Any]) -> dict[str, float]:
        method, found = CLIENT_METHODS[self.settings.method], {}
        load_state(self.model, parameters[wire.MODEL])
        found[wire.GLOBAL] = self.task.evaluate(self.model, self.held_out)
        if method.take_up:
            method.take_up(self._begin(parameters, config, 1, config[wire.FOLDED]))
            found[wire.PERSONAL] = self.task.evaluate(self.model, self.held_out)
        steps = self._steps_per_epoch()
        optimizer = method.make_optimizer(self._begin(parameters, config, steps, 0))
        try:
            self._train(optimizer, steps, config[wire.SEED])
            tuned = self.task.evaluate(self.model, self.held_out)
        except NonFinite as error:
            log(WARNING, "partition %s, fine-tuning: %s", config[wire.PARTITION], error)
        else:
            found |= {wire.TUNED: tuned} if all(map(math.isfinite, tuned.values())) else {}
        metrics = {f"{kind}_{key}": value for kind, each in found.items() for key, value in each.items()}
        bookkeeping = {wire.PARTITION: config[wire.PARTITION], wire.NUM_EXAMPLES: num_examples(self.held_out)}
        return metrics | bookkeeping


@cache
def _say_once(text: str) -> None:
    """Once in a process."""
    log(INFO, text)


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that train, tied ones once, in the model's order."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def exchanged_state(model: nn.Module) -> dict[str, Tensor]:
    """What travels as the model: the trainable parameters and the persistent buffers. Frozen ones stay home."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {**dict(trainable_parameters(model)), **buffers}


@torch.no_grad()
def load_state(model: nn.Module, arrays: Vectors) -> None:
    """Overwrite the exchanged state of ``model``. Raises ValueError where the names are not the model's."""
    state = exchanged_state(model)
    if state.keys() != arrays.keys():
        odd = sorted(state.keys() ^ arrays.keys())
        raise ValueError(f"the received model has other names than this task's, {odd[0]!r} first")
    for name, tensor in state.items():
        tensor.copy_(torch.from_numpy(arrays[name]))
