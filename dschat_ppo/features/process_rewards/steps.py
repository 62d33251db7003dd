"""The steps of an answer: joined to one text, and found in its tokens."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.encode import decoded
from dschat_ppo.data.examples import Example
from dschat_ppo.data.templates import added_tokens
from dschat_ppo.errors import UserError


def joined_steps(example: Example, separator: str) -> Example:
    """The example with one answer: its steps with `separator` between them, which is removed from
    their ends. `UserError` if there are no steps or labels, or a step is empty or contains the
    separator."""
    steps = list[str]()
    ends = re.escape(separator)
    for step_number, step in enumerate(example.answers, start=1):
        assert isinstance(step, str)
        # the look-behind: of a long run of separators inside the step, only its start is tried
        step = re.sub(rf"\A(?:{ends})+|(?<!{ends})(?:{ends})+\Z", "", step)
        if not step.strip():
            raise UserError(f"step {step_number} is empty")
        if separator in step:
            raise UserError(
                f"step {step_number} contains the separator {separator!r}; choose another"
                " --step_separator"
            )
        steps.append(step)
    if not any(label == label for label in example.labels):  # NaN: no label
        raise UserError("no step has a label")
    return replace(example, answers=[separator.join(steps)])


def step_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], separator: str) -> list[int]:
    """The token at which each step of an answer ends, as rising indices of `ids`: the one that
    completes the separator after it, and of the last step the last token. Blank text between two
    separators is no step. Spaces at the end of a separator do not count, since most tokenizers put
    them into the token of the next word."""
    if not ids:
        return []
    text = decoded(tokenizer, ids)
    ends = list[int]()
    offset = 0
    spaces = len(separator) - (len(separator.rstrip(" ")) or len(separator))
    *steps, rest = text.split(separator)
    for step in steps:
        offset += len(step) + len(separator)
        if not step.strip():
            continue
        # The first token with which the text holds the step. Texts are compared, not lengths: the
        # bytes of half a character decode to one or several characters.
        text_to_end = text[: offset - spaces]
        end = bisect_left(
            range(len(ids) - 1),
            True,
            key=lambda last: decoded(tokenizer, ids[: last + 1]).startswith(text_to_end),
        )
        ends.append(end)
    if ids[-1] in added_tokens(tokenizer, len(tokenizer)) or ids[-1] in tokenizer.all_special_ids:
        rest = rest.removesuffix(decoded(tokenizer, ids[-1:]))
    if ends and not rest.strip():  # the final token alone is no step
        ends.pop()
    return sorted({*ends, len(ids) - 1})


def labelled_ends(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], labels: Sequence[float], separator: str
) -> tuple[list[int], list[float]]:
    """`step_ends` and the labels of the steps that have one. `UserError` unless there are as many
    labels as steps."""
    ends = step_ends(tokenizer, ids, separator)
    if len(ends) != len(labels):
        raise UserError(
            f"the tokens have {len(ends)} steps and not {len(labels)}: the tokenizer does not keep"
            f" the separator {separator!r}; choose another --step_separator"
        )
    ends_with_label = [end for end, label in zip(ends, labels, strict=True) if label == label]
    return ends_with_label, [label for label in labels if label == label]  # not NaN
