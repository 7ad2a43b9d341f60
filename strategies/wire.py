"""The vocabulary of the messages: what both halves of a method call the things they exchange.

A train message carries one array record per named vector (``MODEL`` and what the method broadcasts beside it)
and the ``CONFIG`` record; its reply carries ``DELTA``, what the method returns beside it, and ``METRICS``. All
arrays are named by the model's own parameter and buffer names. A method's vectors are shaped like the parameters, but
for second moments that may travel as means over blocks (`second_moment`): n numbers for n equal runs of rows.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.common.constant import SType
from numpy.typing import NDArray

# Named tensors shaped like (part of) the model. The arrays are read-only by convention.
Vectors = Mapping[str, NDArray]

# Array records.
MODEL = "model"  # x: parameters and buffers
DELTA = "delta"  # x_K - x_0, of parameters and floating buffers; of other buffers (counters) x_K itself
CORRECTION = "correction"  # Delta_G, of parameters
SECOND_MOMENT = "second_moment"  # v_bar to the clients, v_i back, of parameters or of blocks of them
CONTROL = "control"  # control variate c (of FAdamGC: y) to the clients, the change of c_i (y_i) back, of parameters

# Other records.
CONFIG = "config"
METRICS = "metrics"

# Keys of CONFIG.
PARTITION = "partition"  # also in METRICS: a node may host several partitions
SEED = "seed"
LR = "lr"  # eta of this round
STEPS_DONE = "steps_done"  # t before the round's first step
ROUND = "round"
FOLDED = "folded"  # the last round whose reply of this partition was folded; 0: none was
PINNED = "pinned"  # all rounds that FOLDED may yet be: this one, and those of the checkpoints that a run may go back to
STEP_SIZE = "step_size"  # where Delta_G is not sent: what it was multiplied with to make -(x^r - x of round FOLDED)
STATE_FOLDER = "state_folder"  # where under its own root a client keeps what this run's later rounds need

# Keys of METRICS.
NUM_EXAMPLES = "num_examples"
NUM_STEPS = "num_steps"  # K_i, steps really done
TRAIN_LOSS = "train_loss"

# The message that asks for a personalized evaluation, and what its METRICS' names begin with: the models evaluated.
PERSONAL_EVALUATION = "evaluate.personal"
GLOBAL, PERSONAL, TUNED = "global", "personal", "tuned"
KINDS = (GLOBAL, PERSONAL, TUNED)

# The query that asks a node which partitions it hosts, and the keys of its answer.
HOSTED_QUERY = "query.hosted_partitions"
HOSTED = "hosted"
VERSIONS = "versions"  # what its bits depend on: "torch 2.14.1", ...


def array_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """The array records of a message.

    Flower's own ``content.array_records``, as its siblings, makes an object that holds itself and the content, so that
    the arrays stay until the garbage collector happens to come by.
    """
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def to_record(vectors: Vectors) -> ArrayRecord:
    """Named arrays as a Flower record; NumPy scalars, which arithmetic makes of 0-d arrays, are arrays again."""
    return ArrayRecord({name: _array(np.asarray(array, order="C")) for name, array in vectors.items()})


def _array(array: NDArray) -> Array:
    """What Flower's ``Array(array)`` makes, but with one copy instead of three."""
    return Array(
        str(array.dtype), array.shape, SType.NUMPY, b"".join((_header(array.shape, array.dtype.str), array.data))
    )


@lru_cache(maxsize=4096)
def _header(shape: tuple[int, ...], dtype: str) -> bytes:
    """The start of a .npy file, version 1.0, in C order."""
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def from_record(record: ArrayRecord) -> dict[str, NDArray]:
    """The named arrays of a Flower record, as read-only views of its bytes.

    Raises ValueError where the bytes are not one array as `to_record` writes it; nothing is unpickled, and nothing is
    allocated that is not there.
    """
    return {name: _view(array) for name, array in record.items()}


def _view(array: Array) -> NDArray:
    """What Flower's ``Array.numpy`` gives, but without a copy."""
    if array.stype != SType.NUMPY:
        raise ValueError(f"serialized as {array.stype!r}, not {SType.NUMPY!r}")
    end = 10 + int.from_bytes(array.data[8:10], "little")
    shape, fortran_order, dtype = _read_header(array.data[:end])
    view = np.frombuffer(array.data, dtype, math.prod(shape), end)
    return view.reshape(shape, order="F" if fortran_order else "C")


@lru_cache(maxsize=1024)  # NumPy refuses headers of more than 10,000 bytes
def _read_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype; a model's arrays have the same in each round, and NumPy takes its time to read one."""
    file = BytesIO(header)
    if (version := np.lib.format.read_magic(file)) != (1, 0):
        raise ValueError(f"version {version} of NumPy's format, not (1, 0)")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject:
        raise ValueError("Python objects, not numbers")
    return shape, fortran_order, dtype


def all_finite(array: NDArray) -> bool:
    """Whether no entry is NaN or infinite. The sum of squares tells it fastest, unless that is too large itself."""
    if not np.issubdtype(array.dtype, np.floating):
        return True
    flat = array.ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(flat, flat)) or np.isfinite(flat).all())
