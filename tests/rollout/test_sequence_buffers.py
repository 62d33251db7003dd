"""Sequence buffers by hand: two prompts with two samples each, of 3 tokens and a vocabulary of 10."""

import numpy as np
import pytest
import torch

from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.sequence_buffers import UNFINISHED, SequenceBuffers
from dschat_ppo.types import FinishReason, PromptBatch

EOS, STOP, LENGTH = FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH


def buffers(penalty: float = 1.0, limits=None, **stopping) -> SequenceBuffers:
    prompts = PromptBatch(torch.tensor([[0, 0, 7], [4, 5, 6]]), torch.tensor([[False, False, True], [True] * 3]))
    criteria = StoppingCriteria(3, eos_ids=(9,), stop_ids=(8,), **stopping)
    return SequenceBuffers(
        prompts, torch.arange(4), 2, SamplingParameters(repetition_penalty=penalty), criteria, 10, 2, limits
    )


def append(sequences: SequenceBuffers, rows, counts, tokens) -> list[bool]:
    logprobs = -torch.arange(1.0, len(rows) + 1)
    return sequences.append(torch.tensor(rows), torch.tensor(counts), torch.tensor(tokens), logprobs).tolist()


def test_prompts_begin_at_column_0_and_each_sample_has_one():
    found = buffers()
    assert found.prompt_lengths.tolist() == [1, 1, 3, 3, 1]
    assert found.token_ids[:, :3].tolist()[0][0] == 7
    assert found.token_ids[2:4, :3].tolist() == [[4, 5, 6]] * 2
    assert (found.count, found.response_width, found.width) == (4, 5, 9)


def test_ends_and_limits_finish_a_sequence_with_their_reason():
    found = buffers(limits=torch.tensor([3, 1, 3, 3]))
    assert append(found, [0, 1, 2, 3], [0, 0, 0, 0], [9, 3, 8, 3]) == [True, True, True, False]
    assert found.finish_reasons.tolist() == [EOS, LENGTH, STOP, UNFINISHED, UNFINISHED]
    assert append(found, [3], [1], [2]) == [False]
    assert append(found, [3], [2], [9]) == [True]
    rollout = found.rollout()
    assert rollout.finish_reason.tolist() == [EOS, LENGTH, STOP, EOS]
    assert rollout.response_ids.tolist() == [[9, 0, 0], [3, 0, 0], [8, 0, 0], [3, 2, 9]]
    assert rollout.response_mask.sum(dim=1).tolist() == [1, 1, 1, 3]
    assert rollout.rollout_logprobs.tolist() == [[-1, 0, 0], [-2, 0, 0], [-3, 0, 0], [-4, -1, -1]]


def test_ends_are_forbidden_below_the_minimum_length():
    found = buffers(min_new_tokens=2).forbidden(torch.tensor([0, 1, 2]))
    assert found.nonzero().tolist() == [[0, 8], [0, 9], [1, 8], [1, 9]]
    assert buffers().forbidden(torch.tensor([0])) is None


def test_seen_tokens_are_those_of_prompt_and_response_until_a_reset():
    found = buffers(penalty=1.5)
    assert found.seen.nonzero().tolist() == [[0, 7], [1, 7], *([row, token] for row in (2, 3) for token in (4, 5, 6))]
    append(found, [1, 2], [0, 0], [9, 2])
    assert found.seen[1].nonzero().flatten().tolist() == [7, 9]
    found.reset([1])
    assert found.seen[1].nonzero().flatten().tolist() == [7]
    assert found.seen[2].nonzero().flatten().tolist() == [2, 4, 5, 6]
    assert found.finish_reasons[1] == UNFINISHED


@pytest.mark.parametrize(("token", "reason"), [(3, STOP), (9, EOS)])
def test_a_stop_string_finishes_a_sequence_unless_its_token_already_did(token, reason):
    found = buffers(stop_strings=("39", "33"), decode=lambda rows: ["".join(map(str, row)) for row in rows])
    append(found, [2, 3], [0, 0], [3, 3])
    append(found, [2, 3], [1, 1], [token, 5])
    result = found.find_stop_strings(np.array([2, 3]), np.array([1, 1]), 1)
    assert result.tolist() == [True, False]
    assert found.finish_reasons[2:4].tolist() == [reason, UNFINISHED]
    assert found.response_lengths[2] == 2


@pytest.mark.parametrize(
    ("tokens", "found", "reason", "length"),
    [
        ((4, 3, 5), True, STOP, 2),  # in the middle
        ((3, 3, 9), True, STOP, 1),  # the first of two, before the end
        ((4, 9, 3), False, EOS, 2),  # after the end
        ((4, 4, 3), True, STOP, 3),  # with the last token that the limit allows
        ((4, 4, 4), False, LENGTH, 3),
    ],
)
def test_several_tokens_are_cut_at_the_first_stop_string(tokens, found, reason, length):
    sequences = buffers(stop_strings=("3",), decode=lambda rows: ["".join(map(str, row)) for row in rows])
    for count, token in enumerate(tokens):
        append(sequences, [3], [count], [token])
    assert sequences.find_stop_strings(np.array([3]), np.array([0]), 3).tolist() == [found]
    assert (int(sequences.finish_reasons[3]), int(sequences.response_lengths[3])) == (reason, length)


def test_a_reset_may_keep_the_first_tokens():
    found = buffers(penalty=1.5)
    for count, token in enumerate((2, 1, 9)):
        append(found, [0, 2], [count] * 2, [token] * 2)
    found.reset([0, 2], [1, 2])
    assert found.seen[0].nonzero().flatten().tolist() == [2, 7]
    assert found.seen[2].nonzero().flatten().tolist() == [1, 2, 4, 5, 6]
    assert found.finish_reasons[[0, 2]].tolist() == [UNFINISHED] * 2
    assert found.response_lengths[[0, 2]].tolist() == [0, 0]
