"""What ends a response, on both engines, compared with the same response without an end."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny_models import LENGTHS, cut_at, model_of, prompts_of, tokens_of, transformers_greedy

from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.sampling import TAIL, SamplingParameters, StoppingCriteria
from dschat_ppo.types import FinishReason, Rollout

EOS, STOP, LENGTH = FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH
COUNT = len(LENGTHS)
NEW = 16
WARM = SamplingParameters(temperature=1.2)
WAYS = {
    "continuous": {"rows": 3},
    "static": {"rows": 3, "static": True},
    "padded": {"rows": 3, "engine": "padded"},
    "padded, all": {"rows": 128, "engine": "padded"},
}


@pytest.fixture(params=list(WAYS))
def way(request) -> dict:
    return WAYS[request.param]


def run(way: dict, stopping: StoppingCriteria, sampling: SamplingParameters = WARM, lengths=LENGTHS) -> Rollout:
    how = GenerationConfig(sampling, stopping, **way)
    return generate(model_of("llama"), prompts_of(lengths), torch.arange(50, 50 + len(lengths)), how)


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
    assert rollout.response_mask.tolist() == [[place < len(row) for place in range(width)] for row in expected]
    assert rollout.response_ids.tolist() == [row + [0] * (width - len(row)) for row in expected]
    assert rollout.rollout_logprobs[~rollout.response_mask].eq(0).all()
    assert (rollout.rollout_logprobs[rollout.response_mask] < 0).all()


def some_token(place: int) -> int:
    """A token that some response has at `place` and not before, and that another response does not have."""
    everywhere = set.intersection(*(set(row) for row in whole()))
    return next(row[place] for row in whole() if row[place] not in (*row[:place], *everywhere))


# Tokens


@pytest.mark.parametrize("place", [0, 1, 7, 8, NEW - 1])
def test_eos_ends_a_response_and_belongs_to_it(way, place):
    """At the first position, around the tokens of one poll, and as the last token within the limit."""
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


def test_eos_at_the_limit_is_eos_and_after_it_is_cut(way):
    eos = some_token(6)
    at_limit, cut = run(way, StoppingCriteria(7, eos_ids=(eos,))), run(way, StoppingCriteria(6, eos_ids=(eos,)))
    row = next(n for n, row in enumerate(whole()) if eos in row and row.index(eos) == 6)
    assert at_limit.finish_reason[row] == EOS
    assert at_limit.response_mask[row].sum() == 7
    assert cut.finish_reason[row] == LENGTH
    assert cut.response_mask[row].sum() == 6


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


@pytest.mark.parametrize("minimum", [1, 3, NEW])
def test_every_end_may_be_sampled_after_the_minimum(way, minimum):
    """40 of 48 tokens are ends, so responses end with token `minimum` + 1 or soon after, never before."""
    ends = tuple(range(40))
    rollout = run(way, StoppingCriteria(NEW, eos_ids=ends, min_new_tokens=minimum))
    lengths = [len(row) for row in tokens_of(rollout)]
    assert min(lengths) == min(minimum + 1, NEW)
    assert all(token >= 40 for row in tokens_of(rollout) for token in row[:minimum])


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


@pytest.mark.parametrize(("start", "end"), [(0, 2), (1, 3), (6, 8), (7, 12), (1, 20), (2 * NEW - 3, 2 * NEW), (0, 1)])
def test_a_stop_string_ends_a_response_whose_text_contains_it(way, start, end):
    """Whole tokens, parts of them, many of them, at the very first token and at the last one."""
    stop = text(whole()[1])[start:end]
    responses, reasons = expected_of(stop)
    assert STOP in reasons
    assert_is(run(way, with_strings(stop)), responses, reasons)


def test_a_string_in_the_prompt_ends_nothing(way):
    """Neither does one that begins in the prompt and ends in the response."""
    prompts = prompts_of()
    sequences = [text(ids[mask].tolist()) for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)]
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


def test_strings_need_a_decoder():
    with pytest.raises(ValueError, match="decode"):
        StoppingCriteria(4, stop_strings=("end",))


@pytest.mark.parametrize("way", list(WAYS)[:1])
def test_only_the_last_tokens_of_a_long_response_are_decoded(way):
    seen = []

    def watching(rows):
        seen.extend(len(row) for row in rows)
        return decode(rows)

    stopping = StoppingCriteria(NEW, stop_strings=("xyz", "q\u00e9"), decode=watching)
    assert stopping.reach == 3 + TAIL  # bytes, not characters
    run(WAYS[way], replace(stopping, stop_strings=("\u00e9",)))
    assert max(seen) == min(NEW, 2 + TAIL)
    assert min(seen) == 1
    assert stopping.found_in_text([]) == []
    assert StoppingCriteria(4).found_in_text([[1], [2]]) == [False, False]


def test_static_steps_decode_the_text_of_all_tokens_of_a_poll_at_once():
    """Responses of 16 tokens take two polls of 8: two calls, with one text for each token."""
    calls = []

    def watching(rows):
        calls.append(len(rows))
        return decode(rows)

    run(WAYS["static"] | {"rows": 8}, StoppingCriteria(NEW, stop_strings=("no such text",), decode=watching))
    assert calls == [COUNT * 8] * 2


@pytest.mark.parametrize("number", [-1, 48, 10**6])
def test_an_end_that_is_not_a_token_is_refused(number):
    with pytest.raises(ValueError, match=str(number)):
        run(WAYS["continuous"], StoppingCriteria(3, eos_ids=(number,)))
