"""The text of a sample with its trained parts marked, for the log and for the preview tool."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import EncodedExample

MARKS, COLOURS = ("⟦", "⟧"), ("\x1b[32m", "\x1b[0m")  # green


def render_sample(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], spans: Sequence[tuple[int, int]], colour: bool = False
) -> str:
    """The text of `ids`, special tokens included, with the trained parts in ⟦...⟧ or in green.

    Args:
        tokenizer: of the ids.
        ids: of prompt and answer.
        spans: half-open ranges of `ids` that are trained, in order and disjoint; adjacent ones are one part.
        colour: mark by colour, for a terminal.
    """
    opened, closed = COLOURS if colour else MARKS
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    text, done = "", 0
    for start, stop in joined:
        text += (
            f"{_text_between(tokenizer, ids, done, start)}{opened}{_text_between(tokenizer, ids, start, stop)}{closed}"
        )
        done = stop
    return text + _text_between(tokenizer, ids, done, len(ids))


def sample_text(tokenizer: PreTrainedTokenizerBase, encoded: EncodedExample, colour: bool = False) -> str:
    """The text of one example with the trained parts marked; further answers follow, each on a line that starts with
    `or`. A prompt without answers (step 3) has no marks of an answer."""
    prompt, opened, closed = encoded.prompt, *(COLOURS if colour else MARKS)
    first = encoded.answers[0] if encoded.answers else []
    spans = [*encoded.prompt_spans, *([(len(prompt), len(prompt) + len(first))] if first else [])]
    lines = [render_sample(tokenizer, [*prompt, *first], spans, colour)]
    for answer in encoded.answers[1:]:
        text = _text_between(tokenizer, [*prompt, *answer], len(prompt), len(prompt) + len(answer))
        lines.append(f"or {opened}{text}{closed}")
    return "\n".join(lines)


def _text_between(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, stop: int) -> str:
    """The text of `ids[start:stop]` where they are: tokenizers decode the first token of a text differently."""

    def text_of(part: Sequence[int]) -> str:
        return str(tokenizer.decode(list(part), clean_up_tokenization_spaces=False))

    before, whole = text_of(ids[:start]), text_of(ids[:stop])
    return whole[len(before) :] if whole.startswith(before) else text_of(ids[start:stop])
