"""Both halves of FedACT together, over rounds, against the algorithm in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from clients.client import FedClient
from fedact_flwr.inprocess import InProcessGrid
from fedact_flwr.settings import Settings
from strategies import STRATEGIES, wire
from tasks.task import Examples

TARGETS = np.array([[1.0, -2.0, 3.0, 0.5], [-1.0, 2.0, 0.3, 4.0], [0.2, 0.1, -1.5, 2.0]])  # of three clients


class Quadratic(nn.Module):
    """A vector in two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.3, -0.1]))
        self.b = nn.Parameter(torch.tensor([[0.2], [1.0]]))

    def vector(self) -> Tensor:
        return torch.cat([self.a, self.b.flatten()])


class QuadraticTask:
    """Loss 1/4 sum (x - target)^4, so the gradient is (x - target)^3; one example per client."""

    def terms(self, batch: Examples) -> int:
        return len(batch["target"])

    def loss(self, model: Quadratic, batch: Examples) -> Tensor:
        return (model.vector() - batch["target"][0]).pow(4).sum() / 4


def reference(s: Settings, score: str) -> np.ndarray:
    """The algorithm as in docs/algorithm.md, all clients in every round."""
    x = np.array([0.3, -0.1, 0.2, 1.0])
    v_bar, delta_g = np.zeros(4), np.zeros(4)
    alpha, gamma = (s.alpha or 1 / s.tau), (s.gamma or s.tau)
    for r in range(1, s.rounds + 1):
        eta = s.lr_min + (s.lr - s.lr_min) * (1 + np.cos(np.pi * (r - 1) / s.rounds)) / 2
        ends = []
        for target in TARGETS:
            y, m, v = x.copy(), np.zeros(4), v_bar.copy()
            for k in range(1, s.local_steps + 1):
                g = (y - target) ** 3
                m = s.beta1 * m + (1 - s.beta1) * g
                v = s.beta2 * v + (1 - s.beta2) * g * g
                t = (r - 1) * s.local_steps + k
                u_local = m / (1 - s.beta1**k) / (np.sqrt(v / (1 - s.beta2**t)) + s.eps)
                u = (1 - s.rho) * u_local + s.rho * delta_g
                top = np.argsort(-(u if score == "corrected" else u_local) * g, kind="stable")[: int(s.tau * 4)]
                phi = np.full(4, gamma)
                phi[top] = alpha
                y = (1 - eta * s.weight_decay) * y - eta * phi * u
            ends.append((y - x, v))
        mean = np.mean([delta for delta, _ in ends], axis=0)
        delta_g, v_bar = -mean / (s.local_steps * eta), np.mean([v for _, v in ends], axis=0)
        x = x + s.server_lr * mean
    return x


@pytest.mark.parametrize(
    ("method", "score", "own"),
    [
        ("fedact", "corrected", {}),
        ("fedact", "corrected", {"alpha": 1.5, "gamma": 0.2}),
        ("fedact_local", "local", {}),
        ("fedadamw", "corrected", {"tau": 1.0}),
    ],
)
def test_rounds_follow_the_algorithm(
    method: str, score: str, own: dict, make_settings: Callable[..., Settings]
) -> None:
    unusual: dict[str, Any] = {
        "clients": 3, "clients_per_round": 3, "rounds": 4, "local_steps": 3, "lr": 0.05, "lr_min": 0.01, "beta1": 0.8,
        "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.3, "rho": 0.4, "tau": 0.75, "server_lr": 0.7, "batch_size": 1,
    }  # fmt: skip
    settings = make_settings(method=method, **(unusual | own))
    app = ClientApp()

    @app.query("hosted_partitions")
    def query(message: Message, context: Any) -> Message:
        return Message(
            RecordDict({wire.CONFIG: ConfigRecord({wire.HOSTED: [0, 1, 2], wire.VERSIONS: []})}), reply_to=message
        )

    @app.train()
    def train(message: Message, context: Any) -> Message:
        config = message.content[wire.CONFIG]
        examples = {"target": torch.tensor(TARGETS[[config[wire.PARTITION]]], dtype=torch.float32)}
        client = FedClient(QuadraticTask(), Quadratic(), examples, examples, settings)  # type: ignore[arg-type]
        named = {name: wire.from_record(record) for name, record in message.content.array_records.items()}
        returned, _, metrics = client.fit(named, config)
        records = {name: wire.to_record(vectors) for name, vectors in returned.items()}
        return Message(RecordDict({**records, wire.METRICS: MetricRecord(dict(metrics))}), reply_to=message)

    grid, strategy = InProcessGrid(app, 1, {}), STRATEGIES[method](settings)
    arrays = wire.to_record({name: p.detach().numpy() for name, p in Quadratic().named_parameters()})
    for server_round in range(1, settings.rounds + 1):
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        arrays, metrics = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
        assert metrics["failures"] == 0
    x = np.concatenate([strategy.model["a"], strategy.model["b"].ravel()])
    np.testing.assert_allclose(x, reference(settings, score), rtol=2e-5)
