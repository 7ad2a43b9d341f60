"""The ClientApp: hands each message to the partition's `FedClient`."""

import warnings
from collections.abc import Mapping
from functools import lru_cache
from logging import INFO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log
from numpy.typing import NDArray
from torch import nn

from clients.client import FedClient
from clients.device import keep_freed_memory, prepare_device, require_compiler, spare_dynamo
from clients.methods import keeps
from clients.optimizers import StabilityWarning
from clients.training import num_examples, take
from fedact_flwr.cache import ExampleCache
from fedact_flwr.settings import Settings, check_task, parse
from strategies import wire
from strategies.seeds import derive_seed
from strategies.versions import versions
from tasks import TASKS
from tasks.split import split_indices

# The server says it once per run; each client in each round would say it again.
warnings.filterwarnings("ignore", category=StabilityWarning)

NODE_SETTINGS = ("data", "device")  # a node may have its own, in its config

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    client = _client(message, context)
    config = _local_config(client, message, context)
    returned, examples, metrics = client.fit(_named_arrays(message), config)
    log(
        INFO,
        "round %s: partition %s trained %s steps on %s examples, loss %.3f",
        config[wire.ROUND],
        config[wire.PARTITION],
        metrics[wire.NUM_STEPS],
        examples,
        metrics[wire.TRAIN_LOSS],
    )
    records = {name: wire.to_record(vectors) for name, vectors in returned.items()}
    return Message(RecordDict({**records, wire.METRICS: MetricRecord(dict(metrics))}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    client = _client(message, context)
    _, _, metrics = client.evaluate(_named_arrays(message), _config(message))
    return Message(RecordDict({wire.METRICS: MetricRecord(dict(metrics))}), reply_to=message)


@app.evaluate(wire.PERSONAL_EVALUATION.removeprefix("evaluate."))
def evaluate_personally(message: Message, context: Context) -> Message:
    client = _client(message, context)
    metrics = client.evaluate_personally(_named_arrays(message), _local_config(client, message, context))
    return Message(RecordDict({wire.METRICS: MetricRecord(dict(metrics))}), reply_to=message)


@app.query(wire.HOSTED_QUERY.removeprefix("query."))
def hosted_partitions(message: Message, context: Context) -> Message:
    """Which partitions this node hosts.

    Node i of n hosts i, i + n, i + 2n, ..., so any number of nodes carries any run; with data of its own, i alone.
    """
    settings = _settings(context)
    node = _node_number(context, "partition-id")
    if settings.split == "nodes":
        if "data" not in context.node_config:
            raise ValueError('split = "nodes": the node config has no data; start it with "data=\'FOLDER\'"')
        if not Path(settings.data).expanduser().exists():
            raise ValueError(f"data = {settings.data!r}: it is not on this node")
        hosted = list(range(node, settings.clients)[:1])
    else:
        hosted = list(range(node, settings.clients, _node_number(context, "num-partitions")))
    config = ConfigRecord({wire.HOSTED: hosted})
    config[wire.VERSIONS] = [f"{name} {number}" for name, number in versions().items()]
    return Message(RecordDict({wire.CONFIG: config}), reply_to=message)


def _node_number(context: Context, key: str) -> int:
    try:
        return int(context.node_config[key])
    except KeyError:
        raise ValueError(f"the node config has no {key}; start it with partition-id=I num-partitions=N") from None


class _Workplace:
    """What the clients of one process share in one run: the split, a scratch model, and each client's data."""

    def __init__(self, settings: Settings, cache: str) -> None:
        keep_freed_memory()
        self.settings = settings
        self.cache = ExampleCache(Path(cache).expanduser() if cache else None, settings)
        self.task = TASKS[settings.task].configured(settings)
        if settings.split == "nodes":
            n = len(self.cache.labels(self._checked_labels))
            if n < settings.min_samples:
                raise ValueError(f"data = {settings.data!r}: {n} examples, min_samples = {settings.min_samples}")
            self.parts = [np.arange(n)] * settings.clients
        else:
            labels = self.cache.labels(self.task.train_labels)
            self.parts = split_indices(settings, labels, derive_seed(settings.seed, "split"))
        self.device = prepare_device(settings.device, settings.threads)
        self.model = self.task.make_model(seed=0).to(self.device)  # overwritten by each message
        self.trained = self.model
        if settings.compile:
            require_compiler(self.device.type)
            self.trained = cast(nn.Module, torch.compile(self.model))  # once for all clients
        else:
            spare_dynamo()
        self.clients: dict[int, FedClient] = {}

    def _checked_labels(self) -> NDArray:
        check_task(self.settings, train=True, test=False)
        return self.task.train_labels()

    def client(self, partition: int) -> FedClient:
        if partition not in self.clients:
            settings = self.settings
            indices = self.parts[partition]
            examples = self.cache.examples(indices, lambda: self.task.train_examples(indices))
            examples = {name: tensor.to(self.device) for name, tensor in examples.items()}
            n = num_examples(examples)
            kept = min(n - 1, max(1, round(settings.holdout * n))) if settings.holdout else 0
            generator = torch.Generator().manual_seed(derive_seed(settings.seed, partition, "holdout"))
            order = torch.randperm(n, generator=generator)
            if kept == 0 and (settings.client_evaluation or settings.personal_every):
                raise ValueError(
                    f"holdout = {settings.holdout}: partition {partition} has one example, none to hold out"
                )
            self.clients[partition] = FedClient(
                self.task,
                self.model,
                take(examples, order[kept:]),
                take(examples, order[:kept]),
                settings,
                self.trained,
            )
        return self.clients[partition]


_workplace = lru_cache(maxsize=1)(_Workplace)


def _settings(context: Context) -> Settings:
    """The run's, with the data and the device that this node's config names."""
    own = {key: context.node_config[key] for key in NODE_SETTINGS if key in context.node_config}
    return parse({**context.run_config, **own})


def _client(message: Message, context: Context) -> FedClient:
    workplace = _workplace(_settings(context), str(context.node_config.get("cache", "")))
    return workplace.client(cast(int, _config(message)[wire.PARTITION]))


def _local_config(client: FedClient, message: Message, context: Context) -> dict[str, Any]:
    """The message's, with a local path for the folder where the client keeps its state, if it does."""
    config = dict(_config(message))
    if keeps(client.settings):
        config[wire.STATE_FOLDER] = str(_state_folder(context, str(config[wire.STATE_FOLDER])))
    return config


def _state_folder(context: Context, name: str) -> Path:
    """Where this run's clients on this node keep their state: ``name``, which the server chose, under the node's root.

    The root is the node config's ``client-state``, else the run's ``output``, so that in a simulation the state lies
    in the run's own record. Raises ValueError where that is no folder to write to or ``name`` leads out of it.
    """
    root = context.node_config.get("client-state", context.run_config["output"])
    try:
        path = Path(str(root)).expanduser().resolve()
        folder = (path / name).resolve()
        if path not in folder.parents:
            raise ValueError(f"state_folder = {name!r}: not inside {path}")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # expanduser raises RuntimeError for a user that there is not
        raise ValueError(
            f"client-state = {str(root)!r}: clients can't keep their state there ({error}); start the node with "
            f"--node-config \"client-state='FOLDER'\""
        ) from error
    return folder


def _named_arrays(message: Message) -> Mapping[str, wire.Vectors]:
    return {name: wire.from_record(record) for name, record in wire.array_records(message.content).items()}


def _config(message: Message) -> ConfigRecord:
    return cast(ConfigRecord, message.content[wire.CONFIG])
