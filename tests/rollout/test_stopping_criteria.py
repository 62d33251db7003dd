"""What ends a response, on both engines, compared with the same response without an end."""

from functools import cache

import numpy as np
import pytest
import torch
from generation import run as rollout_of
from tiny_models import LENGTHS, cut_at, model_of, prompts_of, tokens_of, transformers_greedy

from dschat_ppo.rollout.generation_request import GenerationConfig, RolloutRequest
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.types import FinishReason, PromptBatch, Rollout

EOS, STOP, LENGTH = FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH
COUNT = len(LENGTHS)
NEW = 16
WARM = SamplingParameters(temperature=1.2)
WAYS = {
    "continuous": {"rows": 3},
    "static": {"rows": 3, "static": True},
    "padded": {"rows": 3, "engine": "padded"},
}


@pytest.fixture(params=list(WAYS))
def way(request) -> dict:
    return WAYS[request.param]


def run(way: dict, stopping: StoppingCriteria, sampling: SamplingParameters = WARM) -> Rollout:
    return rollout_of(
        sampling=sampling, stopping=stopping, seeds=torch.arange(50, 50 + COUNT), **way
    )


@cache
def whole() -> tuple[tuple[int, ...], ...]:
    """The responses without any end."""
    return tuple(tuple(row) for row in tokens_of(run({}, StoppingCriteria(NEW))))


def assert_is(rollout: Rollout, expected: list, reasons: list) -> None:
    """Compare tokens, masks, padding and reasons."""
    expected = [list(row) for row in expected]
    width = max(len(row) for row in expected)
    assert tokens_of(rollout) == expected
    assert rollout.finish_reason.tolist() == [int(reason) for reason in reasons]
    assert rollout.finish_reason.dtype == torch.int8
    assert rollout.ended.tolist() == [reason != LENGTH for reason in reasons]
    assert rollout.response_mask.tolist() == [
        [place < len(row) for place in range(width)] for row in expected
    ]
    assert rollout.response_ids.tolist() == [row + [0] * (width - len(row)) for row in expected]
    assert rollout.rollout_logprobs[~rollout.response_mask].eq(0).all()
    assert (rollout.rollout_logprobs[rollout.response_mask] < 0).all()


def some_token(place: int) -> int:
    """A token that some response has at `place` and not before, and that another response does not
    have."""
    everywhere = set.intersection(*(set(row) for row in whole()))
    return next(row[place] for row in whole() if row[place] not in (*row[:place], *everywhere))


# Tokens


@pytest.mark.parametrize("place", [0, 7, 8, NEW - 1])
def test_eos_ends_a_response_and_belongs_to_it(way, place):
    """At the first position, around the tokens of one poll, and as the last token within the
    limit."""
    eos = some_token(place)
    reasons = [EOS if eos in row else LENGTH for row in whole()]
    assert {*reasons} == {EOS, LENGTH}
    expected = cut_at([list(row) for row in whole()], (eos,))
    assert place + 1 in {len(row) for row in expected}
    assert_is(run(way, StoppingCriteria(NEW, eos_ids=(eos,))), expected, reasons)


def test_stop_tokens_and_several_eos_have_their_reasons(way):
    eos, stop = (some_token(2), some_token(5)), (some_token(3), some_token(9))
    ends = {**dict.fromkeys(stop, STOP), **dict.fromkeys(eos, EOS)}
    expected = cut_at([list(row) for row in whole()], ends)
    reasons = [ends.get(row[-1], LENGTH) for row in expected]
    assert {EOS, STOP} <= {*reasons}
    assert_is(run(way, StoppingCriteria(NEW, eos_ids=eos, stop_ids=stop)), expected, reasons)


def test_no_end_is_sampled_before_the_minimum_as_in_transformers(way):
    """Greedy: a forbidden token is replaced by the next likeliest."""
    model, prompts = model_of("llama"), prompts_of()
    plain = transformers_greedy(model, prompts, NEW)
    eos, stop = plain[0][1], plain[1][2]
    expected = transformers_greedy(model, prompts, NEW, min_new_tokens=6, eos_token_id=[eos, stop])
    expected = [row[:5] + cut_at([row[5:]], (eos, stop))[0] for row in expected]
    assert all(token not in (eos, stop) for row in expected for token in row[:6])
    stopping = StoppingCriteria(NEW, eos_ids=(eos,), stop_ids=(stop,), min_new_tokens=6)
    rollout = run(way, stopping, SamplingParameters(top_k=1))
    assert tokens_of(rollout) == expected
    reasons = [{eos: EOS, stop: STOP}.get(row[-1], LENGTH) for row in expected]
    assert rollout.finish_reason.tolist() == reasons


# Strings: each token decodes to two letters, so strings may begin and end inside tokens


def text(ids) -> str:
    return "".join(chr(97 + token // 7) + chr(65 + token % 7) for token in ids)


def decode(rows: list[list[int]]) -> list[str]:
    return [text(row) for row in rows]


def with_strings(*strings: str, **others) -> StoppingCriteria:
    return StoppingCriteria(NEW, stop_strings=strings, decode=decode, **others)


def expected_of(*strings: str) -> tuple[list, list]:
    """The shortest prefix of each whole response whose text contains one of the strings."""
    responses, reasons = [], []
    for row in whole():
        ends = [n for n in range(1, NEW + 1) if any(stop in text(row[:n]) for stop in strings)]
        responses.append(row[: ends[0]] if ends else row)
        reasons.append(STOP if ends else LENGTH)
    return responses, reasons


@pytest.mark.parametrize(
    ("start", "end"), [(0, 2), (7, 12), (1, 20), (2 * NEW - 3, 2 * NEW), (0, 1)]
)
def test_a_stop_string_ends_a_response_whose_text_contains_it(way, start, end):
    """Whole tokens, parts of them, many of them, at the very first token and at the last one."""
    stop = text(whole()[1])[start:end]
    responses, reasons = expected_of(stop)
    assert STOP in reasons
    assert_is(run(way, with_strings(stop)), responses, reasons)


def test_a_string_in_the_prompt_ends_nothing(way):
    """Neither does one that begins in the prompt and ends in the response."""
    prompts = prompts_of()
    sequences = [
        text(ids[mask].tolist())
        for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
    ]
    bridge = sequences[2][-5:] + text(whole()[2])[:1]
    inside = sequences[2][4:12]
    responses, reasons = expected_of(bridge, inside)
    assert reasons[2] == LENGTH
    assert_is(run(way, with_strings(bridge, inside)), responses, reasons)


def test_eos_and_stop_token_have_precedence_over_a_string_that_they_complete(way):
    number, row = next((n, row) for n, row in enumerate(whole()) if row[4] not in row[:4])
    token, stop = row[4], text(row)[6:10]  # completed by the fifth token
    responses, reasons = expected_of(stop)
    assert (len(responses[number]), reasons[number]) == (5, STOP)
    for reason, ends in ((EOS, {"eos_ids": (token,)}), (STOP, {"stop_ids": (token,)})):
        rollout = run(way, with_strings(stop, **ends))
        assert tokens_of(rollout)[number] == list(row[:5])
        assert rollout.finish_reason[number] == reason


@pytest.mark.parametrize(
    ("tokens", "found", "reason", "length"),
    [
        ((4, 3, 5), True, STOP, 2),  # in the middle
        ((3, 3, 9), True, STOP, 1),  # the first of two, before the end
        ((4, 9, 3), False, EOS, 2),  # after the end
        ((4, 5, 9), True, EOS, 3),  # completed by the token that ends it
        ((4, 4, 3), True, STOP, 3),  # with the last token that the limit allows
        ((4, 4, 4), False, LENGTH, 3),
    ],
)
def test_several_tokens_are_cut_at_the_first_stop_string(tokens, found, reason, length):
    """Tokens of a vocabulary of 10, of which 9 is the end; the text is their digits."""
    prompts = PromptBatch(
        torch.tensor([[0, 7], [4, 5]]), torch.tensor([[False, True], [True, True]])
    )
    stopping = StoppingCriteria(
        3,
        (9,),
        stop_strings=("3", "59"),
        decode=lambda rows: ["".join(map(str, row)) for row in rows],
    )
    config = GenerationConfig(SamplingParameters(), stopping, samples=2)
    buffers = SequenceBuffers(RolloutRequest(prompts, torch.arange(4)), config, 10, 2)
    for count, token in enumerate(tokens):
        buffers.append(
            torch.tensor([3]), torch.tensor([count]), torch.tensor([token]), torch.zeros(1)
        )
    assert buffers.find_stop_strings(np.array([3]), np.array([0]), 3).tolist() == [found]
    assert (int(buffers.finish_reasons[3]), int(buffers.response_lengths[3])) == (reason, length)
