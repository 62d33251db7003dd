"""The length limit."""

import pytest
from tiny_tokenizers import tokenizer_of

from dschat_ppo.data.encode import EncodedExample, encode_prompt
from dschat_ppo.data.examples import Example
from dschat_ppo.data.templates import named_template
from dschat_ppo.data.tokenise import Fitted, fit, fixed_ends

P = Fitted.PROMPT_CUT
A = Fitted.ANSWER_CUT


class Tokens:
    """What the length limit asks of a tokenizer: BOS is 0, and a chat prompt ends with the added token 8."""

    bos_token_id, added_tokens_decoder = 0, {8: "<|end|>"}

    def __len__(self) -> int:
        return 10


def fitted(prompt, answers, limit, policy, spans=(), of="text"):
    [found] = fit(EncodedExample(prompt, answers, list(spans)), Example(of), Tokens(), limit, policy)
    return found


def fit_ids(prompt, answers, limit, policy):
    row, done = fitted(prompt, answers, limit, policy)
    return row.prompt, row.answers, done


@pytest.mark.parametrize(
    ("prompt", "answers", "limit", "left", "right", "middle", "expected_answers", "done"),
    [
        ([1, 2, 3], [[7, 8]], 5, [1, 2, 3], [1, 2, 3], [1, 2, 3], [[7, 8]], Fitted.KEPT_WHOLE),
        ([1, 2, 3], [[7, 8]], 4, [2, 3], [1, 2], [1, 3], [[7, 8]], P),
        ([1, 2, 3], [[7, 8]], 3, [3], [1], [3], [[7, 8]], P),
        ([1, 2, 3], [[7, 8]], 2, [3], [1], [3], [[7]], A),
        # An answer that leaves the prompt less than an eighth of the limit is cut to what the eighth leaves: 24 - 3.
        ([1, 2, 3], [[7, 8, 9, 0]], 4, [3], [1], [3], [[7, 8, 9]], A),
        ([1, 2, 3], [[7] * 40], 24, [1, 2, 3], [1, 2, 3], [1, 2, 3], [[7] * 21], A),
        ([1, 2, 3, 4], [[7] * 22], 24, [2, 3, 4], [1, 2, 3], [1, 3, 4], [[7] * 21], A),
        ([1, 2], [[7] * 22 + [8]], 24, [1, 2], [1, 2], [1, 2], [[7] * 22], A),
        ([1, 2, 3, 4], [[7] * 21], 24, [2, 3, 4], [1, 2, 3], [1, 3, 4], [[7] * 21], P),
        # The longer answer of a pair decides; both keep the same prompt, and the short one stays whole.
        ([1, 2, 3], [[7, 0], [7, 8, 9, 0]], 6, [2, 3], [1, 2], [1, 3], [[7, 0], [7, 8, 9, 0]], P),
        ([1, 2, 3], [[7, 0], [7, 8, 9, 0]], 4, [3], [1], [3], [[7, 0], [7, 8, 9]], A),
        ([1, 2, 3, 4], [], 4, [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [], Fitted.KEPT_WHOLE),
        ([1, 2, 3, 4], [], 3, [2, 3, 4], [1, 2, 3], [1, 3, 4], [], P),
        ([1, 2, 3, 4, 5, 6], [], 4, [3, 4, 5, 6], [1, 2, 3, 4], [1, 2, 5, 6], [], P),
        ([1], [[7, 8, 9]], 2, [1], [1], [1], [[7]], A),
    ],
)
def test_the_prompt_is_cut_unless_the_answer_leaves_it_no_room(
    prompt, answers, limit, left, right, middle, expected_answers, done
):
    for policy, kept in (("left", left), ("right", right), ("middle", middle)):
        assert fit_ids(prompt, answers, limit, policy) == (kept, expected_answers, done)


@pytest.mark.parametrize("policy", ["left", "right", "middle"])
@pytest.mark.parametrize("prompt_length", [1, 2, 9])
@pytest.mark.parametrize("lengths", [(1,), (9,), (1, 9), (30, 2)])
@pytest.mark.parametrize("limit", [2, 3, 8, 10, 50])
def test_prompt_and_answer_are_never_empty_and_keep_the_limit(prompt_length, lengths, limit, policy):
    answers = [list(range(100, 100 + n)) for n in lengths]
    whole = list(range(1, 1 + prompt_length))
    prompt, kept, _ = fit_ids(whole, answers, limit, policy)
    assert len(prompt) >= 1
    if policy == "middle":
        assert prompt == whole[: len(prompt) // 2] + whole[len(whole) - (len(prompt) + 1) // 2 :]
    else:
        assert prompt == (whole[-len(prompt) :] if policy == "left" else whole[: len(prompt)])
    for before, after in zip(answers, kept, strict=True):
        assert len(after) >= 1
        assert after == before[: len(after)]
        assert len(prompt) + len(after) <= limit


@pytest.mark.parametrize("policy", ["drop", "error"])
def test_drop_and_error_policies_do_not_truncate(policy):
    assert fit_ids([1, 2, 3], [[7, 8]], 5, policy) == ([1, 2, 3], [[7, 8]], Fitted.KEPT_WHOLE)
    assert fit_ids([1, 2, 3], [[7, 8]], 4, policy)[2] == Fitted.DROPPED


@pytest.mark.parametrize("policy", ["left", "right", "middle"])
@pytest.mark.parametrize("limit", range(2, 22))
def test_spans_that_are_whole_mark_the_same_tokens_after_the_cut(policy, limit):
    prompt, spans = list(range(1, 21)), [(0, 2), (5, 9), (9, 10), (13, 20)]
    row, _ = fitted(prompt, [[99]], limit, policy, spans)
    found = [row.prompt[start:end] for start, end in row.prompt_spans]
    assert found == [prompt[start:end] for start, end in spans if set(prompt[start:end]) <= set(row.prompt)]


@pytest.mark.parametrize(
    ("policy", "limit", "expected"),
    [
        ("left", 7, [0, 5, 6, 7, 8, 9]), ("right", 7, [0, 1, 2, 3, 8, 9]), ("middle", 7, [0, 1, 2, 7, 8, 9]),
        ("left", 4, [0, 8, 9]), ("right", 4, [0, 8, 9]), ("middle", 4, [0, 8, 9]),
        ("left", 3, [8, 9]), ("right", 3, [0, 9]), ("middle", 3, [0, 9]),
        ("left", 2, [9]), ("right", 2, [0]), ("middle", 2, [9]),
    ],
)  # fmt: skip
def test_the_first_token_and_the_opening_of_the_answer_are_kept(policy, limit, expected):
    row, done = fitted(list(range(10)), [[99]], limit, policy, of=[{"role": "user", "content": "Where?"}])
    assert (row.prompt, done) == (expected, P)


def test_fixed_ends_are_bos_and_what_the_template_writes_after_the_last_message():
    tokenizer = tokenizer_of("bytes with BOS")
    tokenizer.chat_template = named_template("chatml", tokenizer)
    for prompt in ([{"role": "user", "content": "Where is the lamp, and where the kite?"}], "Where? Answer:"):
        ids = encode_prompt(tokenizer, prompt)
        is_chat = isinstance(prompt, list)
        start, end = fixed_ends(tokenizer, ids, is_chat)
        assert start == int(ids[0] == tokenizer.bos_token_id)
        kept = tokenizer.decode(ids[len(ids) - end :]) if end else ""
        assert kept == ("<|im_end|>\n<|im_start|>assistant\n" if is_chat else "")
