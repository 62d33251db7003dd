"""Examples to token ids, many at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Example
from dschat_ppo.data.messages import Message
from dschat_ppo.data.templates import (
    encode_answer,
    finished,
    ids_of,
    render_answer,
    render_prompt,
    starts_with_bos,
    text_anchor,
    text_answer,
    without_eos,
)
from dschat_ppo.data.turns import Span, token_spans, token_spans_by_prefix, turn_spans
from dschat_ppo.errors import UserError, reading


@dataclass(frozen=True)
class EncodedExample:
    """Token ids of one example.

    Attributes:
        prompt: ids of the prompt.
        answers: ids of each answer, with its final token.
        prompt_spans: half-open ranges of `prompt` that are earlier answers of the assistant, each with its end-of-turn
            token if the chat template has one.
    """

    prompt: list[int]
    answers: list[list[int]]
    prompt_spans: list[tuple[int, int]]


class _Texts:
    """Texts to encode with the same settings, each once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool, with_offsets: bool = False):
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._with_offsets = with_offsets
        self._slots: dict[str, int] = {}
        self._ids: list[list[int] | UserError] = []
        self._offsets: list[list[Span]] = []

    def add(self, text: str) -> None:
        """To be encoded by `encode`."""
        self._slots.setdefault(text, len(self._slots))

    def encode(self) -> None:
        """Encode all texts in one call. If the tokenizer rejects it, one by one."""
        texts = list(self._slots)
        if not texts:
            return
        try:
            with reading("the tokenizer rejects this text"):
                found = self._tokenizer(
                    texts, add_special_tokens=self._add_special_tokens, return_attention_mask=False,
                    return_token_type_ids=False, return_offsets_mapping=self._with_offsets, verbose=False,
                )  # fmt: skip
        except UserError:
            self._ids = [self._encode_one(text) for text in texts]
            return
        self._ids = found["input_ids"]
        if self._with_offsets:
            self._offsets = found["offset_mapping"]

    def _encode_one(self, text: str) -> list[int] | UserError:
        try:
            return ids_of(self._tokenizer, text, self._add_special_tokens)
        except UserError as problem:
            return problem

    def ids(self, text: str) -> list[int]:
        """Ids of an added text, shared by all who ask for them.

        Raises:
            UserError: the tokenizer rejects it.
        """
        found = self._ids[self._slots[text]]
        if isinstance(found, UserError):
            raise found
        return found

    def token_spans(self, text: str, spans: list[Span]) -> list[Span]:
        """Ranges of tokens for ranges of characters of an added text."""
        if self._offsets:
            return token_spans(self._offsets[self._slots[text]], spans)
        return token_spans_by_prefix(self._tokenizer, text, self.ids(text), spans)


@dataclass(frozen=True)
class _Rendered:
    """The texts of an example with chat messages.

    Attributes:
        opening: prompt, with the opening of the assistant's turn.
        tail: end of `opening` from its last special token; it is encoded again with each answer.
        turns: text after `opening` and id of the final token, of each answer.
        spans: characters of `opening` that are earlier answers.
    """

    opening: str
    tail: str
    turns: list[tuple[str, int]]
    spans: list[Span]


def encode_examples(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], all_turns: bool
) -> list[EncodedExample | UserError]:
    """Encode examples in few calls of the tokenizer. The ids equal those of `encode_prompt` and `encode_answer`.

    Args:
        tokenizer: of the model.
        examples: to encode.
        all_turns: also find the earlier answers in prompts that are chat messages; otherwise `prompt_spans` is empty.

    Returns:
        For each example its ids, or the reason why it cannot be encoded (without the row's name). Examples with equal
        texts share their lists.
    """
    prompts = {added: _Texts(tokenizer, added) for added in (True, False)}  # text prompts, by whether BOS is added
    plain = prompts[False]  # and answers
    traced = _Texts(tokenizer, False, with_offsets=tokenizer.is_fast)
    rendered: list[_Rendered | UserError | None] = []
    special = _special_tokens(tokenizer)
    for example in examples:
        try:
            if isinstance(example.prompt, str):
                prompts[not starts_with_bos(tokenizer, example.prompt)].add(example.prompt)
                anchor = text_anchor(tokenizer, example.prompt)
                for text in (anchor, *(anchor + text_answer(tokenizer, answer) for answer in example.answers)):
                    plain.add(text)
                rendered.append(None)
                continue
            texts = _render(tokenizer, example, all_turns, special)
            (traced if texts.spans else plain).add(texts.opening)
            for turn, _ in texts.turns:
                plain.add(texts.tail + turn)
            rendered.append(texts)
        except UserError as problem:
            rendered.append(problem)
    for encoded in (*prompts.values(), traced):
        encoded.encode()

    def text_answer_ids(prompt: str, answer: str | Message) -> list[int]:
        anchor = text_anchor(tokenizer, prompt)
        known, ids = plain.ids(anchor), plain.ids(anchor + text_answer(tokenizer, answer))
        if ids[: len(known)] != known:
            return encode_answer(tokenizer, prompt, answer)
        return finished(ids[len(known) :], int(tokenizer.eos_token_id))

    def result(example: Example, texts: _Rendered | UserError | None) -> EncodedExample | UserError:
        if isinstance(texts, UserError):
            return texts
        try:
            if texts is not None:
                return _assemble(tokenizer, example, texts, traced if texts.spans else plain, plain)
            assert isinstance(example.prompt, str)
            prompt = prompts[not starts_with_bos(tokenizer, example.prompt)].ids(example.prompt)
            answers = [text_answer_ids(example.prompt, answer) for answer in example.answers]
            return EncodedExample(without_eos(tokenizer, prompt), answers, [])
        except UserError as problem:
            return problem

    return [result(example, texts) for example, texts in zip(examples, rendered, strict=True)]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Finds the added tokens that split a text into parts which are encoded independently; None if there are none.

    Slow tokenizers treat the parts of a text differently, so their texts are encoded whole.
    """
    if not tokenizer.is_fast:
        return None
    tokens = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if not token.normalized and not token.single_word and token.content.strip()
    ]
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


def _render(
    tokenizer: PreTrainedTokenizerBase, example: Example, all_turns: bool, special: re.Pattern[str] | None
) -> _Rendered:
    assert not isinstance(example.prompt, str)
    opening = render_prompt(tokenizer, example.prompt, example.tools)
    spans = turn_spans(tokenizer, example.prompt, opening, example.tools) if all_turns else []
    turns = [render_answer(tokenizer, example.prompt, opening, answer, example.tools) for answer in example.answers]
    last = 0
    for found in special.finditer(opening) if special else ():
        last = found.start()
    return _Rendered(opening, opening[last:], turns, spans)


def _assemble(
    tokenizer: PreTrainedTokenizerBase, example: Example, texts: _Rendered, openings: _Texts, plain: _Texts
) -> EncodedExample:
    prompt = openings.ids(texts.opening)
    answers = []
    for (turn, final), answer in zip(texts.turns, example.answers, strict=True):
        ids = plain.ids(texts.tail + turn)
        known = _known_length(prompt, ids, is_whole=texts.tail == texts.opening)
        if known is None:  # a token spans the end of the prompt, or the parts are not independent
            answers.append(encode_answer(tokenizer, example.prompt, answer, example.tools))
        else:
            answers.append(finished(ids[known:], final))
    return EncodedExample(prompt, answers, openings.token_spans(texts.opening, texts.spans) if texts.spans else [])


def _known_length(prompt: list[int], ids: list[int], is_whole: bool) -> int | None:
    """How many of the first `ids` are the last ones of `prompt`, from its last token equal to `ids[0]` on.

    Args:
        prompt: ids of a prompt.
        ids: of an answer, after the end of the prompt's text from its last special token.
        is_whole: the answer was encoded after the whole text of the prompt.

    Returns:
        None if they are not equal.
    """
    start = 0 if is_whole else next((i for i in reversed(range(len(prompt))) if prompt[i] == ids[0]), len(prompt))
    known = len(prompt) - start
    return known if prompt[start:] == ids[:known] and (known or is_whole) else None
