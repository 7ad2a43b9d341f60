"""The ClientApp: hands each message to the partition's `FedClient`."""

import warnings
from collections.abc import Mapping
from functools import lru_cache
from logging import INFO
from pathlib import Path
from typing import cast

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log
from torch import nn

from clients.client import FedClient
from clients.device import prepare_device, require_compiler
from clients.methods import CLIENT_METHODS
from clients.optimizers import StabilityWarning
from clients.training import num_examples, take
from fedact_flwr.settings import Settings, parse
from strategies import wire
from strategies.seeds import derive_seed
from tasks import TASKS
from tasks.split import split_indices

# The server says it once per run; each client in each round would say it again.
warnings.filterwarnings("ignore", category=StabilityWarning)

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    client, config = _client(message, context), dict(_config(message))
    if CLIENT_METHODS[client.settings.method].keeps:
        config[wire.STATE_FOLDER] = str(_state_folder(context, str(config[wire.STATE_FOLDER])))
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


@app.query(wire.HOSTED_QUERY.removeprefix("query."))
def hosted_partitions(message: Message, context: Context) -> Message:
    """Node i of n hosts the partitions i, i + n, i + 2n, ..., so any number of nodes carries any run."""
    try:
        node, nodes = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    except KeyError as key:
        raise ValueError(f"the node config has no {key}; start it with partition-id=I num-partitions=N") from None
    hosted = list(range(node, _settings(context).clients, nodes))
    return Message(RecordDict({wire.CONFIG: ConfigRecord({wire.HOSTED: hosted})}), reply_to=message)


class _Workplace:
    """What the clients of one process share in one run: the split, a scratch model, and each client's data."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.task = TASKS[settings.task].configured(settings)
        self.parts = split_indices(settings, self.task.train_labels(), derive_seed(settings.seed, "split"))
        self.device = prepare_device(settings.device, settings.threads)
        self.model = self.task.make_model(seed=0).to(self.device)  # overwritten by each message
        self.trained = self.model
        if settings.compile:
            require_compiler(self.device.type)
            self.trained = cast(nn.Module, torch.compile(self.model))  # once for all clients
        self.clients: dict[int, FedClient] = {}

    def client(self, partition: int) -> FedClient:
        if partition not in self.clients:
            settings = self.settings
            examples = self.task.train_examples(self.parts[partition])
            examples = {name: tensor.to(self.device) for name, tensor in examples.items()}
            n = num_examples(examples)
            kept = min(n - 1, max(1, round(settings.holdout * n))) if settings.holdout else 0
            generator = torch.Generator().manual_seed(derive_seed(settings.seed, partition, "holdout"))
            order = torch.randperm(n, generator=generator)
            if settings.client_evaluation and kept == 0:
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
    return parse(context.run_config)


def _client(message: Message, context: Context) -> FedClient:
    return _workplace(_settings(context)).client(cast(int, _config(message)[wire.PARTITION]))


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
    return {name: wire.from_record(record) for name, record in message.content.array_records.items()}


def _config(message: Message) -> ConfigRecord:
    return message.content.config_records[wire.CONFIG]
