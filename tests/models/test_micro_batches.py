"""Division of rows among ranks and into micro-batches."""

import pytest
import torch

from dschat_ppo.models.micro_batches import RowPrompts, deal, split_by_tokens


def test_a_split_by_hand():
    lengths = torch.tensor([3, 9, 4, 1, 5, 2])
    assert [part.tolist() for part in split_by_tokens(lengths, 10)] == [[1], [4, 2], [0, 5, 3]]
    assert [part.tolist() for part in split_by_tokens(lengths, 8)] == [[1], [4], [2, 0], [5, 3]]


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


def prompts_of(*groups: tuple[int, list[int]]) -> tuple[torch.Tensor, RowPrompts]:
    """Lengths and prompts of rows, from (tokens of the prompt, tokens of each answer) of each group."""
    rows = [(number, prompt, answer) for number, (prompt, answers) in enumerate(groups) for answer in answers]
    numbers, prompt, answer = torch.tensor(rows).unbind(dim=1)
    return prompt + answer, RowPrompts(numbers, prompt)


def tokens_run(part: torch.Tensor, lengths: torch.Tensor, prompts: RowPrompts) -> int:
    """Tokens that a model runs which holds each prompt once."""
    here = prompts.at(part)
    each = dict(zip(here.groups.tolist(), here.tokens.tolist(), strict=True))
    return sum(each.values()) + int((lengths[part] - here.tokens).sum())


def test_answers_to_one_prompt_stay_together_and_their_prompt_counts_once():
    # Prompts of 40 with answers of 10; each answer but the first adds 10 tokens and the copy of a prompt, 40 / 8 = 5.
    lengths, prompts = prompts_of((40, [10, 10, 10]), (40, [10]), (40, [10, 10, 10, 10]))
    found = [part.tolist() for part in split_by_tokens(lengths, 95, prompts)]
    assert found == [[4, 5, 6, 7], [0, 1, 2], [3]]  # 40 + 40 + 15, 40 + 30 + 10 (50 + 80 > 95), and one row alone
    assert [part.tolist() for part in split_by_tokens(lengths, 65, prompts)] == [[4, 5], [6, 7], [0, 1], [2], [3]]
    assert [part.tolist() for part in split_by_tokens(lengths, 175, prompts)] == [[4, 5, 6, 7, 0, 1, 2], [3]]


def test_rows_that_share_little_are_divided_as_if_they_shared_nothing():
    generator = torch.Generator().manual_seed(1)
    answers = torch.randint(50, 500, (12,), generator=generator).tolist()
    lengths, prompts = prompts_of((7, answers[:4]), (12, answers[4:8]), *((90, [x]) for x in answers[8:]))
    for budget in (1, 600, 3000):
        expected = [part.tolist() for part in split_by_tokens(lengths, budget)]
        assert [part.tolist() for part in split_by_tokens(lengths, budget, prompts)] == expected
    for ranks in (1, 2, 4):
        assert [part.tolist() for part in deal(lengths, ranks, prompts)] == [p.tolist() for p in deal(lengths, ranks)]


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_groups_contain_each_row_once_within_the_budget(seed):
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    groups = [(drawn(1, 120)[0], drawn(0, 60, drawn(1, 9)[0])) for _ in range(1 + seed)]
    lengths, prompts = prompts_of(*groups)
    for budget in (1, 100, 300, 10_000):
        parts, alone = split_by_tokens(lengths, budget, prompts), split_by_tokens(lengths, budget)
        for found in (parts, alone):
            assert sorted(torch.cat(found).tolist()) == list(range(len(lengths)))
        for part in parts:
            assert len(part) == 1 or min(tokens_run(part, lengths, prompts), len(part) * lengths[part].max()) <= budget
        assert all(len(part) == 1 or len(part) * int(lengths[part].max()) <= budget for part in alone)
    for ranks in (1, 2, 3):
        if len(lengths) % ranks == 0:
            shares = deal(lengths, ranks, prompts)
            assert len(shares) == ranks
            assert sorted(torch.cat(shares).tolist()) == list(range(len(lengths)))


def test_ranks_divide_groups_where_that_evens_their_tokens():
    lengths, prompts = prompts_of(*((384, [64] * 8) for _ in range(3)))
    shares = deal(lengths, 2, prompts)
    assert [part.tolist() for part in shares] == [list(range(12)), list(range(12, 24))]  # the second group is divided
    lengths, prompts = prompts_of(*((384, [64] * 8) for _ in range(16)))
    assert [len(part) for part in deal(lengths, 2, prompts)] == [64, 64]
    lengths, prompts = prompts_of((384, [64] * 4))
    assert [len(part) for part in deal(lengths, 4, prompts)] == [1, 1, 1, 1]
    lengths, prompts = prompts_of((30, [0, 0, 500, 0]))  # none above the 530 tokens of the longest row
    assert [part.tolist() for part in deal(lengths, 4, prompts)] == [[0, 1], [2], [3], []]
