"""Prompts with more than text as rewards see them: a place in the text for each image, and the
images themselves as arguments of functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.content_marks import PLACE, with_places
from dschat_ppo.data.examples import MESSAGES, Row
from dschat_ppo.features import hooks


@dataclass(frozen=True)
class PromptContent:
    """What a prompt holds besides text. A feature offers it as `prompt_contents.content_of(token
    row)`, None for data without such content.

    Attributes:
        spans: (start, end) of the tokens of each item in the prompt, in order.
        arguments: what reward functions get that name these arguments.
    """

    spans: Sequence[tuple[int, int]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


TEXT_ALONE = PromptContent()


def prompt_content(record: Mapping[str, Any]) -> PromptContent:
    """What the prompt of a token row holds besides text."""
    for content_of in hooks("prompt_contents.content_of"):
        content: PromptContent | None = content_of(record)
        if content is not None:
            return content
    return TEXT_ALONE


def shown_row(row: Row, content: PromptContent) -> Row:
    """A data row whose chat messages, if it has some, show a place for each item."""
    if not content.spans or row.get(MESSAGES) is None:
        return row
    messages = []
    for message in row[MESSAGES]:
        messages.append({**message, "content": with_places(message["content"])})
    return {**row, MESSAGES: messages}


def shown_prompts(
    tokenizer: PreTrainedTokenizerBase, ids: Tensor, mask: Tensor, contents: Sequence[PromptContent]
) -> list[str]:
    """The text of each prompt with its special tokens, but without the BOS that it may begin with,
    and with a place for each item.

    Args:
        tokenizer: the actor's.
        ids: (B, P) int64, left-padded.
        mask: (B, P) bool, True on prompt tokens.
        contents: of the prompts.
    """
    pieces = list[list[int]]()  # of all rows: what is between items
    counts = []
    for row_ids, row_mask, content in zip(ids.cpu(), mask.cpu(), contents, strict=True):
        tokens = row_ids[row_mask].tolist()
        begin = 0
        # with it, tokenizers such as Llama's put a space before the text
        if tokenizer.bos_token_id is not None and tokens[:1] == [tokenizer.bos_token_id]:
            begin = 1
        for start, end in content.spans:
            pieces.append(tokens[begin:start])
            begin = end
        pieces.append(tokens[begin:])
        counts.append(len(content.spans) + 1)
    texts = tokenizer.batch_decode(pieces, skip_special_tokens=False)
    shown_prompts = []
    first = 0
    for count in counts:
        shown_prompts.append(PLACE.join(texts[first : first + count]))
        first += count
    return shown_prompts
