"""Answers with labelled steps as one text, and the tokens at which their steps end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError


def joined_steps(example: Example, separator: str) -> Example:
    """The example with one answer: its steps with `separator` between them, which is removed from their ends.
    `UserError` if there are no steps or labels, or a step is empty or contains the separator."""
    steps = []
    for number, step in enumerate(example.answers, start=1):
        assert isinstance(step, str)
        while step.startswith(separator):
            step = step.removeprefix(separator)
        while step.endswith(separator):
            step = step.removesuffix(separator)
        if not step.strip():
            raise UserError(f"step {number} is empty")
        if separator in step:
            raise UserError(f"step {number} contains the separator {separator!r}; choose another --step_separator")
        steps.append(step)
    if not any(label == label for label in example.labels):  # NaN: no label
        raise UserError("no step has a label")
    return replace(example, answers=[separator.join(steps)])


def step_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], separator: str) -> list[int]:
    """The token at which each step of an answer ends, as rising indices of `ids`; the last one is `len(ids) - 1`. []
    for an answer without tokens.

    A step ends at the token that completes the separator after it, and the last one at the last token. Blank text
    between two separators is no step. A token may hold more than the separator, such as a full stop and a line break.
    Spaces at the end of a separator do not count, since most tokenizers put them into the token of the next word.
    """
    if not ids:
        return []
    text = _decoded(tokenizer, ids)
    ends, start, found = [], 0, text.find(separator)
    length = len(separator.rstrip(" ")) or len(separator)
    while found >= 0:
        if text[start:found].strip():
            ends.append(_token_at(tokenizer, ids, text[: found + length]))
        start = found + len(separator)
        found = text.find(separator, start)
    rest = text[start:]
    if ids[-1] in tokenizer.added_tokens_decoder or ids[-1] in tokenizer.all_special_ids:
        rest = rest.removesuffix(_decoded(tokenizer, ids[-1:]))
    if ends and not rest.strip():  # the final token alone is no step
        ends.pop()
    return sorted({*ends, len(ids) - 1})


def _token_at(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: str) -> int:
    """Index of the token that completes `start`, the first characters of the decoded text. Texts are compared, not
    lengths: the bytes of half a character decode to one or several replacement characters."""
    low, high = 1, len(ids)  # the number of tokens that are needed
    while low < high:
        middle = (low + high) // 2
        if _decoded(tokenizer, ids[:middle]).startswith(start):
            high = middle
        else:
            low = middle + 1
    return low - 1


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def labelled_ends(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], labels: Sequence[float], separator: str
) -> tuple[list[int], list[float]]:
    """`step_ends` and the labels of the steps that have one. `UserError` unless there are as many labels as steps."""
    ends = step_ends(tokenizer, ids, separator)
    if len(ends) != len(labels):
        raise UserError(
            f"the tokens have {len(ends)} steps and not {len(labels)}: the tokenizer does not keep the separator "
            f"{separator!r}; choose another --step_separator"
        )
    kept = [(end, label) for end, label in zip(ends, labels, strict=True) if label == label]
    return [end for end, _ in kept], [label for _, label in kept]
