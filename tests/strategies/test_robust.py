"""Means that a few clients can't move far, on numbers that can be checked by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from fedact_flwr.inprocess import InProcessGrid
from fedact_flwr.settings import Settings, SettingsError
from strategies import STRATEGIES, FedACT, FederatedStrategy, wire
from strategies.aggregation import RunningMean, TrimmedMean
from strategies.gate import WINDOW, NormGate
from strategies.reply import Reply

MakeSettings = Callable[..., Settings]
LR, K = 0.5, 10
HONEST = [np.array(d, np.float32) for d in ([3, 0, 4], [0, 3, 4], [3, 4, 0], [4, 0, 3])]  # all of norm 5
V = np.array([1, 2, 2], np.float32)  # of norm 3


def mean_of(mean: RunningMean | TrimmedMean, vectors: list[Any], weights: Any = None) -> list[float]:
    for vector, weight in zip(vectors, weights or [1] * len(vectors), strict=True):
        mean.add({"w": np.array(vector, np.float32)}, weight)
    return mean.result()["w"].tolist()


def test_running_mean_by_hand() -> None:
    assert mean_of(RunningMean(), [[1, 2], [3, 6], [5, 1]]) == [3, 3]
    assert mean_of(RunningMean(), [[1, 2], [4, 6]], [1, 3]) == [3.25, 5]
    assert mean_of(RunningMean(), [5, 6]) == 5.5


def test_trimmed_mean_by_hand() -> None:
    values = [[9, 1], [2, 2], [3, -50], [4, 4], [1, 99]]
    assert mean_of(TrimmedMean(lambda n: 1), values) == [3, pytest.approx(7 / 3)]  # (2+3+4)/3, (1+2+4)/3
    assert mean_of(TrimmedMean(lambda n: (n - 1) // 2), values) == [3, 2]  # the median
    assert mean_of(TrimmedMean(lambda n: (n - 1) // 2), values[:4]) == [2.5 + 1, 1.5]  # of four: between two
    assert mean_of(TrimmedMean(lambda n: 0), [1, 2]) == 1.5


def test_a_share_that_is_cut_cuts_at_least_one_and_leaves_one(make_settings: MakeSettings) -> None:
    for trim, n, cut in ((0.1, 9, 1), (0.1, 10, 1), (0.1, 11, 2), (0.4, 3, 1), (0.4, 2, 0), (0.0, 9, 0)):
        mean = FedACT(make_settings(aggregation="trimmed_mean", trim=trim))._make_mean()
        values = [[1000.0 * i] for i in range(n)]
        assert mean_of(mean, values) == [pytest.approx(500 * (n - 1))]
        assert isinstance(mean, TrimmedMean)
        assert mean._cut(n) == cut


def test_counters_are_those_of_the_first() -> None:
    for mean in (RunningMean(), TrimmedMean(lambda n: 0)):
        for count in (4, 9):
            mean.add({"count": np.array(count)}, 1)
        assert mean.result()["count"].tolist() == 4


@given(npst.arrays(np.float32, (5, 3), elements=st.floats(-1e6, 1e6, width=32)), st.permutations(range(5)))
def test_the_median_is_numpys_in_any_order(values: np.ndarray, order: list[int]) -> None:
    assert mean_of(TrimmedMean(lambda n: (n - 1) // 2), [values[i] for i in order]) == np.median(values, 0).tolist()


# ---- the norm gate


def replies(*lengths: float, v: float = 3) -> list[Reply]:
    """Deltas and second moments of these norms."""
    return [
        Reply(
            i,
            1,
            K,
            {wire.DELTA: {"w": HONEST[i % 4] * np.float32(n / 5)}, wire.SECOND_MOMENT: {"w": V * np.float32(v / 3)}},
            {},
        )
        for i, n in enumerate(lengths)
    ]


def test_what_is_much_longer_than_the_median_is_refused_or_shortened() -> None:
    judged = NormGate("reject", 3).judge(replies(5, 5, 50, 4))
    assert [reason is None for _, reason, _ in judged] == [True, True, False, True]
    assert judged[2][1] == "the norm of delta is 50, above 15"
    clipped, reason, refused = NormGate("clip", 3).judge(replies(5, 5, 50, 4))[2]
    assert (reason, refused) == (judged[2][1], False)
    np.testing.assert_allclose(clipped.delta["w"], [9, 12, 0], rtol=1e-6)  # [30, 40, 0] at the norm 15
    assert clipped.vectors[wire.SECOND_MOMENT]["w"].tolist() == V.tolist()


def test_second_moments_have_a_limit_of_their_own() -> None:
    judged = NormGate("reject", 3).judge([*replies(5, 5, 5), *replies(5, v=10)])
    assert [reason for _, reason, _ in judged] == [None, None, None, "the norm of second_moment is 10, above 9"]


def test_what_clients_keep_too_is_refused_and_never_clipped() -> None:
    judged = NormGate("clip", 3, whole=[wire.SECOND_MOMENT]).judge([*replies(5, 5, 50), *replies(5, v=10)])
    assert [refused for _, _, refused in judged] == [False, False, False, True]
    assert judged[3][0].vectors[wire.SECOND_MOMENT]["w"].tolist() == pytest.approx((10 / 3 * V).tolist())


def test_the_median_runs_over_rounds() -> None:
    """Alone in its round a reply meets the past; and where all norms grow the gate follows."""
    gate = NormGate("reject", 3)
    gate.judge(replies(5, 5, 5))
    assert gate.judge(replies(50))[0][1] == "the norm of delta is 50, above 15"
    for _ in range(3):
        gate.judge(replies(50, 50, 50))
    assert gate.judge(replies(50))[0][1] is None
    gate.judge(replies(*[1.0] * 200))
    assert len(gate.norms[wire.DELTA]) == WINDOW


def test_where_all_are_zero_nothing_is_too_long() -> None:
    assert [reason for _, reason, _ in NormGate("reject", 3).judge(replies(0, 0, 0, 1))] == [None] * 4


# ---- in a round


def attacked(delta: np.ndarray, v: np.ndarray = V) -> InProcessGrid:
    """Four honest clients, and a fifth that returns this."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Any) -> Message:
        p = message.content[wire.CONFIG][wire.PARTITION]
        metrics = {wire.PARTITION: p, wire.NUM_EXAMPLES: 1, wire.NUM_STEPS: K}
        content = {
            wire.DELTA: wire.to_record({"w": [*HONEST, delta][p]}),
            wire.SECOND_MOMENT: wire.to_record({"w": v if p == 4 else V}),
            wire.METRICS: MetricRecord(metrics),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.query("hosted_partitions")
    def query(message: Message, context: Any) -> Message:
        answer = ConfigRecord({wire.HOSTED: [0, 1, 2, 3, 4], wire.VERSIONS: []})
        return Message(RecordDict({wire.CONFIG: answer}), reply_to=message)

    return InProcessGrid(app, 1, {})


@pytest.fixture
def after_a_round(make_settings: MakeSettings) -> Callable[..., FederatedStrategy]:
    def run(grid: InProcessGrid, **settings: Any) -> FederatedStrategy:
        five = {"clients": 5, "clients_per_round": 5, "rounds": 1, "lr": LR, "local_steps": K}
        strategy = FedACT(make_settings(**five, **settings))
        strategy.start(grid, wire.to_record({"w": np.zeros(3, np.float32)}), num_rounds=1)
        return strategy

    return run


HUGE, FLIPPED = 1e6 * HONEST[0], -HONEST[0]


@pytest.mark.parametrize(
    ("settings", "x"),
    [
        ({"aggregation": "median"}, [3, 0, 3]),
        # of -3 0 3 3 4,  0 0 0 3 4  and  -4 0 3 4 4  without the first and the last
        ({"aggregation": "trimmed_mean", "trim": 0.2}, [2, 1, 7 / 3]),
    ],
)
def test_a_flipped_sign_moves_a_robust_mean_within_the_honest_ones(
    settings: Any, x: list[float], after_a_round: Callable[..., FederatedStrategy]
) -> None:
    strategy = after_a_round(attacked(FLIPPED), **settings)
    np.testing.assert_allclose(strategy.model["w"], x, rtol=1e-6)
    np.testing.assert_allclose(strategy.state[wire.CORRECTION]["w"], -np.array(x) / (K * LR), rtol=1e-6)
    assert strategy.state[wire.SECOND_MOMENT]["w"].tolist() == V.tolist()


def test_huge_second_moments_move_no_median(after_a_round: Callable[..., FederatedStrategy]) -> None:
    strategy = after_a_round(attacked(HONEST[0], 1e9 * V), aggregation="median")
    assert strategy.state[wire.SECOND_MOMENT]["w"].tolist() == V.tolist()


def test_a_huge_update_is_refused_by_the_gate(after_a_round: Callable[..., FederatedStrategy]) -> None:
    strategy = after_a_round(attacked(HUGE), norm_gate="reject")
    np.testing.assert_allclose(strategy.model["w"], np.mean(HONEST, axis=0), rtol=1e-6)
    assert (strategy.round_metrics["replies"], strategy.round_metrics["failures"]) == (4, 1)
    assert "partition 4, node 2: reply refused: the norm of delta is 5e+06, above 15" in strategy.failed


def test_a_huge_update_is_clipped_by_the_gate(after_a_round: Callable[..., FederatedStrategy]) -> None:
    strategy = after_a_round(attacked(HUGE), norm_gate="clip")
    np.testing.assert_allclose(strategy.model["w"], np.mean([*HONEST, 3 * HONEST[0]], axis=0), rtol=1e-6)
    assert (strategy.round_metrics["replies"], strategy.round_metrics["clipped"]) == (5, 1)


def test_robust_means_have_no_weights(make_settings: MakeSettings) -> None:
    with pytest.raises(SettingsError, match="weighting = 'examples': allowed with aggregation = 'median' is 'uniform'"):
        make_settings(aggregation="median", weighting="examples")


def test_what_the_gate_knows_is_part_of_the_state(
    after_a_round: Callable[..., FederatedStrategy], make_settings: Any
) -> None:
    strategy = after_a_round(attacked(HUGE), norm_gate="reject")
    resumed = STRATEGIES["fedact"](make_settings(norm_gate="reject"))
    resumed.load_state_dict(strategy.state_dict())
    assert resumed.norms == strategy.norms == {wire.DELTA: [5, 5, 5, 5, 5e6], wire.SECOND_MOMENT: [3] * 5}
