"""The server halves on three-element weights: every number can be checked by hand."""

import logging
import re
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SType

from clients.diagnostics import DirectionConsistency
from fedact_flwr.inprocess import InProcessGrid
from fedact_flwr.settings import Settings
from strategies import STRATEGIES, FedACT, FedAdam, FedAvg, FederatedStrategy, RunFailed, wire
from strategies.aggregation import linear_combination
from strategies.codecs import decode, encode
from strategies.hosts import Hosts
from strategies.reply import last_line
from strategies.versions import versions

MakeSettings = Callable[..., Settings]
X0 = {"w": np.array([1, 2, 3], np.float32)}

# What each of two clients returns: delta, v, K and the number of examples.
DELTAS = [np.array([-2, 0, 4], np.float32), np.array([-4, 2, 0], np.float32)]
SECOND_MOMENTS = [np.array([1, 0, 3], np.float32), np.array([3, 2, 1], np.float32)]
STEPS = [10, 10]
EXAMPLES = [1, 3]


def reply_of(partition: int, returned: tuple[str, ...]) -> RecordDict:
    records: dict[str, Any] = {wire.DELTA: wire.to_record({"w": DELTAS[partition % 2]})}
    if wire.SECOND_MOMENT in returned:
        records[wire.SECOND_MOMENT] = wire.to_record({"w": SECOND_MOMENTS[partition % 2]})
    records[wire.METRICS] = metrics_of(partition)
    return RecordDict(records)


def metrics_of(partition: int) -> MetricRecord:
    return MetricRecord(
        {
            wire.PARTITION: partition,
            wire.NUM_EXAMPLES: EXAMPLES[partition % 2],
            wire.NUM_STEPS: STEPS[partition % 2],
            wire.TRAIN_LOSS: float(partition),
        }
    )


def hosting(partitions: list[int], packages: Sequence[str] = ()) -> RecordDict:
    """A node's answer to which partitions it hosts, and which packages it has."""
    return RecordDict({wire.CONFIG: ConfigRecord({wire.HOSTED: partitions, wire.VERSIONS: list(packages)})})


def grid_of(
    respond: Callable[[int], RecordDict], nodes: int = 2, clients: int = 2
) -> tuple[InProcessGrid, list[Message]]:
    """A grid whose clients answer ``respond(partition)``, and the list of train messages they got."""
    app, seen = ClientApp(), []

    @app.train()
    def train(message: Message, context: Any) -> Message:
        seen.append(message)
        return Message(respond(message.content[wire.CONFIG][wire.PARTITION]), reply_to=message)

    @app.query("hosted_partitions")
    def query(message: Message, context: Any) -> Message:
        hosted = list(range(context.node_config["partition-id"], clients, nodes))
        return Message(hosting(hosted), reply_to=message)

    return InProcessGrid(app, nodes, {}), seen


def one_round(
    strategy: FederatedStrategy,
    grid: InProcessGrid,
    server_round: int = 1,
    arrays: ArrayRecord | None = None,
    order: int = 1,
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    messages = strategy.configure_train(server_round, arrays or wire.to_record(X0), ConfigRecord(), grid)
    return strategy.aggregate_train(server_round, list(grid.send_and_receive(messages))[::order])


@pytest.fixture
def two_clients(make_settings: MakeSettings) -> MakeSettings:
    defaults = {
        "clients": 2,
        "clients_per_round": 2,
        "rounds": 3,
        "lr": 0.5,
        "lr_schedule": "constant",
        "beta2": 0.5,
    }
    return lambda **overrides: make_settings(**(defaults | overrides))


def test_fedact_by_hand(two_clients: MakeSettings) -> None:
    strategy = FedACT(two_clients())
    grid, _ = grid_of(lambda p: reply_of(p, FedACT.returned))
    arrays, _ = one_round(strategy, grid)
    # mean delta (-3, 1, 2); Delta_G = -mean / (K eta) = -mean / 5; v_bar the mean of v
    assert wire.from_record(arrays)["w"].tolist() == [-2, 3, 5]
    np.testing.assert_allclose(strategy.state[wire.CORRECTION]["w"], [0.6, -0.2, -0.4], rtol=1e-7)
    assert strategy.state[wire.SECOND_MOMENT]["w"].tolist() == [2, 1, 2]
    assert strategy.steps_done == 10


def test_state_reaches_the_clients_in_the_next_round(two_clients: MakeSettings) -> None:
    strategy = FedACT(two_clients())
    grid, seen = grid_of(lambda p: reply_of(p, FedACT.returned))
    arrays, _ = one_round(strategy, grid)
    first = seen[0].content
    assert not wire.from_record(first[wire.CORRECTION])["w"].any()
    assert not wire.from_record(first[wire.SECOND_MOMENT])["w"].any()
    assert first[wire.CONFIG][wire.STEPS_DONE] == 0
    one_round(strategy, grid, 2, arrays)
    second = seen[-1].content
    assert wire.from_record(second[wire.MODEL])["w"].tolist() == [-2, 3, 5]
    assert wire.from_record(second[wire.SECOND_MOMENT])["w"].tolist() == [2, 1, 2]
    assert second[wire.CONFIG][wire.STEPS_DONE] == 10


def test_the_new_share_of_v_joins_what_is_left_of_the_old(two_clients: MakeSettings) -> None:
    """In fewer bits v_bar <- b2^K v_bar + mean(e_i): twice (2, 1, 2), of which 1/2^10 is left the second time."""

    def respond(partition: int) -> RecordDict:
        content = reply_of(partition, FedACT.returned)
        e = encode(wire.SECOND_MOMENT, {"w": SECOND_MOMENTS[partition]}, "int8", (), 0)  # these have exact codes
        content[wire.SECOND_MOMENT] = wire.to_record(e)
        return content

    strategy = FedACT(two_clients(wire_second_moment="int8"))
    grid, seen = grid_of(respond)
    arrays, _ = one_round(strategy, grid)
    assert strategy.state[wire.SECOND_MOMENT]["w"].tolist() == [2, 1, 2]
    one_round(strategy, grid, 2, arrays)
    assert strategy.state[wire.SECOND_MOMENT]["w"].tolist() == [2 + 2 / 2**10, 1 + 1 / 2**10, 2 + 2 / 2**10]
    sent = decode(wire.SECOND_MOMENT, wire.from_record(seen[-1].content[wire.SECOND_MOMENT]), "int8", (), X0)
    assert sent["w"].tolist() == [2, 1, 2]


def test_server_lr_scales_the_step_but_not_delta_g(two_clients: MakeSettings) -> None:
    strategy = FedACT(two_clients(server_lr=0.5))
    grid, _ = grid_of(lambda p: reply_of(p, FedACT.returned))
    arrays, _ = one_round(strategy, grid)
    assert wire.from_record(arrays)["w"].tolist() == [-0.5, 2.5, 4]
    np.testing.assert_allclose(strategy.state[wire.CORRECTION]["w"], [0.6, -0.2, -0.4], rtol=1e-7)


def test_weighting_by_examples_weights_x_v_and_delta_g_alike(two_clients: MakeSettings) -> None:
    strategy = FedACT(two_clients(weighting="examples"))
    grid, _ = grid_of(lambda p: reply_of(p, FedACT.returned))
    arrays, metrics = one_round(strategy, grid)
    # weights 1/4 and 3/4: mean delta (-3.5, 1.5, 1)
    assert wire.from_record(arrays)["w"].tolist() == [-2.5, 3.5, 4]
    np.testing.assert_allclose(strategy.state[wire.CORRECTION]["w"], [0.7, -0.3, -0.2], rtol=1e-6)
    assert strategy.state[wire.SECOND_MOMENT]["w"].tolist() == [2.5, 1.5, 1.5]
    assert metrics[wire.TRAIN_LOSS] == pytest.approx(0.75)


@pytest.mark.parametrize(("weighting", "expected"), [("auto", [-2.5, 3.5, 4]), ("uniform", [-2, 3, 5])])
def test_pflalign_averages_by_examples_unless_told_otherwise(
    weighting: str, expected: list[float], two_clients: MakeSettings
) -> None:
    strategy = STRATEGIES["pflalign"](two_clients(method="pflalign", weighting=weighting))
    grid, _ = grid_of(lambda p: reply_of(p, ()))
    arrays, _ = one_round(strategy, grid)
    assert wire.from_record(arrays)["w"].tolist() == expected


def test_unequal_steps(two_clients: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each delta is divided by its own K; t follows the mean EMA weight (1 - .5^1 + 1 - .5^2) / 2 = 1 - .375."""
    monkeypatch.setattr(f"{__name__}.STEPS", [1, 2])
    strategy = FedACT(two_clients(local_epochs=1))
    grid, _ = grid_of(lambda p: reply_of(p, FedACT.returned))
    one_round(strategy, grid)
    # -(delta_0 / (1 * .5) + delta_1 / (2 * .5)) / 2
    np.testing.assert_allclose(strategy.state[wire.CORRECTION]["w"], [4, -1, -4], rtol=1e-7)
    assert 0.5**strategy.steps_done == pytest.approx(0.375)


def test_the_rounds_learning_rate_reaches_clients_and_delta_g(two_clients: MakeSettings) -> None:
    """Cosine from .5 over 3 rounds: in round 2 eta = .5 (1 + cos(pi/3)) / 2 = .375."""
    strategy = FedACT(two_clients(lr_schedule="cosine"))
    grid, seen = grid_of(lambda p: reply_of(p, FedACT.returned))
    arrays, _ = one_round(strategy, grid)
    one_round(strategy, grid, 2, arrays)
    assert seen[-1].content[wire.CONFIG][wire.LR] == pytest.approx(0.375)
    np.testing.assert_allclose(strategy.state[wire.CORRECTION]["w"], np.array([3, -1, -2]) / 3.75, rtol=1e-6)


def test_metrics_of_clients_never_overwrite_the_servers(two_clients: MakeSettings) -> None:
    strategy = FedACT(two_clients())

    def respond(partition: int) -> RecordDict:
        content = reply_of(partition, FedACT.returned)
        content[wire.METRICS].update({"lr": 1e-9, "round": 99, "replies": 0, "mine": 2.0})
        return content

    grid, _ = grid_of(respond)
    _, metrics = one_round(strategy, grid)
    assert (metrics["lr"], metrics["round"], metrics["replies"], metrics["mine"]) == (0.5, 1, 2, 2.0)
    np.testing.assert_allclose(strategy.state[wire.CORRECTION]["w"], [0.6, -0.2, -0.4], rtol=1e-7)


def test_fedavg_sends_and_wants_the_model_alone(two_clients: MakeSettings) -> None:
    strategy = FedAvg(two_clients(method="fedavg"))
    grid, seen = grid_of(lambda p: reply_of(p, ()))
    arrays, _ = one_round(strategy, grid)
    assert set(seen[0].content.array_records) == {wire.MODEL}
    assert wire.from_record(arrays)["w"].tolist() == [-2, 3, 5]


def test_fedadam_by_hand(two_clients: MakeSettings) -> None:
    """With b1 = b2 = .5 and D = (-3, 1, 2): m = D/2, v = D D/2, so a step of sign(D) sqrt(1/2).

    In round 2, with the same replies, m = 3/4 D and v = 3/4 D D. A step on D itself would be sqrt(2) and more.
    """
    settings = two_clients(method="fedadam", server_beta1=0.5, server_beta2=0.5, server_lr=1.0)
    strategy = FedAdam(settings)
    grid, _ = grid_of(lambda p: reply_of(p, ()))
    arrays, _ = one_round(strategy, grid)
    sign = np.array([-1, 1, 1])
    np.testing.assert_allclose(wire.from_record(arrays)["w"], X0["w"] + sign * 0.5**0.5, rtol=1e-6)
    arrays, _ = one_round(strategy, grid, 2, arrays)
    np.testing.assert_allclose(wire.from_record(arrays)["w"], X0["w"] + sign * (0.5**0.5 + 0.75**0.5), rtol=1e-6)


def test_fedadam_leaves_buffers_to_the_mean(two_clients: MakeSettings) -> None:
    def respond(partition: int) -> RecordDict:
        content = reply_of(partition, ())
        content[wire.DELTA] = wire.to_record({"w": DELTAS[partition], "mean": np.full(2, 4.0 * partition, np.float32)})
        return content

    strategy = FedAdam(two_clients(method="fedadam"), buffers=frozenset({"mean"}))
    x0 = {**X0, "mean": np.ones(2, np.float32)}
    arrays, _ = one_round(strategy, grid_of(respond)[0], arrays=wire.to_record(x0))
    assert wire.from_record(arrays)["mean"].tolist() == [3, 3]
    assert all(vectors.keys() == {"w"} for vectors in strategy.state.values())


def with_control(partition: int) -> RecordDict:
    content = reply_of(partition % 2, ())
    content[wire.METRICS][wire.PARTITION] = partition
    content[wire.CONTROL] = wire.to_record({"w": np.array([4, -8, 12], np.float32) * (1 + partition)})
    return content


def test_the_control_variate_is_a_mean_over_all_clients(make_settings: MakeSettings) -> None:
    """Two of four clients are asked; their c_i change by (4, -8, 12) times 1 + partition: c moves by a quarter."""
    settings = make_settings(
        method="scaffold", clients=4, clients_per_round=2, weighting="examples", server_lr=0.5, seed=4
    )
    strategy = STRATEGIES["scaffold"](settings)
    grid, seen = grid_of(with_control, nodes=4, clients=4)
    arrays, _ = one_round(strategy, grid)
    assert [m.content[wire.CONFIG][wire.PARTITION] for m in seen] == [0, 1]
    assert strategy.state[wire.CONTROL]["w"].tolist() == [3, -6, 9]
    # weights 1/4 and 3/4 and server_lr for x alone: mean delta (-3.5, 1.5, 1)
    assert wire.from_record(arrays)["w"].tolist() == [-0.75, 2.75, 3.5]
    one_round(strategy, grid, 2, arrays)
    assert wire.from_record(seen[-1].content[wire.CONTROL])["w"].tolist() == [3, -6, 9]


def test_a_failed_round_is_no_round_to_go_on_from(two_clients: MakeSettings) -> None:
    """One good reply of two that are needed: it is not folded, so its client starts from where it was."""
    strategy = STRATEGIES["scaffold"](two_clients(method="scaffold", min_replies=2))

    def respond(partition: int) -> RecordDict:
        content = with_control(partition)
        if partition == 1:
            content[wire.METRICS][wire.NUM_STEPS] = 0
        return content

    one_round(strategy, grid_of(respond)[0])
    assert strategy.folded == {}
    assert strategy.failed_in_a_row == 1


def test_clients_go_on_from_the_round_that_was_folded(two_clients: MakeSettings) -> None:
    """Partition 1's reply to round 1 is refused, and round 2 fails as a whole: neither is a state to go on from."""
    strategy = STRATEGIES["scaffold"](two_clients(method="scaffold"))
    broken_in = {1: {1}, 2: {0, 1}, 3: set()}
    now = [0]

    def respond(partition: int) -> RecordDict:
        content = with_control(partition)
        if partition in broken_in[now[0]]:
            content[wire.METRICS][wire.NUM_STEPS] = 0
        return content

    grid, seen = grid_of(respond)
    for now[0] in (1, 2, 3):
        one_round(strategy, grid, now[0], wire.to_record(strategy.model or X0))
    asked = {(m.content[wire.CONFIG][wire.ROUND], m.content[wire.CONFIG][wire.PARTITION]): m for m in seen}
    folded = {key: m.content[wire.CONFIG][wire.FOLDED] for key, m in asked.items()}
    assert folded == {(1, 0): 0, (1, 1): 0, (2, 0): 1, (2, 1): 0, (3, 0): 1, (3, 1): 0}
    assert strategy.folded == {0: 3, 1: 3}
    assert len({m.content[wire.CONFIG][wire.STATE_FOLDER] for m in seen}) == 1


@pytest.mark.parametrize(("second_moment", "shape"), [("full", (4, 2)), ("tensor", (1,)), ("block", (2,))])
def test_second_moments_travel_in_the_form_that_was_set(
    second_moment: str, shape: tuple[int, ...], two_clients: MakeSettings
) -> None:
    """One client's v is 1 in each block, the other's 3: v_bar is 2. A reply in another form is refused."""
    x0 = wire.to_record({"qkv": np.zeros((4, 2), np.float32)})
    strategy = FedACT(two_clients(second_moment=second_moment, min_replies=1), blocks={"qkv": 2})

    def respond(partition: int, shape: tuple[int, ...] = shape) -> RecordDict:
        content = reply_of(partition, ())
        content[wire.DELTA] = x0
        content[wire.SECOND_MOMENT] = wire.to_record({"qkv": np.full(shape, 1 + 2 * partition, np.float32)})
        return content

    grid, seen = grid_of(respond)
    one_round(strategy, grid, arrays=x0)
    assert wire.from_record(seen[0].content[wire.SECOND_MOMENT])["qkv"].shape == shape
    assert strategy.state[wire.SECOND_MOMENT]["qkv"].tolist() == np.full(shape, 2.0).tolist()
    assert strategy.state[wire.CORRECTION]["qkv"].shape == (4, 2)

    other, _ = grid_of(lambda p: respond(p, (3,)))
    strategy.settings = strategy.settings.model_copy(update={"max_failed_rounds": 1})
    with pytest.raises(RunFailed, match=r"second_moment qkv is float32\[3\]"):
        one_round(strategy, other, 2, wire.to_record(strategy.model))


def test_buffers_are_averaged_and_counters_taken(two_clients: MakeSettings) -> None:
    x0 = {"w": np.zeros(3, np.float32), "mean": np.ones(2, np.float32), "count": np.array(7)}

    def respond(partition: int) -> RecordDict:
        content = reply_of(partition, FedACT.returned)
        delta = {
            "w": DELTAS[partition],
            "mean": np.full(2, 4.0 * partition, np.float32),
            "count": np.array(5 + partition),
        }
        content[wire.DELTA] = wire.to_record(delta)
        return content

    strategy = FedACT(two_clients(server_lr=0.5), buffers=frozenset({"mean", "count"}))
    grid, _seen = grid_of(respond)
    arrays, _ = one_round(strategy, grid, arrays=wire.to_record(x0))
    model = wire.from_record(arrays)
    assert model["mean"].tolist() == [3, 3]  # buffers move by the whole mean
    assert strategy.model["count"].shape == ()
    assert model["count"].tolist() == 5  # what the first partition counted
    assert model["w"].tolist() == [-1.5, 0.5, 1]
    assert strategy.state[wire.CORRECTION].keys() == strategy.state[wire.SECOND_MOMENT].keys() == {"w"}


def test_diagnose_sees_the_deltas_of_trainable_parameters(two_clients: MakeSettings) -> None:
    seen: list[Any] = []

    class Diagnosis:
        def add(self, delta: Any) -> None:
            seen.append(delta)

        def metrics(self) -> dict[str, float]:
            return {"mine": 7.0}

    def respond(partition: int) -> RecordDict:
        content = reply_of(partition, ())
        content[wire.DELTA] = wire.to_record({"w": DELTAS[partition], "buffer": np.ones(2, np.float32)})
        return content

    x0 = {**X0, "buffer": np.zeros(2, np.float32)}
    strategy = FedAvg(two_clients(method="fedavg"), buffers=frozenset({"buffer"}), diagnose=Diagnosis)
    _, metrics = one_round(strategy, grid_of(respond)[0], arrays=wire.to_record(x0))
    assert metrics["mine"] == 7
    assert [{name: a.tolist() for name, a in delta.items()} for delta in seen] == [{"w": d.tolist()} for d in DELTAS]


def test_client_evaluation_is_weighted_and_counts_failures(two_clients: MakeSettings) -> None:
    app = ClientApp()

    @app.query("hosted_partitions")
    def query(message: Message, context: Any) -> Message:
        return Message(hosting([0, 1, 2]), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        partition = message.content[wire.CONFIG][wire.PARTITION]
        if partition == 2:
            raise RuntimeError("lost")
        metrics = {wire.PARTITION: partition, wire.NUM_EXAMPLES: EXAMPLES[partition], "accuracy": float(partition)}
        return Message(RecordDict({wire.METRICS: MetricRecord(metrics)}), reply_to=message)

    settings = two_clients(
        clients=3, clients_per_round=3, client_evaluation=True, holdout=0.2, weighting="examples", method="fedavg"
    )
    strategy, grid = FedAvg(settings), InProcessGrid(app, 1, {})
    messages = strategy.configure_evaluate(1, wire.to_record(X0), ConfigRecord(), grid)
    metrics = strategy.aggregate_evaluate(1, grid.send_and_receive(messages))
    assert metrics["client_accuracy"] == pytest.approx(0.75)
    assert metrics["client_num_examples"] == 4
    assert strategy.round_metrics["client_failures"] == 1


# ---- sampling and hosting


def sampled(settings: Settings, nodes: int) -> list[tuple[int, ...]]:
    """The partitions that three rounds ask."""
    strategy = FedAvg(settings)
    grid, _seen = grid_of(lambda p: reply_of(p % 2, ()), nodes, settings.clients)
    rounds = []
    for server_round in (1, 2, 3):
        messages = strategy.configure_train(server_round, wire.to_record(X0), ConfigRecord(), grid)
        rounds.append(tuple(m.content[wire.CONFIG][wire.PARTITION] for m in messages))
    return rounds


def test_sampling_depends_on_seed_and_round_and_not_on_nodes(make_settings: MakeSettings) -> None:
    settings = make_settings(method="fedavg", clients=20, clients_per_round=4)
    rounds = sampled(settings, nodes=20)
    assert all(len(set(r)) == 4 and r == tuple(sorted(r)) for r in rounds)
    assert len(set(rounds)) == 3
    assert sampled(settings, nodes=3) == rounds
    assert sampled(make_settings(method="fedavg", clients=20, clients_per_round=4, seed=1), 20) != rounds


def test_each_client_gets_a_seed_of_its_own_each_round(two_clients: MakeSettings) -> None:
    strategy = FedAvg(two_clients(method="fedavg"))
    grid, seen = grid_of(lambda p: reply_of(p, ()))
    arrays, _ = one_round(strategy, grid)
    one_round(strategy, grid, 2, arrays)
    assert len({m.content[wire.CONFIG][wire.SEED] for m in seen}) == 4


def test_partitions_without_a_node_are_left_out_and_counted(two_clients: MakeSettings) -> None:
    strategy = FedAvg(two_clients(method="fedavg", node_timeout=0.0))
    grid, seen = grid_of(lambda p: reply_of(p, ()), nodes=1, clients=1)  # the only node hosts partition 0 alone
    _, metrics = one_round(strategy, grid)
    assert len(seen) == 1
    assert (metrics["replies"], metrics["failures"]) == (1, 1)


class LateGrid(InProcessGrid):
    """Nodes appear one by one, one more each time they are counted, up to ``connected``."""

    connected = 2
    shown = 0

    def get_node_ids(self) -> list[int]:
        self.shown = min(self.shown + 1, self.connected)
        return list(super().get_node_ids())[: self.shown]


def late_grid() -> LateGrid:
    grid = grid_of(lambda p: reply_of(p, ()))[0]
    grid.__class__ = LateGrid
    assert isinstance(grid, LateGrid)
    return grid


def test_a_run_waits_for_its_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("strategies.hosts.time.sleep", slept.append)
    grid, hosts = late_grid(), Hosts(clients=2, node_timeout=60)
    assert hosts.find([0], grid).keys() == {0}
    assert len(slept) == 1  # for partition 1, though only 0 was asked for: what later rounds need counts too
    grid.connected = 1  # a node has gone: its partition is left out at once
    grid.shown = 0
    assert hosts.find([0, 1], grid).keys() == {0}
    assert len(slept) == 1
    grid.connected = 2  # and is back
    assert hosts.find([0, 1], grid).keys() == {0, 1}


def test_of_two_nodes_with_one_partition_the_newer_is_asked() -> None:
    """A node that was restarted has a new id, and the server may not have missed the old one yet."""
    app = ClientApp()

    @app.query("hosted_partitions")
    def query(message: Message, context: Any) -> Message:
        return Message(hosting([0]), reply_to=message)

    for first_connected in (0, 1):  # whichever id is the larger
        grid = InProcessGrid(app, 2, {})
        both = list(grid.get_node_ids())
        connected = [both[first_connected]]
        grid.get_node_ids = lambda connected=connected: connected  # type: ignore[method-assign]
        hosts = Hosts(clients=1, node_timeout=0)
        assert hosts.find([0], grid) == {0: both[first_connected]}
        connected.append(both[1 - first_connected])
        assert hosts.find([0], grid) == {0: both[1 - first_connected]}


def test_two_nodes_with_one_partition_are_named(caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp()

    @app.query("hosted_partitions")
    def query(message: Message, context: Any) -> Message:
        return Message(hosting([[0, 1], [1, 2]][context.node_config["partition-id"]]), reply_to=message)

    grid = InProcessGrid(app, 2, {})
    first, second = grid.get_node_ids()
    assert Hosts(clients=3, node_timeout=0).find(range(3), grid) == {0: first, 1: second, 2: second}
    assert f"nodes {first} and {second} both host partition 1, and the latter is asked" in caplog.text


def test_other_versions_are_named_and_take_part(caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp()

    @app.query("hosted_partitions")
    def query(message: Message, context: Any) -> Message:
        packages = [f"{name} {number}" for name, number in versions().items()]
        node = context.node_config["partition-id"]
        return Message(hosting([node], packages if node == 0 else [*packages[:-1], "numpy 0.1"]), reply_to=message)

    grid = InProcessGrid(app, 2, {})
    same, other = grid.get_node_ids()
    assert Hosts(clients=2, node_timeout=0).find(range(2), grid) == {0: same, 1: other}
    ours = f"numpy {versions()['numpy']}"
    assert f"node {other} has numpy 0.1, the server {ours}: it takes part" in caplog.text
    assert f"node {same} " not in caplog.text


def test_a_node_with_a_bad_answer_is_left_out() -> None:
    app = ClientApp()

    @app.query("hosted_partitions")
    def query(message: Message, context: Any) -> Message:
        node = context.node_config["partition-id"]
        if node == 0:
            raise ValueError("no partition-id")
        answer = hosting([1, 7]) if node == 1 else RecordDict({wire.CONFIG: ConfigRecord()})
        return Message(answer, reply_to=message)

    nodes = Hosts(clients=3, node_timeout=0).find(range(3), InProcessGrid(app, 3, {}))
    assert nodes.keys() == {1}  # partition 7 is none of this run's


# ---- failure


def broken(change: Callable[[RecordDict], None], partition: int = 1) -> Callable[[int], RecordDict]:
    def respond(p: int) -> RecordDict:
        content = reply_of(p, FedACT.returned)
        if p == partition:
            change(content)
        return content

    return respond


def arrays_of(name: str, array: np.ndarray) -> Callable[[RecordDict], None]:
    return lambda content: content.__setitem__(name, wire.to_record({"w": array}))


def metric(**values: float) -> Callable[[RecordDict], None]:
    return lambda content: content[wire.METRICS].update(values)


def announced(entries: int) -> ArrayRecord:
    """An array whose header promises more than there is."""
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (entries,)})
    return ArrayRecord({"w": Array("float32", (3,), SType.NUMPY, file.getvalue() + bytes(12))})


def pickled() -> ArrayRecord:
    file = BytesIO()
    np.save(file, np.array([1, "x", None], object), allow_pickle=True)
    return ArrayRecord({"w": Array("object", (3,), SType.NUMPY, file.getvalue())})


BAD = {
    "nan in delta": (arrays_of(wire.DELTA, np.array([1, np.nan, 0], np.float32)), "non-finite"),
    "infinite delta": (arrays_of(wire.DELTA, np.array([1, -np.inf, 0], np.float32)), "non-finite"),
    "nan in v": (arrays_of(wire.SECOND_MOMENT, np.array([1, np.nan, 0], np.float32)), "non-finite"),
    "infinite v": (arrays_of(wire.SECOND_MOMENT, np.array([1, np.inf, 0], np.float32)), "non-finite"),
    "negative v": (arrays_of(wire.SECOND_MOMENT, np.array([1, -1, 0], np.float32)), "negative"),
    "shape": (arrays_of(wire.DELTA, np.zeros(4, np.float32)), r"float32\[4\], not float32\[3\]"),
    "broadcastable shape": (arrays_of(wire.DELTA, np.zeros(1, np.float32)), r"float32\[1\], not float32\[3\]"),
    "another axis": (arrays_of(wire.SECOND_MOMENT, np.zeros((1, 3), np.float32)), r"float32\[1, 3\], not float32\[3\]"),
    "dtype": (arrays_of(wire.DELTA, np.zeros(3)), "float64"),
    "name": (lambda c: c.__setitem__(wire.DELTA, wire.to_record({"W": DELTAS[0]})), "names"),
    "extra array": (
        lambda c: c.__setitem__(wire.DELTA, wire.to_record({"w": DELTAS[0], "u": DELTAS[0]})), "names.*'u' first"
    ),
    "extra record": (arrays_of("surprise", DELTAS[0]), "surprise are none"),
    "10 GB announced": (lambda c: c.__setitem__(wire.DELTA, announced(10**10 // 4)), "can't be decoded"),
    "pickle": (lambda c: c.__setitem__(wire.DELTA, pickled()), "can't be decoded"),
    "missing record": (lambda c: c.__delitem__(wire.SECOND_MOMENT), "second_moment are missing"),
    "missing metrics": (lambda c: c.__delitem__(wire.METRICS), "metrics is missing"),
    "no examples": (metric(num_examples=0), "num_examples is 0"),
    "negative examples": (metric(num_examples=-3), "num_examples is -3"),
    "nan examples": (metric(num_examples=float("nan")), "num_examples is nan"),
    "too many examples": (metric(num_examples=2**62), "num_examples is 4611686018427387904"),
    "no steps": (metric(num_steps=0), "num_steps is 0"),
    "other steps": (metric(num_steps=11), "num_steps is 11, not 10"),
    "other partition": (metric(partition=0), "partition 0"),
    "nan loss": (metric(train_loss=float("nan")), "train_loss"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_replies_are_named_counted_and_never_folded(
    case: str, two_clients: MakeSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, reason = BAD[case]
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    strategy = FedACT(two_clients())
    grid, _ = grid_of(broken(change))
    arrays, metrics = one_round(strategy, grid)
    assert (metrics["replies"], metrics["failures"]) == (1, 1)
    np.testing.assert_array_equal(wire.from_record(arrays)["w"], X0["w"] + DELTAS[0])
    assert "partition 1" in caplog.text
    assert re.search(reason, caplog.text)


def test_a_duplicate_reply_is_folded_once(two_clients: MakeSettings) -> None:
    class Echo(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> list[Message]:
            return 2 * list(super().pull_messages(message_ids))

    grid, _ = grid_of(lambda p: reply_of(p, FedACT.returned))
    grid.__class__ = Echo
    strategy = FedACT(two_clients(rounds=1))
    strategy.start(grid, wire.to_record(X0), num_rounds=1)
    assert strategy.model["w"].tolist() == [-2, 3, 5]
    assert (strategy.round_metrics["replies"], strategy.round_metrics["failures"]) == (2, 0)


def test_a_client_that_raises_is_a_bad_reply(two_clients: MakeSettings) -> None:
    def explode(content: RecordDict) -> None:
        raise RuntimeError("out of memory")

    strategy = FedACT(two_clients())
    grid, _ = grid_of(broken(explode))
    _, metrics = one_round(strategy, grid)
    assert (metrics["replies"], metrics["failures"]) == (1, 1)


def test_the_gist_of_flowers_error_reply() -> None:
    simulated = (
        "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'\x1b[36mray::ClientAppActor.run()\x1b[39m\n"
        '  File "client.py", line 3, in fit\n    raise RuntimeError("out of memory")\n'
        "RuntimeError: it's out of memory\n'>"
    )
    assert last_line(simulated) == "RuntimeError: it's out of memory"
    assert last_line("ValueError: x") == "ValueError: x"
    assert last_line(None) == last_line("") == "no reason given"


def test_below_the_quorum_the_model_stays_and_the_run_ends_after_a_while(two_clients: MakeSettings) -> None:
    strategy = FedACT(two_clients(min_replies=2, max_failed_rounds=2))
    grid, _ = grid_of(broken(metric(num_steps=0)))
    arrays, metrics = one_round(strategy, grid)
    assert arrays is None
    assert metrics["failures"] == 1
    assert strategy.model["w"].tolist() == X0["w"].tolist()
    assert strategy.steps_done == 0
    with pytest.raises(RunFailed, match=r"round 2: 1 good replies, min_replies = 2.*num_steps is 0"):
        one_round(strategy, grid, 2)


def test_a_step_that_is_not_finite_is_not_taken(two_clients: MakeSettings) -> None:
    """Each reply is good, and their sum is not: the round has failed, and nothing of it stays."""
    strategy = FedACT(two_clients(max_failed_rounds=2))
    good, _ = grid_of(lambda p: reply_of(p, FedACT.returned))
    arrays, _ = one_round(strategy, good)
    state = strategy.state_dict()
    huge = arrays_of(wire.DELTA, np.full(3, 3e38, np.float32))
    bad, _ = grid_of(lambda p: broken(huge, p)(p))
    assert one_round(strategy, bad, 2, arrays)[0] is None
    assert strategy.state_dict() == state | {"failed_in_a_row": 1}
    with pytest.raises(RunFailed, match="round 3: the server's step makes model w non-finite; server_lr or lr may be"):
        one_round(strategy, bad, 3, arrays)


def test_a_good_round_forgives_failed_ones(two_clients: MakeSettings) -> None:
    strategy = FedACT(two_clients(min_replies=2, max_failed_rounds=2))
    bad, _ = grid_of(broken(metric(num_steps=0)))
    good, _ = grid_of(lambda p: reply_of(p, FedACT.returned))
    for server_round, grid in enumerate((bad, good, bad, good), start=1):
        one_round(strategy, grid, server_round)  # ids of nodes are the same in both grids


def test_memory_does_not_grow_with_the_replies(make_settings: MakeSettings) -> None:
    """Rounds hold x, Delta_G, v_bar, two sums, two more for diagnostics, and one reply; a resumed run no more."""
    vectors = wire.to_record({f"w{i}": np.ones(2**14, np.float32) for i in range(16)})

    def respond(partition: int) -> RecordDict:
        copies = {record: wire.to_record(wire.from_record(vectors)) for record in (wire.DELTA, wire.SECOND_MOMENT)}
        return RecordDict({**reply_of(partition, ()), **copies})

    def peak(clients: int, diagnose: Any = None, resumed: bool = False) -> float:
        settings = make_settings(clients=clients, clients_per_round=clients, rounds=3)
        strategy = FedACT(settings, diagnose=diagnose)
        grid, seen = grid_of(respond, 1, clients)

        def end_round(server_round: int, arrays: ArrayRecord) -> None:
            seen.clear()
            if server_round == 2:
                tracemalloc.reset_peak()

        def copy() -> ArrayRecord:
            return wire.to_record(wire.from_record(vectors))

        tracemalloc.start()
        try:
            if resumed:
                state = strategy.state_dict() | {"rounds_done": 2, "model": wire.from_record(copy())}
                state["state"] = {record: wire.from_record(copy()) for record in FedACT.broadcast}
                strategy.load_state_dict(state)
                state.clear()
                tracemalloc.reset_peak()
            strategy.start(grid, copy(), num_rounds=3, evaluate_fn=end_round)
            assert strategy.round_metrics["replies"] == clients
            return tracemalloc.get_traced_memory()[1] / 2**20
        finally:
            tracemalloc.stop()

    few, many = peak(2), peak(8)
    assert many == pytest.approx(few, abs=0.1)
    assert many < 3 + 2 + 2 + 0.5
    assert peak(8, DirectionConsistency) < 3 + 2 + 2 + 2 + 0.5
    assert peak(8, resumed=True) < 3 + 2 + 2 + 0.5


# ---- arithmetic


def test_linear_combination_sums_in_float64() -> None:
    big, one = np.array([1e8], np.float32), np.array([1], np.float32)
    vectors: list[Mapping[str, np.ndarray]] = [{"w": big}, {"w": one}, {"w": -big}]
    result = linear_combination([1, 1, 1], vectors)
    assert result["w"].tolist() == [1]  # in float32 the 1 would be lost
    assert result["w"].dtype == np.float32


def test_cosine_schedule(make_settings: MakeSettings) -> None:
    settings = make_settings(rounds=4, lr=1.0, lr_min=0.2)
    rates = [settings.learning_rate(r) for r in (1, 2, 3, 4)]
    assert rates == pytest.approx([1.0, 0.2 + 0.4 * (1 + 2**-0.5), 0.6, 0.2 + 0.4 * (1 - 2**-0.5)])
    assert make_settings(lr=1.0, lr_schedule="constant").learning_rate(33) == 1
