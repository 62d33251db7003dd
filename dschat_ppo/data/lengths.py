"""The length limit: what is cut from a row that is too long."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import EncodedExample
from dschat_ppo.data.examples import Example


class Fitted(IntEnum):
    """What the length limit did to a row; stored in one byte per row."""

    WHOLE = 0
    PROMPT_CUT = 1
    ANSWER_CUT = 2
    DROPPED = 3
    UNUSABLE = 4  # a bad row, which has no tokens
    BLOCK = 5  # of a plain text over the limit
    TOO_LONG = 6  # refused by `--truncation error`; without tokens too


FITTED_NAMES = {
    Fitted.WHOLE: "kept whole",
    Fitted.PROMPT_CUT: "prompt cut",
    Fitted.ANSWER_CUT: "answer cut",
    Fitted.DROPPED: "dropped",
    Fitted.BLOCK: "blocks of longer texts",
}


def fit(
    ids: EncodedExample, example: Example, tokenizer: PreTrainedTokenizerBase, limit: int, policy: str
) -> list[tuple[EncodedExample, Fitted]]:
    """One row of at most `limit` tokens, and what `--truncation` did to it. A plain text over the limit is divided into
    blocks: the first token of each is the last one of the block before it, so each token is predicted once."""
    if example.prompt == "":
        text = [*ids.prompt, *ids.answers[0]]
        if len(text) > limit and policy not in ("drop", "error"):
            starts = range(0, len(text) - 1, limit - 1)
            blocks = [replace(ids, prompt=text[at : at + 1], answers=[text[at + 1 : at + limit]]) for at in starts]
            return [(block, Fitted.BLOCK) for block in blocks]
        if not ids.prompt:  # nothing before its first token predicts it
            ids = replace(ids, prompt=text[:1], answers=[text[1:]])
    fitted = fit_row(ids, limit, policy)
    if fitted[1] in (Fitted.PROMPT_CUT, Fitted.ANSWER_CUT):
        fitted = fit_row(ids, limit, policy, *fixed_ends(tokenizer, ids.prompt, not isinstance(example.prompt, str)))
    return [fitted]


def fit_row(
    row: EncodedExample, limit: int, policy: str, keep_start: int = 0, keep_end: int = 0
) -> tuple[EncodedExample, Fitted]:
    """Apply the length limit to prompt + longest answer of one row (no answers for PPO prompts).

    Args:
        policy: see `--truncation`. "left", "right" and "middle" cut the start, the end or the middle of the prompt. An
            eighth of the limit is for the prompt, and half of it where an answer alone is over the limit: answers that
            leave it less are cut at their end. No answer becomes empty. "drop" and "error" cut nothing.
        keep_start: number of first tokens of the prompt that stay if the limit allows it, such as BOS.
        keep_end: number of last tokens that stay, such as the opening of the assistant's turn.

    Returns:
        (the row, what was done). Of `prompt_spans`, those stay of which no token was cut.
    """
    longest = max((len(answer) for answer in row.answers), default=0)
    count = len(row.prompt)
    if count + longest <= limit:
        return row, Fitted.WHOLE
    if policy in ("drop", "error"):
        return row, Fitted.DROPPED
    kept = min(count, max(1, limit // (2 if longest > limit else 8), limit - longest))
    keep_end = min(keep_end, kept if policy == "left" else kept - 1)
    keep_start = min(keep_start, kept - max(1, keep_end))
    free = kept - keep_start - keep_end
    head = keep_start + {"left": 0, "right": free, "middle": max(0, kept // 2 - keep_start)}[policy]
    head = min(head, kept - keep_end)  # tokens kept before the cut
    tail = count - (kept - head)  # first token kept after it
    room_for_answer = max(1, limit - kept)
    fitted = replace(
        row,
        prompt=row.prompt[:head] + row.prompt[tail:],
        answers=[answer[:room_for_answer] for answer in row.answers],
        prompt_spans=[
            (start, end) if end <= head else (start - tail + head, end - tail + head)
            for start, end in row.prompt_spans
            if end <= head or start >= tail
        ],
    )
    return fitted, Fitted.ANSWER_CUT if longest > room_for_answer else Fitted.PROMPT_CUT


def fixed_ends(tokenizer: PreTrainedTokenizerBase, prompt: list[int], is_chat: bool) -> tuple[int, int]:
    """How many first and last tokens of a prompt a cut keeps: `keep_start` and `keep_end` of `fit_row`. The first one
    if it is BOS. Of a chat prompt also the end that the template writes: the last special tokens with at most two
    tokens between them, such as `<|im_end|>\\n<|im_start|>assistant\\n`."""
    start = int(bool(prompt) and prompt[0] == tokenizer.bos_token_id)
    if not is_chat:
        return start, 0
    end, special = len(prompt), _added_tokens(tokenizer, len(tokenizer))
    for place in (place for place in reversed(range(len(prompt))) if prompt[place] in special):
        if place < end - 3 and end < len(prompt):
            break
        end = place
    return start, len(prompt) - end


@lru_cache(maxsize=16)
def _added_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    """Cached: a tokenizer with thousands of added tokens takes 20 ms to list them. `size`: of its vocabulary."""
    return frozenset(tokenizer.added_tokens_decoder)
