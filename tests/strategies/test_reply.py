"""`read_reply` reads what comes from outside: whatever arrives, it gives a sane reply or says why not."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from strategies import wire
from strategies.codecs import decode, encode
from strategies.reply import MAX_EXAMPLES, BadReply, read_reply

MODEL = {"w": np.zeros(3, np.float32)}
METRICS = {wire.PARTITION: 0, wire.NUM_EXAMPLES: 5, wire.NUM_STEPS: 2, wire.TRAIN_LOSS: 0.5}

dtypes = st.sampled_from(["float32", "float64", "int64", "bool"])
arrays = npst.arrays(dtypes, npst.array_shapes(min_dims=0, max_dims=2, max_side=3))
fitting = npst.arrays("float32", 3, elements=st.floats(width=32))
garbage = st.binary(max_size=200).map(lambda data: Array("float32", (3,), "numpy.ndarray", data))
records = st.dictionaries(
    st.sampled_from(["w", "v", ""]), st.one_of(arrays.map(Array), fitting.map(Array), garbage), max_size=2
).map(ArrayRecord)
numbers = st.one_of(st.integers(-(2**62), 2**62), st.floats())


@given(
    delta=records,
    second_moment=records,
    changes=st.dictionaries(st.sampled_from([*METRICS, "other"]), numbers, max_size=3),
    local_steps=st.sampled_from([None, 2, 3]),
    names=st.lists(st.sampled_from([wire.DELTA, wire.SECOND_MOMENT, wire.METRICS]), max_size=1),
)
def test_gives_a_sane_reply_or_says_why_not(
    delta: ArrayRecord, second_moment: ArrayRecord, changes: dict, local_steps: int | None, names: list[str]
) -> None:
    content = RecordDict(
        {wire.DELTA: delta, wire.SECOND_MOMENT: second_moment, wire.METRICS: MetricRecord(METRICS | changes)}
    )
    for name in names:  # a record of another kind in the place of the right one
        content[name] = ConfigRecord({"x": 1})
    try:
        reply = read_reply(content, 0, MODEL, {wire.SECOND_MOMENT: MODEL}, local_steps)
    except BadReply:
        return
    assert 1 <= reply.num_examples <= MAX_EXAMPLES
    assert reply.num_steps >= 1
    assert local_steps in (None, reply.num_steps)
    assert all(np.isfinite(value) for value in reply.metrics.values())
    for vector in reply.vectors.values():
        assert vector.keys() == {"w"}
        assert vector["w"].shape == (3,)
        assert vector["w"].dtype == np.float32
        assert np.isfinite(vector["w"]).all()
    assert (reply.vectors[wire.SECOND_MOMENT]["w"] >= 0).all()


@given(fitting.filter(lambda a: np.isfinite(a).all()))
def test_good_replies_arrive_as_they_were_sent(delta: np.ndarray) -> None:
    content = RecordDict({wire.DELTA: wire.to_record({"w": delta}), wire.METRICS: MetricRecord(METRICS)})
    reply = read_reply(content, 0, MODEL, {}, 2)
    assert reply.delta["w"].tobytes() == delta.tobytes()
    assert (reply.num_examples, reply.num_steps) == (5, 2)


@pytest.mark.parametrize(("form", "said"), [("bfloat16", "uint16"), ("int8", "uint8")])
def test_a_reply_in_another_format_is_refused(form: str, said: str) -> None:
    content = RecordDict({wire.DELTA: wire.to_record(MODEL), wire.METRICS: MetricRecord(METRICS)})
    with pytest.raises(BadReply, match=rf"record delta can't be decoded: w in {form}: float32\[3\], not {said}\["):
        read_reply(content, 0, MODEL, {}, 2, lambda record, vectors, like: decode(record, vectors, form, (), like))
    coded = wire.to_record(encode(wire.DELTA, MODEL, form, (), 0))
    content = RecordDict({wire.DELTA: coded, wire.METRICS: MetricRecord(METRICS)})
    with pytest.raises(BadReply, match=rf"delta w is {said}\["):
        read_reply(content, 0, MODEL, {}, 2)
