"""Encoded examples within the length limit: whole, cut, divided into blocks, or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import EncodedExample
from dschat_ppo.data.examples import Example
from dschat_ppo.data.templates import Span, added_tokens


class Fitted(IntEnum):
    """What the length limit did to a row; stored in one byte per row."""

    KEPT_WHOLE = 0
    PROMPT_CUT = 1
    ANSWER_CUT = 2
    DROPPED = 3
    UNUSABLE = 4  # a bad row, which has no tokens
    BLOCKS = 5  # of a plain text over the limit

    @property
    def words(self) -> str:
        """For the log."""
        return self.name.lower().replace("_", " ")


def fit(
    ids: EncodedExample,
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    policy: str,
) -> list[tuple[EncodedExample, Fitted]]:
    """Rows of at most `limit` tokens in prompt and longest answer, and what `--truncation` did to
    them. A plain text over the limit is divided into blocks; of anything else it is one row."""
    may_cut = policy not in ("drop", "error")
    if example.prompt == "":
        text = [*ids.prompt, *ids.answers[0]]
        if len(text) > limit and may_cut:
            return [(block, Fitted.BLOCKS) for block in _blocks_of_text(ids, text, limit)]
        if not ids.prompt:  # nothing before its first token predicts it
            ids = replace(ids, prompt=text[:1], answers=[text[1:]])
    longest = max((len(answer) for answer in ids.answers), default=0)
    if len(ids.prompt) + longest <= limit:
        return [(ids, Fitted.KEPT_WHOLE)]
    if not may_cut:
        return [(ids, Fitted.DROPPED)]
    if ids.fixed_spans:
        return [_cut_around(ids, tokenizer, limit, policy)]
    return [_cut(ids, example, tokenizer, limit, policy)]


def _blocks_of_text(ids: EncodedExample, text: list[int], limit: int) -> list[EncodedExample]:
    """The blocks of a plain text: the first token of each is the last one of the block before it,
    so each token is predicted once."""
    blocks = list[EncodedExample]()
    for offset in range(0, len(text) - 1, limit - 1):
        prompt = text[offset : offset + 1]
        answer = text[offset + 1 : offset + limit]
        blocks.append(replace(ids, prompt=prompt, answers=[answer]))
    return blocks


def _cut(
    ids: EncodedExample,
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    policy: str,
) -> tuple[EncodedExample, Fitted]:
    """An example over the limit, cut. The prompt is cut, but for its `fixed_ends` if the limit
    allows it. An eighth of the limit is for the prompt, and half of it where an answer alone is
    over the limit: answers that leave it less are cut at their end. Of `prompt_spans`, those stay
    of which no token was cut."""
    longest = max((len(answer) for answer in ids.answers), default=0)
    prompt_length = len(ids.prompt)
    least_room = limit // 8
    if longest > limit:
        least_room = limit // 2
    prompt_room = min(prompt_length, max(1, least_room, limit - longest))
    is_chat = not isinstance(example.prompt, str)
    fixed_start, fixed_end = fixed_ends(tokenizer, ids.prompt, is_chat)
    most_at_end = prompt_room - 1
    if policy == "left":
        most_at_end = prompt_room
    fixed_end = min(fixed_end, most_at_end)
    fixed_start = min(fixed_start, prompt_room - max(1, fixed_end))
    free = prompt_room - fixed_start - fixed_end
    free_before_cut = {"left": 0, "right": free, "middle": max(0, prompt_room // 2 - fixed_start)}
    # tokens before the cut, and the first one after it
    head = min(fixed_start + free_before_cut[policy], prompt_room - fixed_end)
    tail = prompt_length - (prompt_room - head)
    answer_room = max(1, limit - prompt_room)

    prompt = ids.prompt[:head] + ids.prompt[tail:]
    answers = [answer[:answer_room] for answer in ids.answers]
    spans = list[tuple[int, int]]()
    for start, end in ids.prompt_spans:
        if end <= head:
            spans.append((start, end))
        elif start >= tail:
            spans.append((start - tail + head, end - tail + head))
    untrained_spans = [_spans_before(answer_room, of_answer) for of_answer in ids.untrained_spans]
    outcome = Fitted.PROMPT_CUT
    if longest > answer_room:
        outcome = Fitted.ANSWER_CUT
    return EncodedExample(prompt, answers, spans, untrained_spans=untrained_spans), outcome


def _cut_around(
    ids: EncodedExample, tokenizer: PreTrainedTokenizerBase, limit: int, policy: str
) -> tuple[EncodedExample, Fitted]:
    """A chat example over the limit, cut at the tokens of its prompt that are neither special nor
    in its `fixed_spans`: the first, the last or the middle ones of these. If they are too few, the
    row is dropped. Of `prompt_spans`, those stay of which no token was cut."""
    longest = max((len(answer) for answer in ids.answers), default=0)
    excess = len(ids.prompt) + longest - limit
    special = added_tokens(tokenizer, len(tokenizer))
    fixed_start, fixed_end = fixed_ends(tokenizer, ids.prompt, is_chat=True)
    may_go = [token_id not in special for token_id in ids.prompt]
    for start, end in [*ids.fixed_spans, (0, fixed_start)]:
        may_go[start:end] = [False] * (end - start)
    free = [index for index in range(len(ids.prompt) - fixed_end) if may_go[index]]
    if len(free) < excess:
        return ids, Fitted.DROPPED
    begin = {"left": 0, "right": len(free) - excess, "middle": (len(free) - excess) // 2}[policy]
    cut = set(free[begin : begin + excess])
    places = list[int]()  # of each token, and of the end, in what is left
    prompt = list[int]()
    for index, token_id in enumerate(ids.prompt):
        places.append(len(prompt))
        if index not in cut:
            prompt.append(token_id)
    places.append(len(prompt))
    moved = list[Span]()
    for start, end in ids.prompt_spans:
        if places[end] - places[start] == end - start:
            moved.append((places[start], places[end]))
    fixed = [(places[start], places[end]) for start, end in ids.fixed_spans]
    left = replace(ids, prompt=prompt, prompt_spans=moved, fixed_spans=fixed)
    return left, Fitted.PROMPT_CUT


def _spans_before(end: int, spans: Sequence[Span]) -> list[Span]:
    """What is left of half-open ranges before `end`."""
    return [(start, min(stop, end)) for start, stop in spans if start < end]


def fixed_ends(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], is_chat: bool
) -> tuple[int, int]:
    """How many first and last tokens of a prompt a cut keeps: the first one if it is BOS. Of a chat
    prompt also the end of the template: the last special tokens, at most two tokens apart, as
    `<|im_end|>\\n<|im_start|>assistant\\n`."""
    start_length = 0
    if prompt and prompt[0] == tokenizer.bos_token_id:
        start_length = 1
    if not is_chat:
        return start_length, 0
    begin_of_end = len(prompt)
    special = added_tokens(tokenizer, len(tokenizer))
    for position in reversed(range(len(prompt))):
        if prompt[position] not in special:
            continue
        if position < begin_of_end - 3 and begin_of_end < len(prompt):
            break
        begin_of_end = position
    return start_length, len(prompt) - begin_of_end
