"""Rows of the sequences that an engine generates, against the same episodes as lists."""

from dataclasses import replace

import torch
from episodes import Context, episodes, fixed_episodes, rollout_of
from hypothesis import given
from hypothesis import strategies as st
from ragged import properties

from dschat_ppo.features.agents.contexts import rows_of_episodes
from dschat_ppo.types import (
    FinishReason,
    PromptBatch,
    Rollout,
    full_sequences,
    tensors_of,
)

UNUSED = Context([9, 8, 7, 6], [5, 5], [False, False])  # nothing of it was chosen


def generated(contexts: list[Context]) -> Rollout:
    """One sequence of each, as an engine returns them."""
    rows = rollout_of([[context] for context in contexts], has_contexts=False)
    logprobs = torch.where(rows.response_mask, -0.5, -9.0)  # an engine may leave any outside
    return replace(rows, rollout_logprobs=logprobs)


def prompts_for(made: list[list[Context]]) -> PromptBatch:
    """Of the data set."""
    return PromptBatch(torch.full((len(made), 3), 47), torch.ones(len(made), 3).bool())


@properties
@given(made=episodes(), order=st.randoms(use_true_random=False))
def test_sequences_in_any_order_become_the_rows_of_their_episodes(made, order):
    """Sequences of no episode, and those without a chosen token, leave."""
    entries = [(UNUSED, 0, 1), (made[0][0], -1, 0)]
    for row, episode in enumerate(made):
        entries += [(context, row, 3 * place) for place, context in enumerate(episode)]
    order.shuffle(entries)
    contexts, rows, places = zip(*entries, strict=True)
    found = rows_of_episodes(generated(list(contexts)), rows, places, prompts_for(made))
    expected = rollout_of(made)
    assert listed(found) == listed(expected)
    for name, column in tensors_of(expected).items():
        assert tensors_of(found)[name].dtype == column.dtype, name
    assert not found.rollout_logprobs[~found.response_mask].any()


def listed(rows: Rollout) -> list[list[list[float]]]:
    """The columns of each row, without padding."""
    rows_as_lists = []
    for row, length in enumerate(rows.response_lengths.tolist()):
        tokens = (rows.response_ids, rows.response_mask, rows.rollout_logprobs, rows.contexts)
        prompt = rows.prompt_ids[row][rows.prompt_mask[row]].tolist()
        reason = [int(rows.finish_reason[row])]
        rows_as_lists.append([prompt, reason, *(c[row, :length].tolist() for c in tokens)])
    return rows_as_lists


def test_a_row_ends_for_the_reason_of_its_last_context_and_may_have_none():
    [first, branch, anew], [alone], _ = fixed_episodes()
    sequences = generated([anew, UNUSED, first, branch, alone])
    reasons = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.EOS, FinishReason.LENGTH, 0]
    sequences = replace(sequences, finish_reason=torch.tensor(reasons, dtype=torch.int8))
    made = [[first, branch, anew], [alone], [UNUSED]]
    rows = rows_of_episodes(sequences, [0, 2, 0, 0, 1], [2, 0, 0, 1, 0], prompts_for(made))
    assert rows.finish_reason.tolist() == [FinishReason.STOP, FinishReason.EOS, FinishReason.LENGTH]
    assert rows.prompt_ids[2][rows.prompt_mask[2]].tolist() == [47, 47, 47]
    assert not rows.response_mask[2].any() and rows.response_lengths[2] == 0
    assert full_sequences(rows)[1].tolist() == [17, 21, 7, 15, 3]


def test_episodes_without_any_sequence():
    rows = rows_of_episodes(generated([UNUSED]), [0], [0], prompts_for([[], []]))
    assert rows.prompt_ids.tolist() == [[47, 47, 47], [47, 47, 47]]
    assert rows.response_mask.tolist() == [[False], [False]]
    assert rows.contexts.tolist() == [[0], [0]] and rows.contexts.dtype == torch.int16
    assert full_sequences(rows)[0].tolist() == [[47, 47, 47], [47, 47, 47]]
