"""Prompts with more than text as rewards and people see them: a place in the text for each image,
or its size; and the images themselves as arguments of functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.content_marks import PLACE, has_marks, in_parts, with_places
from dschat_ppo.data.examples import MESSAGES, Messages, Row
from dschat_ppo.features import hooks


@dataclass(frozen=True)
class PromptContent:
    """What a prompt holds besides text. A feature offers it as `prompt_contents.content_of(token
    row)`, None for data without such content.

    Attributes:
        spans: (start, end) of the tokens of each item in the prompt, in order.
        arguments: what reward functions get that name these arguments.
        parts: of each item, the part of a chat message by which a data row holds it.
        described: makes a few words on each item, for people; None: there are no items.
        record: what files of samples say of the items, as JSON; {}: nothing.
    """

    spans: Sequence[tuple[int, int]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[Mapping[str, Any]] = ()
    described: Callable[[], Sequence[str]] | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def items(self) -> list[tuple[int, int, str]]:
        """(start, end, words) of the tokens of each item, for people."""
        if self.described is None:
            return []
        places = zip(self.spans, self.described(), strict=True)
        return [(start, end, words) for (start, end), words in places]


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


def written_prompt(record: Mapping[str, Any], text: str) -> str | Messages:
    """The prompt of a token row as training data hold it: its chat messages, with all items in
    their places, or else its `text`."""
    messages = json.loads(record["row"]).get(MESSAGES)
    if messages is None:
        return text
    items = iter(prompt_content(record).parts)
    written = []
    for message in messages:
        if has_marks(message["content"]):
            content = list[Mapping[str, Any]]()
            for piece in in_parts(message["content"]):
                if piece["type"] == "image":
                    content.append(next(items))
                else:
                    content.append(piece)
            message = {**message, "content": content}
        written.append(message)
    return written


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
    rows = list[list[list[int]]]()
    for pieces in _between_items(unpadded_ids(ids, mask), contents):
        first = pieces[0]
        # with it, tokenizers such as Llama's put a space before the text
        if tokenizer.bos_token_id is not None and first[:1] == [tokenizer.bos_token_id]:
            first = first[1:]
        rows.append([first, *pieces[1:]])
    places = [[PLACE] * len(content.spans) for content in contents]
    return _texts_with_places(tokenizer, rows, places, skip_special_tokens=False)


def readable_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    contents: Sequence[PromptContent],
) -> list[str]:
    """The text of each prompt without special tokens, as people read it: with a few words in the
    place of each item. `prompts`: their ids."""
    places = []
    for content in contents:
        places.append([words for _, _, words in content.items])
    rows = _between_items(prompts, contents)
    return _texts_with_places(tokenizer, rows, places, skip_special_tokens=True)


def unpadded_ids(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The real tokens of each row, `ids` and `mask` (B, T)."""
    # to the CPU at once, not two waits for each row
    rows = zip(ids.cpu(), mask.cpu(), strict=True)
    return [row_ids[row_mask].tolist() for row_ids, row_mask in rows]


def _between_items(
    prompts: Sequence[list[int]], contents: Sequence[PromptContent]
) -> list[list[list[int]]]:
    """The ids of each prompt before, between and after its items."""
    rows = list[list[list[int]]]()
    for tokens, content in zip(prompts, contents, strict=True):
        pieces = list[list[int]]()
        begin = 0
        for start, end in content.spans:
            pieces.append(tokens[begin:start])
            begin = end
        rows.append([*pieces, tokens[begin:]])
    return rows


def _texts_with_places(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Sequence[list[int]]],
    places: Sequence[Sequence[str]],
    skip_special_tokens: bool,
) -> list[str]:
    """The text of the pieces of each row, with that of a place between each two."""
    pieces = [piece for row in rows for piece in row]
    texts = iter(tokenizer.batch_decode(pieces, skip_special_tokens=skip_special_tokens))
    prompts = []
    for row, places_of_row in zip(rows, places, strict=True):
        prompt = next(texts)
        for _, words in zip(row[1:], places_of_row, strict=True):
            prompt += words + next(texts)
        prompts.append(prompt)
    return prompts
