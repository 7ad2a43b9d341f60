"""The vocabulary of the messages: what both halves of a method call the things they exchange.

A train message carries one array record per named vector (``MODEL`` and what the method broadcasts beside it)
and the ``CONFIG`` record; its reply carries ``DELTA``, what the method returns beside it, and ``METRICS``. All
arrays are named by the model's own parameter and buffer names. A method's vectors are shaped like the parameters, but
for second moments that may travel as means over blocks (`second_moment`): n numbers for n equal runs of rows.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord
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
STATE_FOLDER = "state_folder"  # where under its own root a client keeps what this run's later rounds need

# Keys of METRICS.
NUM_EXAMPLES = "num_examples"
NUM_STEPS = "num_steps"  # K_i, steps really done
TRAIN_LOSS = "train_loss"

# The query that asks a node which partitions it hosts, and the keys of its answer.
HOSTED_QUERY = "query.hosted_partitions"
HOSTED = "hosted"
VERSIONS = "versions"  # what its bits depend on: "torch 2.14.1", ...


def to_record(vectors: Vectors) -> ArrayRecord:
    """Named arrays as a Flower record; NumPy scalars, which arithmetic makes of 0-d arrays, are arrays again."""
    return ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in vectors.items()})


def from_record(record: ArrayRecord) -> dict[str, NDArray]:
    """The named arrays of a Flower record. Pickled arrays are refused by Flower's decoder."""
    return {name: array.numpy() for name, array in record.items()}
