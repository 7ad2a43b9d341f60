from collections.abc import Callable

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, PathologicalPartitioner
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tasks import TASKS
from tasks.split import ImpossibleSplit, SplitSettings, label_histograms, split_indices

LABELS = np.repeat(np.arange(4), 50)  # sorted, as data sets often are


def make(**changes: object) -> SplitSettings:
    defaults = {
        "clients": 5,
        "split": "dirichlet",
        "dirichlet_alpha": 0.5,
        "classes_per_client": 2,
        "min_samples": 3,
    }
    return SplitSettings(**(defaults | changes))


def assert_partition(parts: list[NDArray], n: int) -> None:
    """Disjoint and complete, each sorted."""
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert all((np.diff(part) > 0).all() for part in parts)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["dirichlet", "dirichlet_priors", "iid", "by_class"]),
    clients=st.integers(3, 12),
    seed=st.integers(0, 2**62),
    labels=st.lists(st.integers(0, 3), min_size=60, max_size=90).filter(
        lambda x: np.bincount(x, minlength=4).min() > 8
    ),
)
def test_every_split_is_a_partition_with_a_minimum_size(kind: str, clients: int, seed: int, labels: list[int]) -> None:
    parts = split_indices(make(split=kind, clients=clients, min_samples=1), np.array(labels), seed)
    assert len(parts) == clients
    assert_partition(parts, len(labels))
    assert min(len(part) for part in parts) >= 1


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet_priors", "iid", "by_class"])
def test_a_split_is_a_function_of_its_seed(kind: str) -> None:
    one, same, other = (split_indices(make(split=kind), LABELS, seed) for seed in (7, 7, 8))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert not all(len(a) == len(b) and (a == b).all() for a, b in zip(one, other, strict=True))


def test_iid_is_equal_and_mixed() -> None:
    histograms = label_histograms(split_indices(make(split="iid"), LABELS, 0), LABELS)
    assert (histograms.sum(1) == 40).all()
    assert (histograms > 0).all()


def test_by_class_gives_each_client_its_classes() -> None:
    histograms = label_histograms(split_indices(make(split="by_class", clients=4), LABELS, 0), LABELS)
    assert histograms.tolist() == [[25, 25, 0, 0], [0, 25, 25, 0], [0, 0, 25, 25], [25, 0, 0, 25]]


def test_priors_give_equal_sizes_and_other_mixtures() -> None:
    parts = split_indices(make(split="dirichlet_priors", clients=7, dirichlet_alpha=0.3), LABELS, 0)
    assert sorted(len(part) for part in parts) == [28, 28, 28, 29, 29, 29, 29]
    histograms = label_histograms(parts, LABELS)
    assert (histograms.max(1) / histograms.sum(1)).mean() > 0.5


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet_priors"])
def test_large_alpha_is_nearly_iid(kind: str) -> None:
    labels = np.repeat(np.arange(4), 500)
    histograms = label_histograms(split_indices(make(split=kind, dirichlet_alpha=1e6), labels, 0), labels)
    assert (np.abs(histograms - 100) < 50).all()


def test_smaller_alpha_is_more_heterogeneous() -> None:
    def largest_share(alpha: float) -> float:
        shares = []
        for seed in range(10):
            split = make(dirichlet_alpha=alpha, min_samples=1)
            histograms = label_histograms(split_indices(split, LABELS, seed), LABELS)
            shares.append((histograms.max(1) / histograms.sum(1)).mean())
        return float(np.mean(shares))

    assert largest_share(0.1) > largest_share(1.0) > largest_share(100.0)
    assert largest_share(100.0) == pytest.approx(0.25, abs=0.1)


def test_dirichlet_is_flowers_own_split() -> None:
    """Example for example, at the paper's 100 clients."""
    labels = np.random.default_rng(0).integers(0, 10, 5000)
    generator = np.random.default_rng([3, 0])  # the seed and the first draw
    order = generator.permutation(5000)
    partitioner = DirichletPartitioner(
        100, "label", 0.6, min_partition_size=0, shuffle=False, seed=int(generator.integers(2**31))
    )
    partitioner.dataset = Dataset.from_dict({"index": order, "label": labels[order]})
    parts = split_indices(make(clients=100, dirichlet_alpha=0.6, min_samples=1), labels, 3)
    for i in (0, 1, 50, 99):
        assert parts[i].tolist() == sorted(partitioner.load_partition(i)["index"])


@pytest.mark.parametrize("clients", [3, 100])
def test_iid_and_by_class_are_flowers_own_splits(clients: int) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 5000)
    order = np.random.default_rng([3, 0]).permutation(5000)
    by_class = PathologicalPartitioner(clients, "label", 8, class_assignment_mode="deterministic", shuffle=False)
    for split, partitioner in (("iid", IidPartitioner(clients)), ("by_class", by_class)):
        partitioner.dataset = Dataset.from_dict({"index": order, "label": labels[order]})
        own = {"clients": clients, "split": split, "classes_per_client": 8, "min_samples": 1}
        parts = split_indices(make(**own), labels, 3)
        for i in range(0, clients, 7):
            assert parts[i].tolist() == sorted(partitioner.load_partition(i)["index"])


def test_min_samples_is_kept_by_redrawing() -> None:
    parts = split_indices(make(dirichlet_alpha=0.2, min_samples=15), LABELS, 0)
    assert min(len(part) for part in parts) >= 15


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_samples": 41}, "min_samples = 41: .*allowed is up to 40"),
        ({"clients": 300}, "clients = 300 .*allowed are up to 200 clients"),
        ({"min_samples": 40, "dirichlet_alpha": 0.05}, "dirichlet_alpha = 0.05: .*min_samples = 40"),
        ({"split": "by_class", "classes_per_client": 5}, "classes_per_client = 5: allowed is 1 to 4"),
        (
            {"split": "by_class", "classes_per_client": 1, "clients": 3},
            "classes_per_client = 1: .*allowed is 2 to 4",
        ),
        (
            {"split": "by_class", "classes_per_client": 4, "clients": 60, "min_samples": 1},
            "clients = 60: .*60 owners",
        ),
        ({"split": "by_class", "clients": 8, "min_samples": 25}, "min_samples = 25: the smallest .* gets 24"),
        ({"split": "by_class", "clients": 12, "classes_per_client": 3, "min_samples": 1, "few": 8}, "9 owners"),
    ],
)
def test_impossible_splits_say_what_is_allowed(changes: dict, message: str) -> None:
    few = changes.get("few", 50)  # examples of class 0
    settings = make(**{key: value for key, value in changes.items() if key != "few"})
    with pytest.raises(ImpossibleSplit, match=message):
        split_indices(settings, LABELS[50 - few :], 0)


def test_digits_by_dirichlet_as_in_the_main_job(make_settings: Callable) -> None:
    labels = TASKS["digits"].train_labels()
    parts = split_indices(make_settings(), labels, 5)
    assert_partition(parts, 1437)
    assert min(len(part) for part in parts) >= 10
