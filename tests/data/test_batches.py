"""Token rows to padded batches, by hand."""

import pytest
import torch
from datasets import Dataset

from dschat_ppo.data.batches import (
    PADDING_ROW,
    collate_labelled,
    collate_pairs,
    collate_prompts,
    collate_sft,
    collate_steps,
    right_padded,
)
from dschat_ppo.supervised.policy_objectives import mismatched_rows

PAD = 99


def sft_rows() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt_ids": [1, 2, 3], "answers": [[4, 0]], "margin": 0.0},
            {"prompt_ids": [5], "answers": [[6, 7, 8, 0]], "margin": 0.0},
            {"prompt_ids": [9], "answers": [[0]], "margin": 0.0},
        ]
    )


def pair_rows() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt_ids": [1, 2], "answers": [[3, 0], [4, 5, 6, 0]], "margin": 0.5},
            {"prompt_ids": [7], "answers": [[8, 0], [0]], "margin": 2.0},
        ]
    )


def test_right_padded():
    ids, lengths = right_padded([[1], [2, 3, 4], [5, 6]], 9)
    assert ids.tolist() == [[1, 9, 9], [2, 3, 4], [5, 6, 9]]
    assert lengths.tolist() == [1, 3, 2]


@pytest.mark.parametrize(
    ("whole", "mask"),
    [
        (False, [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 1, 0, 0, 0], [0] * 5]),
        (True, [[0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 0, 0, 0], [0] * 5]),
    ],
)
@pytest.mark.parametrize("pad", [PAD, 0])  # 0 ends the answers too
def test_sft_rows_are_padded_and_their_loss_covers_answers_or_all_but_the_first_token(whole, mask, pad):
    batch = collate_sft(sft_rows(), [0, 1, 2, PADDING_ROW], pad, train_on_prompt=whole)
    expected = [[1, 2, 3, 4, 0], [5, 6, 7, 8, 0], [9, 0, pad, pad, pad], [1, 2, 3, 4, 0]]
    assert (batch.input_ids.tolist(), batch.loss_mask.tolist()) == (expected, torch.tensor(mask).bool().tolist())


def test_pairs_put_all_chosen_answers_first():
    batch = collate_pairs(pair_rows(), [0, 1], PAD)
    assert batch.input_ids.tolist() == [
        [1, 2, 3, 0, PAD, PAD],
        [7, 8, 0, PAD, PAD, PAD],
        [1, 2, 4, 5, 6, 0],
        [7, 0, PAD, PAD, PAD, PAD],
    ]
    assert batch.lengths.tolist() == [4, 3, 6, 2]
    assert batch.margin.tolist() == [0.5, 2.0]
    assert batch.pair_mask.tolist() == [True, True]


def test_the_answer_mask_covers_whole_answers_from_the_prompt_length_on():
    batch = collate_pairs(pair_rows(), [0, 1], PAD)
    assert batch.answer_mask.long().tolist() == [
        [0, 0, 1, 1, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [0, 1, 0, 0, 0, 0],
    ]
    rows = Dataset.from_list([{"prompt_ids": [1], "answers": [[5, 6, 0], [5, 7, 0]], "margin": 0.0}])
    assert collate_pairs(rows, [0], PAD).answer_mask.long().tolist() == [[0, 1, 1, 1], [0, 1, 1, 1]]


def test_padding_pairs_are_masked_and_have_no_answer_tokens():
    batch = collate_pairs(pair_rows(), [PADDING_ROW, 1], 0)
    assert batch.pair_mask.tolist() == [False, True]
    assert batch.answer_mask.sum(dim=1).tolist() == [0, 2, 0, 1]


def test_reference_logprobs_are_ordered_as_the_answers():
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -1 / 3]], dtype=torch.float64)
    rows = pair_rows().add_column("ref_logprobs", logprobs.tolist())
    batch = collate_pairs(rows, [1, 0, PADDING_ROW], PAD)
    assert batch.ref_logprobs.tolist() == [-3.0, -1.0, -1.0, -1 / 3, -2.0, -2.0]
    assert batch.ref_logprobs.dtype == torch.float64
    assert collate_pairs(pair_rows(), [1], PAD).ref_logprobs is None


def test_prompts_are_left_padded():
    batch = collate_prompts(sft_rows(), [1, 0], PAD)
    assert batch.prompt_ids.tolist() == [[PAD, PAD, 5], [1, 2, 3]]
    assert batch.prompt_mask.tolist() == [[False, False, True], [True, True, True]]


def test_the_loss_covers_spans_of_the_prompt_too():
    rows = Dataset.from_list([
        {"prompt_ids": [1, 2, 3, 4, 5], "answers": [[6, 0]], "prompt_spans": [[0, 2], [3, 4]]},
        {"prompt_ids": [7], "answers": [[8, 9, 0]], "prompt_spans": []},
        {"prompt_ids": [1, 2], "answers": [[3]], "prompt_spans": [[1, 2]]},
    ])  # fmt: skip
    batch = collate_sft(rows, [0, 1, 2, PADDING_ROW], PAD, train_on_prompt=False)
    assert batch.loss_mask.long().tolist() == [
        [0, 1, 0, 1, 0, 1, 1],  # nothing predicts the first token
        [0, 1, 1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    assert torch.equal(
        collate_sft(rows, [0], PAD, train_on_prompt=True).loss_mask,
        collate_sft(rows.remove_columns("prompt_spans"), [0], PAD, train_on_prompt=True).loss_mask,
    )


def test_batches_have_the_lengths_and_data_sets_of_their_rows():
    pairs = pair_rows().add_column("source", [3, 1])
    batch = collate_pairs(pairs, [1, 0, PADDING_ROW], PAD)
    assert batch.lengths.tolist() == [3, 4, 4, 2, 6, 6]
    assert batch.data_sources.tolist() == [1, 3, 3]
    rows = collate_sft(sft_rows().add_column("source", [0, 2, 1]), [1, 2], PAD, False)
    assert (rows.lengths.tolist(), rows.data_sources.tolist()) == ([5, 2], [2, 1])
    assert collate_sft(sft_rows(), [1], PAD, False).data_sources is None


# Labelled answers and steps


def labelled_of(prompts: str) -> Dataset:
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
    assert (
        mismatched_rows(labelled_of(prompts) if prompts else Dataset.from_dict({"prompt_ids": []})).tolist() == expected
    )


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


@pytest.mark.parametrize("letters", ["aabb", "abcabcab", "abcdda"])
def test_no_row_borrows_from_its_own_prompt_if_there_is_another(letters):
    other = mismatched_rows(Dataset.from_list([{"prompt_ids": [ord(letter)]} for letter in letters]))
    assert all(letters[row] != letters[borrowed] for row, borrowed in enumerate(other))
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
    rows = LABELLED.add_column("ref_logprobs", [[1.5, -1.0], [2.5, -2.0], [3.5, -3.0]])
    batch = collate_labelled(rows, [2, 0], 99, 64)
    assert batch.ref_logprobs.tolist() == [[3.5, -3.0], [1.5, -1.0]] and batch.ref_logprobs.dtype == torch.float64


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
