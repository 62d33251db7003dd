"""Division of rows among ranks and into micro-batches."""

import pytest
import torch

from dschat_ppo.models.micro_batches import deal, split_by_tokens


def test_a_split_by_hand():
    lengths = torch.tensor([3, 9, 4, 1, 5, 2])
    assert [part.tolist() for part in split_by_tokens(lengths, 10)] == [[1], [4, 2], [0, 5, 3]]
    assert [part.tolist() for part in split_by_tokens(lengths, 8)] == [[1], [4], [2, 0], [5, 3]]


@pytest.mark.parametrize("seed", range(20))
def test_parts_contain_each_row_once_within_the_budget(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0 if seed % 2 else 1, 60, (1 + 3 * seed,), generator=generator)
    for budget in (1, 40, 60, 200, 10_000):
        parts = split_by_tokens(lengths, budget)
        assert sorted(torch.cat(parts).tolist()) == list(range(len(lengths)))
        assert all(len(part) == 1 or len(part) * int(lengths[part].max()) <= budget for part in parts)
        if budget == 10_000:
            assert len(parts) == 1
        if budget == 1:
            assert all(int(lengths[part].max()) <= 1 or len(part) == 1 for part in parts)


def test_dealing_by_hand():
    lengths = torch.tensor([1, 8, 3, 6, 5, 2])
    assert [share.tolist() for share in deal(lengths, 2)] == [[1, 2, 5], [3, 4, 0]]
    assert [share.tolist() for share in deal(lengths, 1)] == [[1, 3, 4, 2, 5, 0]]


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_shares_have_equal_rows_and_nearly_equal_tokens(ranks):
    lengths = torch.randint(1, 500, (ranks * 12,), generator=torch.Generator().manual_seed(ranks))
    shares = deal(lengths, ranks)
    assert sorted(torch.cat(shares).tolist()) == list(range(len(lengths)))
    assert {len(share) for share in shares} == {12}
    tokens = [int(lengths[share].sum()) for share in shares]
    assert max(tokens) - min(tokens) <= int(lengths.max())
