import torch

from clients.blocks import block_means, from_block_means


def test_means_over_runs_of_rows_and_back() -> None:
    v = torch.tensor([[1.0, 3.0], [5.0, 7.0], [2.0, 2.0], [4.0, 4.0]])
    like = torch.zeros(2)  # two blocks of two rows
    (means,) = block_means([v], [like])
    assert means.tolist() == [4, 3]
    assert from_block_means([means], [v])[0].tolist() == [[4, 4], [4, 4], [3, 3], [3, 3]]
    (mean,) = block_means([v], [torch.zeros(1)])
    assert mean.tolist() == [3.5]
    assert from_block_means([mean], [v])[0].unique().tolist() == [3.5]


def test_in_full_nothing_changes() -> None:
    v = torch.rand(4, 2)
    assert block_means([v], [torch.zeros(4, 2)])[0] is v
    assert from_block_means([v], [torch.zeros(4, 2)])[0] is v


def test_scalars_and_vectors() -> None:
    scalar, vector = torch.tensor(3.0), torch.tensor([1.0, 2.0, 6.0])
    assert [m.tolist() for m in block_means([scalar, vector], [torch.zeros(1), torch.zeros(1)])] == [[3], [3]]
    back = from_block_means([torch.tensor([3.0])] * 2, [scalar, vector])
    assert [t.tolist() for t in back] == [3, [3, 3, 3]]
