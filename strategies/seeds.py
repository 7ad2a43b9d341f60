"""Seeds for every random choice of a run, derived and never added."""

import hashlib


def derive_seed(seed: int, *scope: int | str) -> int:
    """A seed for one purpose, e.g. ``derive_seed(42, round, partition, "train")``.

    The SHA-256 of the parts, cut to 63 bits so that it fits a signed integer on the wire. Sums such as
    ``seed + round`` would give two runs with neighbouring seeds the same choices, one round apart.
    """
    digest = hashlib.sha256(repr((seed, *scope)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
