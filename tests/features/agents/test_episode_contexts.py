"""Rows of played episodes, against the same episodes as lists."""

import torch
from episodes import Context, episodes, fixed_episodes, rollout_of
from hypothesis import given
from ragged import properties

from dschat_ppo.features.agents.played import PlayedEpisode, rows_of_played
from dschat_ppo.features.agents.record import ContextTokens
from dschat_ppo.types import (
    FinishReason,
    PromptBatch,
    Rollout,
    full_sequences,
    tensors_of,
)


def played(contexts: list[Context], reason: int = FinishReason.STOP) -> PlayedEpisode:
    """An episode of these contexts."""
    tokens = []
    for context in contexts:
        logprobs = [-0.5 if is_chosen else 0.0 for is_chosen in context.chosen]
        tokens.append(ContextTokens(context.prompt, context.response, context.chosen, logprobs, []))
    return PlayedEpisode(tokens, int(reason), None, "", [], {})


def prompts_for(count: int) -> PromptBatch:
    """Of the data set."""
    return PromptBatch(torch.full((count, 3), 47), torch.ones(count, 3).bool())


@properties
@given(made=episodes())
def test_contexts_become_the_rows_of_their_episodes(made):
    found = rows_of_played([played(episode) for episode in made], prompts_for(len(made)))
    expected = rollout_of(made)
    assert listed(found) == listed(expected)
    for name, column in tensors_of(expected).items():
        assert tensors_of(found)[name].dtype == column.dtype, name


def listed(rows: Rollout) -> list[list[list[float]]]:
    """The columns of each row, without padding."""
    rows_as_lists = []
    for row, length in enumerate(rows.response_lengths.tolist()):
        tokens = (rows.response_ids, rows.response_mask, rows.rollout_logprobs, rows.contexts)
        prompt = rows.prompt_ids[row][rows.prompt_mask[row]].tolist()
        reason = [int(rows.finish_reason[row])]
        rows_as_lists.append([prompt, reason, *(c[row, :length].tolist() for c in tokens)])
    return rows_as_lists


def test_an_episode_may_have_no_context():
    three, alone, _ = fixed_episodes()
    episodes_played = [
        played(three, FinishReason.EOS),
        played([], FinishReason.LENGTH),
        played(alone, FinishReason.STOP),
    ]
    rows = rows_of_played(episodes_played, prompts_for(3))
    assert rows.finish_reason.tolist() == [FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP]
    assert rows.prompt_ids[1][rows.prompt_mask[1]].tolist() == [47, 47, 47]
    assert not rows.response_mask[1].any() and rows.response_lengths[1] == 0
    assert full_sequences(rows)[1].tolist() == [17, 21, 7, 3, 15]


def test_no_episode_has_a_context():
    rows = rows_of_played([played([]), played([])], prompts_for(2))
    assert rows.prompt_ids.tolist() == [[47, 47, 47], [47, 47, 47]]
    assert rows.response_mask.tolist() == [[False], [False]]
    assert rows.contexts.tolist() == [[0], [0]] and rows.contexts.dtype == torch.int16
    assert full_sequences(rows)[0].tolist() == [[47, 47, 47], [47, 47, 47]]
