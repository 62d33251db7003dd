"""Batches of labelled answers and steps, by hand."""

import pytest
import torch
from datasets import Dataset

from dschat_ppo.data.label_collators import collate_labelled, collate_steps, mismatched_rows
from dschat_ppo.data.sampler import PADDING_ROW


def rows_of(prompts: str) -> Dataset:
    return Dataset.from_list([
        {"prompt_ids": [ord(letter)] * (1 + row % 2), "answers": [[row, 1]]} for row, letter in enumerate(prompts)
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("abcd", [3, 0, 1, 2]),
        ("a", [0]),
        ("", []),
    ],
)
def test_a_row_borrows_the_answer_of_the_row_before(prompts, expected):
    assert mismatched_rows(rows_of(prompts) if prompts else Dataset.from_dict({"prompt_ids": []})).tolist() == expected


def test_rows_of_the_same_prompt_borrow_from_other_prompts_and_every_answer_is_borrowed_once():
    letters = "aabbbca"
    rows = Dataset.from_list([{"prompt_ids": [ord(letter)]} for letter in letters])
    # in the order of prompts: 0 1 6, 2 3 4, 5; three places back
    assert mismatched_rows(rows).tolist() == [3, 4, 0, 1, 6, 2, 5]
    for row, other in enumerate(mismatched_rows(rows)):
        assert letters[row] != letters[other]


def test_the_answers_of_pairs_are_borrowed_as_often_as_each_other():
    """Not only the rejected ones, whose log-ratios fall: the baseline of KTO would stay 0."""
    rows = Dataset.from_list([{"prompt_ids": [pair], "answers": [[side]]} for pair in range(6) for side in (1, 0)])
    other = mismatched_rows(rows)
    assert sorted(other) == list(range(12))
    assert [side for [[side]] in rows.select(other)["answers"]] == [1, 0] * 6


@pytest.mark.parametrize("letters", ["aaab", "baaa", "bbaaaac", "bcaaaaa", "aabb", "abcabcab"])
def test_no_row_borrows_from_its_own_prompt_if_there_is_another(letters):
    other = mismatched_rows(Dataset.from_list([{"prompt_ids": [ord(letter)]} for letter in letters]))
    assert all(letters[row] != letters[borrowed] for row, borrowed in enumerate(other))
    if max(map(letters.count, letters)) <= len(letters) / 2:
        assert sorted(other) == list(range(len(letters)))


def test_equal_prompts_borrow_from_the_row_before():
    assert mismatched_rows(Dataset.from_list([{"prompt_ids": [7]}] * 3)).tolist() == [2, 0, 1]


def test_a_shuffled_table_counts_its_own_rows():
    rows = Dataset.from_list([{"prompt_ids": [n]} for n in range(5)]).select([4, 2, 2, 0])
    assert mismatched_rows(rows).tolist() == [2, 3, 0, 1]


LABELLED = Dataset.from_list(
    [
        {"prompt_ids": [5, 6, 7], "answers": [[8, 1]], "label": 1.0, "other_row": 2, "source": 0},
        {"prompt_ids": [9], "answers": [[10, 11, 1]], "label": 0.0, "other_row": 0, "source": 1},
        {"prompt_ids": [12, 13], "answers": [[14, 15, 16, 17, 1]], "label": 0.0, "other_row": 1, "source": 0},
    ]
)


def test_labelled_rows_by_hand():
    batch = collate_labelled(LABELLED, [1, 0, PADDING_ROW], 99, 64)
    assert batch.input_ids.tolist() == [[9, 10, 11, 1, 99], [5, 6, 7, 8, 1], [5, 6, 7, 8, 1]]
    assert batch.answer_mask.int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 0, 1, 1], [0] * 5]
    assert batch.desirable.tolist() == [False, True, True]
    assert batch.row_mask.tolist() == [True, True, False]
    assert batch.other_ids.tolist() == [[9, 8, 1, *[99] * 5], *[[5, 6, 7, 14, 15, 16, 17, 1]] * 2]
    assert batch.other_mask.int().tolist() == [[0, 1, 1, *[0] * 5], [0, 0, 0, 1, 1, 1, 1, 1], [0] * 8]
    assert batch.lengths.tolist() == [4, 5, 5]
    assert batch.data_sources.tolist() == [1, 0, 0]
    assert batch.ref_logprobs is None and batch.baseline is None


def test_a_mismatched_answer_is_cut_at_the_length_limit_but_never_empty():
    assert collate_labelled(LABELLED, [0], 99, 5).other_ids.tolist() == [[5, 6, 7, 14, 15]]
    assert collate_labelled(LABELLED, [0], 99, 2).other_ids.tolist() == [[5, 6, 7, 14]]


def test_reference_log_probs_are_in_the_order_of_the_batch():
    rows = LABELLED.add_column("ref_logprob", [1.5, 2.5, 3.5]).add_column("other_ref_logprob", [-1.0, -2.0, -3.0])
    batch = collate_labelled(rows, [2, 0], 99, 64)
    assert batch.ref_logprobs.tolist() == [3.5, 1.5] and batch.ref_logprobs.dtype == torch.float64
    assert batch.other_ref_logprobs.tolist() == [-3.0, -1.0]


def test_step_labels_by_hand():
    rows = Dataset.from_list([
        {"prompt_ids": [5, 6], "answers": [[7, 8, 9, 1]], "step_ends": [1, 3], "step_labels": [1.0, 0.25]},
        {"prompt_ids": [5], "answers": [[7, 1]], "step_ends": [1], "step_labels": [1.0]},
    ])  # fmt: skip
    batch = collate_steps(rows, [1, 0, PADDING_ROW], 99)
    assert batch.input_ids.tolist() == [[5, 7, 1, 99, 99, 99], [5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 9, 1]]
    assert batch.label_mask.int().tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 1], [0] * 6]
    assert batch.labels.tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0.25], [0] * 6]
    assert batch.lengths.tolist() == [3, 6, 6] and batch.data_sources is None
