"""Token rows to padded batches, by hand; which rows each rank sees at each step; which samples
share a packed row."""

from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from ragged import properties

from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data import batches, supervised_batches
from dschat_ppo.data.batches import (
    PADDING_ROW,
    IndexStream,
    chunked_order,
    collate_prompts,
    collate_sft,
    epoch_order,
    optimizer_steps,
)
from dschat_ppo.data.supervised_batches import (
    PackingPlan,
    collate_labelled,
    collate_pairs,
    pack,
    plan_packing,
    sample_tokens,
    samples_of,
)
from dschat_ppo.supervised.policy_objectives import mismatched_rows

SFT = Dataset.from_list(
    [
        {"prompt_ids": [1, 2, 3], "answers": [[4, 0]], "source": 0},
        {"prompt_ids": [5], "answers": [[6, 7, 8, 0]], "source": 2},
        {"prompt_ids": [9], "answers": [[0]], "source": 1},
    ]
)


@pytest.mark.parametrize(
    ("whole", "mask"),
    [
        (False, [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 1, 0, 0, 0], [0] * 5]),
        (True, [[0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 0, 0, 0], [0] * 5]),
    ],
)
@pytest.mark.parametrize("pad", [99, 0])  # 0 ends the answers too
def test_sft_rows_are_padded_and_their_loss_covers_answers_or_all_but_the_first_token(
    whole, mask, pad
):
    batch = collate_sft(SFT, [0, 1, 2, PADDING_ROW], pad, train_on_prompt=whole)
    assert batch.input_ids.tolist() == [
        [1, 2, 3, 4, 0],
        [5, 6, 7, 8, 0],
        [9, 0, pad, pad, pad],
        [1, 2, 3, 4, 0],
    ]
    assert batch.loss_mask.tolist() == torch.tensor(mask).bool().tolist()
    assert (batch.lengths.tolist(), batch.data_sources.tolist()) == ([5, 5, 2, 5], [0, 2, 1, 0])


def test_the_loss_covers_spans_of_the_prompt_too():
    rows = Dataset.from_list(
        [
            {"prompt_ids": [1, 2, 3, 4, 5], "answers": [[6, 0]], "prompt_spans": [[0, 2], [3, 4]]},
            {"prompt_ids": [7], "answers": [[8, 9, 0]], "prompt_spans": []},
        ]
    )
    batch = collate_sft(rows, [0, 1, PADDING_ROW], 99, train_on_prompt=False)
    # nothing predicts the first token
    assert batch.loss_mask.long().tolist() == [
        [0, 1, 0, 1, 0, 1, 1],
        [0, 1, 1, 1, 0, 0, 0],
        [0] * 7,
    ]
    assert batch.data_sources is None


def test_what_the_user_says_in_an_answer_is_not_trained():
    """Each answer has its own spans; the padding row has none left. KTO borrows the spans of an
    answer with it."""
    rows = Dataset.from_list(
        [
            {
                "prompt_ids": [1, 2],
                "answers": [[3, 4, 5, 6, 0], [7, 0]],
                "untrained_spans": [[[1, 3]], []],
                "margin": 0.0,
                "label": 1.0,
                "other_row": 1,
            },
            {
                "prompt_ids": [8],
                "answers": [[3, 0], [4, 5, 6, 9, 0]],
                "untrained_spans": [[], [[0, 1], [2, 4]]],
                "margin": 0.0,
                "label": 0.0,
                "other_row": 0,
            },
        ]
    )
    batch = collate_pairs(rows, [0, 1, PADDING_ROW], 0)
    assert batch.answer_mask.long().tolist() == [
        [0, 0, 1, 0, 0, 1, 1],
        [0, 1, 1, 0, 0, 0, 0],
        [0] * 7,
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 1, 0],
        [0] * 7,
    ]
    labelled = collate_labelled(rows, [0, 1], 0, 9)
    assert labelled.answer_mask.long().tolist() == [[0, 0, 1, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0, 0]]
    assert labelled.other_mask.long().tolist() == [[0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1]]
    cut = collate_labelled(rows, [1], 0, 4)  # the borrowed answer loses its end
    assert cut.other_mask.long().tolist() == [[0, 1, 0, 0]]


def test_pairs_put_all_chosen_answers_first():
    rows = Dataset.from_list(
        [
            {
                "prompt_ids": [1, 2],
                "answers": [[3, 0], [4, 5, 0]],
                "margin": 0.5,
                "source": 3,
                "ref_logprobs": [-1, -2.0],
            },
            {
                "prompt_ids": [7],
                "answers": [[8, 0], [0]],
                "margin": 2.0,
                "source": 1,
                "ref_logprobs": [-3.0, -1 / 3],
            },
        ]
    )
    batch = collate_pairs(rows, [1, 0, PADDING_ROW], 0)
    chosen, rejected = (
        [[7, 8, 0, 0], [1, 2, 3, 0], [1, 2, 3, 0]],
        [[7, 0, 0, 0, 0], [1, 2, 4, 5, 0], [1, 2, 4, 5, 0]],
    )
    assert batch.input_ids.tolist() == [[*row, 0] for row in chosen] + rejected
    assert batch.answer_mask.long().tolist() == [
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0] * 5,
        [0, 1, 0, 0, 0],
        [0, 0, 1, 1, 1],
        [0] * 5,
    ]
    assert batch.lengths.tolist() == [3, 4, 4, 2, 5, 5]
    assert (batch.margin.tolist(), batch.pair_mask.tolist()) == (
        [2.0, 0.5, 0.5],
        [True, True, False],
    )
    assert batch.data_sources.tolist() == [1, 3, 3]
    # in the order of the answers
    assert batch.ref_logprobs.tolist() == [-3.0, -1.0, -1.0, -1 / 3, -2.0, -2.0]
    assert batch.ref_logprobs.dtype == torch.float64


def test_prompts_are_left_padded():
    batch = collate_prompts(SFT, [1, 0], 99)
    assert batch.prompt_ids.tolist() == [[99, 99, 5], [1, 2, 3]]
    assert batch.prompt_mask.tolist() == [[False, False, True], [True, True, True]]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("abcd", [3, 0, 1, 2]),
        ("aaa", [2, 0, 1]),  # no other prompt is there
        ("", []),
        (
            "aabbbca",
            [3, 4, 0, 1, 6, 2, 5],
        ),  # in the order of prompts: 0 1 6, 2 3 4, 5; three places back
        ("abcdda", None),
    ],
)
def test_rows_borrow_from_other_prompts_and_every_answer_is_borrowed_once(prompts, expected):
    rows = Dataset.from_dict({"prompt_ids": [[ord(letter)] for letter in reversed(prompts)]})
    other = mismatched_rows(rows.select(reversed(range(len(rows))))).tolist()  # of a shuffled table
    assert expected is None or other == expected
    assert sorted(other) == list(range(len(prompts)))
    assert len({*prompts}) == 1 or all(
        prompts[row] != prompts[borrowed] for row, borrowed in enumerate(other)
    )


def test_labelled_rows_by_hand():
    rows = Dataset.from_list(
        [
            {
                "prompt_ids": [5, 6, 7],
                "answers": [[8, 1]],
                "label": 1.0,
                "other_row": 2,
                "ref_logprobs": [1.5, -1.0],
            },
            {
                "prompt_ids": [9],
                "answers": [[10, 11, 1]],
                "label": 0.0,
                "other_row": 0,
                "ref_logprobs": [2.5, -2.0],
            },
            {
                "prompt_ids": [2],
                "answers": [[14, 15, 16, 17, 1]],
                "label": 0.0,
                "other_row": 1,
                "ref_logprobs": [0.0, 0.0],
            },
        ]
    )
    batch = collate_labelled(rows, [1, 0, PADDING_ROW], 99, 64)
    assert batch.input_ids.tolist() == [[9, 10, 11, 1, 99], [5, 6, 7, 8, 1], [5, 6, 7, 8, 1]]
    assert batch.answer_mask.int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 0, 1, 1], [0] * 5]
    assert batch.desirable.tolist() == [False, True, True] and batch.row_mask.tolist() == [
        True,
        True,
        False,
    ]
    assert batch.other_ids.tolist() == [[9, 8, 1, *[99] * 5], *[[5, 6, 7, 14, 15, 16, 17, 1]] * 2]
    assert batch.other_mask.int().tolist() == [
        [0, 1, 1, *[0] * 5],
        [0, 0, 0, 1, 1, 1, 1, 1],
        [0] * 8,
    ]
    assert (
        batch.lengths.tolist() == [4, 5, 5]
        and batch.data_sources is None
        and batch.baseline is None
    )
    assert batch.ref_logprobs.tolist() == [[2.5, -2.0], [1.5, -1.0], [1.5, -1.0]]
    # a mismatched answer is cut at the length limit, but never empty
    assert collate_labelled(rows, [0], 99, 5).other_ids.tolist() == [[5, 6, 7, 14, 15]]
    assert collate_labelled(rows, [0], 99, 2).other_ids.tolist() == [[5, 6, 7, 14]]


# The order of an epoch and its steps


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "world_size"),
    [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4)],
)
def test_a_step_holds_the_same_rows_for_every_split_of_eight(micro_batch, accumulation, world_size):
    order = epoch_order(21, seed=1, epoch=0)
    ranks = [
        list(optimizer_steps(order, micro_batch, accumulation, world_size, rank))
        for rank in range(world_size)
    ]
    found = [
        Counter(row for rank in ranks for micro in rank[step] for row in micro) for step in range(3)
    ]
    assert [step - Counter({PADDING_ROW: 99}) for step in found] == [
        Counter(order[at : at + 8]) for at in (0, 8, 16)
    ]
    sizes = [[[len(micro) for micro in step] for step in steps] for steps in ranks]
    assert (
        all(rank == sizes[0] for rank in sizes)
        and sizes[0][:2] == [[micro_batch] * accumulation] * 2
    )


def test_the_last_step_is_padded_by_hand_computation():
    steps = [list(optimizer_steps([5, 6, 7, 8, 9], 1, 2, 2, rank)) for rank in (0, 1)]
    assert steps[0] == [[[5], [6]], [[9], [PADDING_ROW]]]
    assert steps[1] == [[[7], [8]], [[PADDING_ROW], [PADDING_ROW]]]
    assert list(optimizer_steps([], 2, 2, 2, 0)) == []
    # a micro-batch larger than the data is not padded to its size
    assert [list(optimizer_steps([3, 4, 5], 1000, 1, 2, rank)) for rank in (0, 1)] == [
        [[[3, 4]]],
        [[[5, PADDING_ROW]]],
    ]


@pytest.fixture
def chunks_of_8(monkeypatch):
    """Takes rows for those of a stream."""
    monkeypatch.setattr(batches, "rows_at_hand", lambda rows: rows[:8])


@pytest.mark.parametrize("rows", [1, 8, 29])
def test_the_order_of_a_stream_shuffles_each_chunk_and_keeps_the_chunks_in_order(rows, chunks_of_8):
    # of a table
    assert epoch_order(50, 3, 1) == torch.randperm(50, generator=shared_generator(3, 1)).tolist()
    assert len({tuple(epoch_order(50, seed, epoch)) for seed in (3, 4) for epoch in (0, 1)}) == 4
    order = list(chunked_order(range(rows), seed=3, epoch=1))
    assert len(order) == rows
    for start in range(0, rows, 8):
        drawn = torch.randperm(
            min(8, rows - start), generator=shared_generator(3, 1, start // 8)
        ).tolist()
        assert order[start : start + 8] == [start + place for place in drawn]


@pytest.mark.parametrize("cut", [0, 5, 6])
def test_an_index_stream_continues_from_its_state_inside_and_across_chunks_and_epochs(
    cut, chunks_of_8
):
    whole, before, after = (IndexStream(range(29), 3) for _ in range(3))
    expected = [whole.take(5) for _ in range(14)]
    order = [index for epoch in range(3) for index in chunked_order(range(29), 3, epoch)]
    assert sum(expected, []) == IndexStream(range(29), 3).take(70) == order[:70], (
        "also over the ends of epochs"
    )
    first = [before.take(5) for _ in range(cut)]
    after.take(2)
    after.load_state_dict(before.state_dict())
    before.take(5)  # what is saved does not change with the stream
    assert first + [after.take(5) for _ in range(14 - cut)] == expected


# Packed rows

PAIRS = Dataset.from_list(
    [
        {"prompt_ids": [1, 2, 3], "answers": [[4], [5, 6]]},  # 2 x 3 + 1 + 2
        {"prompt_ids": [1], "answers": [[4, 4, 4], [5]]},  # 2 x 1 + 3 + 1
        {"prompt_ids": [1, 2], "answers": [[4], [5]]},  # 2 x 2 + 1 + 1
    ]
)


def test_the_prompt_of_a_pair_counts_once_for_each_answer(monkeypatch):
    assert sample_tokens(PAIRS).tolist() == [9, 6, 6] and sample_tokens(SFT).tolist() == [5, 5, 2]
    monkeypatch.setattr(supervised_batches, "_CHUNK", 2)
    assert sample_tokens(PAIRS.select([2, 0, 1, 0, 2])).tolist() == [6, 9, 6, 9, 6]
    plan = plan_packing(PAIRS, 6)  # a packed row of pairs has room for two whole rows
    assert (plan.capacity, plan.rows, plan.tokens.tolist()) == (12, 2, [9, 6, 6])


@pytest.mark.parametrize(
    ("tokens", "capacity", "order", "packed"),
    [
        # 7 opens row 0 (room 3), 6 opens row 1 (room 4); 3 fills row 0 and not row 1; 3 goes into
        # row 1 (room 1); 2 opens row 2 (room 8); 1 fills row 1.
        ([3, 1, 7, 2, 6, 3], 10, [0, 5, 1, 2, 3, 4], [[2, 0], [4, 5, 1], [3]]),
        (
            [2, 2, 2, 2],
            4,
            [3, 1, 0, 2],
            [[3, 1], [0, 2]],
        ),  # the order decides among samples of equal length
        ([9, 2, 4], 4, [0, 1, 2], [[0], [2], [1]]),  # a sample over the capacity is a row by itself
    ],
)
def test_the_longest_sample_comes_first_and_each_goes_into_the_fullest_row_with_room(
    tokens, capacity, order, packed
):
    assert pack(np.array(tokens), capacity, order) == packed


@properties
@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_every_sample_is_in_one_row_no_row_is_too_full_and_any_order_gives_as_many_rows(
    lengths, random
):
    order = list(range(len(lengths)))
    found = pack(np.array(lengths), 16, order)
    assert Counter(sample for row in found for sample in row) == Counter(order)
    assert all(sum(lengths[sample] for sample in row) <= 16 for row in found)
    emptiest = sorted(sum(lengths[sample] for sample in row) for row in found)[:2]
    assert len(found) == 1 or sum(emptiest) > 16, "two rows fit into one"
    random.shuffle(order)
    assert len(pack(np.array(lengths), 16, order)) == len(found)


def test_the_packed_rows_of_an_epoch_and_their_samples():
    tokens = np.random.default_rng(0).integers(1, 20, 200)
    plan = PackingPlan(tokens, 32, len(pack(tokens, 32, range(200))))
    packed, other = plan.epoch(1, 0), plan.epoch(1, 1)
    assert (
        packed == plan.epoch(1, 0)
        and packed != plan.epoch(2, 0)
        and len(packed) == len(other) == plan.rows
    )
    assert sorted(map(sorted, packed)) != sorted(map(sorted, other)), "other samples meet"
    longest = [max(tokens[row]) for row in packed]
    assert longest != sorted(longest, reverse=True), (
        "rows are not trained from the longest to the shortest"
    )
    assert samples_of([[5, 6], [7]], [1, PADDING_ROW, 0]) == [7, 5, 6]
    assert samples_of([[5, 6], [7]], [PADDING_ROW, PADDING_ROW]) == [PADDING_ROW]
