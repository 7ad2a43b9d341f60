"""How the training data is split among the clients."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

# Redraws of a Dirichlet split in which some client got less than min_samples.
MAX_DRAWS = 100


class ImpossibleSplit(ValueError):
    """No split of this data meets the settings; the message names them."""


class SplitSettings(BaseModel):
    """The settings of a split; pyproject.toml explains each."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    clients: PositiveInt
    split: Literal["dirichlet", "dirichlet_priors", "iid", "by_class", "natural", "nodes"]
    dirichlet_alpha: PositiveFloat
    classes_per_client: PositiveInt
    min_samples: PositiveInt


def split_indices(settings: SplitSettings, labels: NDArray, seed: int) -> list[NDArray]:
    """The indices of each client's training examples: disjoint, sorted, and all examples together.

    * "dirichlet": each class is divided among the clients in proportions drawn from a symmetric Dirichlet of
      concentration ``dirichlet_alpha`` (Yurochkin et al. 2019, arXiv:1905.12022); sizes differ. The draw is
      repeated until every client has ``min_samples``.
    * "dirichlet_priors": each client draws its own class proportions from that distribution, and then examples by
      them (Hsu et al. 2019, arXiv:1909.06335); sizes are equal. Where a class has run out, the others take its share.
    * "iid": equal sizes, at random.
    * "by_class": client i gets the ``classes_per_client`` classes from class i on, counted round, and an equal
      share of each with its other owners.
    * "natural": whole classes; the i-th goes to client i modulo ``clients``.

    "nodes" is no split: each node has data of its own.

    Parameters
    ----------
    labels : array of int, shape (n,)
        The class of each training example.
    seed : int
        The split is a function of it, the labels and the settings.

    Raises
    ------
    ImpossibleSplit
    """
    clients, n, classes = settings.clients, len(labels), len(np.unique(labels))
    if clients * settings.min_samples > n:
        raise ImpossibleSplit(
            f"min_samples = {settings.min_samples}: clients = {clients} of that size need "
            f"{clients * settings.min_samples} training examples, and there are {n}; "
            + (f"allowed is up to {n // clients}" if clients <= n else f"allowed are up to {n} clients")
        )
    if settings.split == "by_class":
        if settings.classes_per_client > classes:
            raise ImpossibleSplit(
                f"classes_per_client = {settings.classes_per_client}: allowed is 1 to {classes}, the classes there are"
            )
        if clients + settings.classes_per_client <= classes:
            raise ImpossibleSplit(
                f"classes_per_client = {settings.classes_per_client}: {clients} clients leave some of the "
                f"{classes} classes without an owner; allowed is {classes - clients + 1} to {classes}"
            )
        full_turns, rest = divmod(clients, classes)
        owners = settings.classes_per_client * full_turns + min(settings.classes_per_client, rest)
        if owners > np.bincount(labels)[np.unique(labels)].min():
            raise ImpossibleSplit(
                f"clients = {clients}: a class would have {owners} owners and fewer examples; allowed is less"
            )

    if settings.split == "natural" and clients > classes:
        raise ImpossibleSplit(
            f'clients = {clients}: split = "natural" gives away whole classes (of text: by partition_column), and '
            f"there are {classes}; allowed is 1 to {classes}"
        )

    for draw in range(MAX_DRAWS if settings.split == "dirichlet" else 1):
        parts = _draw(settings, labels, [seed, draw])
        if min(len(part) for part in parts) >= settings.min_samples:
            return parts
    if settings.split == "dirichlet":
        raise ImpossibleSplit(
            f"dirichlet_alpha = {settings.dirichlet_alpha}: none of {MAX_DRAWS} draws gave each of {clients} clients "
            f"min_samples = {settings.min_samples} examples; allowed is a larger one, fewer samples or clients"
        )
    raise ImpossibleSplit(
        f"min_samples = {settings.min_samples}: the smallest of {clients} clients gets "
        f"{min(len(part) for part in parts)}; allowed is up to that"
    )


def label_histograms(parts: list[NDArray], labels: NDArray) -> NDArray:
    """How many examples of each class each client has, shape (clients, classes)."""
    classes = int(labels.max()) + 1
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def _draw(settings: SplitSettings, labels: NDArray, entropy: list[int]) -> list[NDArray]:
    """One split. "dirichlet", "iid" and "by_class" are those of flwr-datasets' partitioners, to the example.

    Those read labels row by row, and take seconds to import and for each draw of 50,000 examples; a strong skew needs
    tens of draws, and every client process repeats them.
    """
    if settings.split == "natural":
        owner = np.unique(labels, return_inverse=True)[1] % settings.clients
        return [np.flatnonzero(owner == client) for client in range(settings.clients)]
    generator = np.random.default_rng(entropy)
    order = generator.permutation(len(labels))  # data sets are often sorted
    if settings.split == "dirichlet_priors":
        return _by_priors(settings, labels[order], order, generator)
    if settings.split == "dirichlet":
        seed = int(generator.integers(2**31))
        return _by_proportions(settings, labels[order], order, np.random.default_rng(seed))
    if settings.split == "by_class":
        return _by_class(settings, labels[order], order)
    return [np.sort(part) for part in np.array_split(order, settings.clients)]


def _by_class(settings: SplitSettings, labels: NDArray, indices: NDArray) -> list[NDArray]:
    """Whole classes, each in equal parts for its owners."""
    parts: list[list[NDArray]] = [[] for _ in range(settings.clients)]
    classes, clients = np.unique(labels), np.arange(settings.clients)
    for i, c in enumerate(classes):
        owners = clients[(i - clients) % len(classes) < settings.classes_per_client]
        for owner, piece in zip(owners, np.array_split(indices[labels == c], len(owners)), strict=True):
            parts[owner].append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]


def _by_proportions(
    settings: SplitSettings, labels: NDArray, indices: NDArray, generator: np.random.Generator
) -> list[NDArray]:
    """Each class in Dirichlet proportions."""
    parts: list[list[NDArray]] = [[] for _ in range(settings.clients)]
    for c in np.unique(labels):
        members = indices[labels == c]
        proportions = generator.dirichlet(np.full(settings.clients, settings.dirichlet_alpha))
        cuts = (np.cumsum(proportions) * len(members)).astype(int)[:-1]
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]


def _by_priors(
    settings: SplitSettings, labels: NDArray, indices: NDArray, generator: np.random.Generator
) -> list[NDArray]:
    """Clients of equal size, give or take one, that draw from the classes by their own proportions, in turn."""
    classes = np.unique(labels)
    pools = [list(indices[labels == c]) for c in classes]
    sizes = np.full(settings.clients, len(labels) // settings.clients)
    sizes[: len(labels) % settings.clients] += 1
    parts = []
    for size in sizes:
        prior = generator.dirichlet(np.full(len(classes), settings.dirichlet_alpha))
        part: list[int] = []
        while len(part) < size:
            left = np.array([len(pool) for pool in pools])
            open_prior = np.where(left > 0, prior, 0.0)
            if open_prior.sum() <= 0:  # all classes that this client wants have run out
                open_prior = left.astype(np.float64)
            counts = generator.multinomial(size - len(part), open_prior / open_prior.sum())
            for pool, count in zip(pools, np.minimum(counts, left), strict=True):
                part += [pool.pop() for _ in range(count)]
        parts.append(np.sort(np.asarray(part, np.int64)))
    return parts
