"""Examples to token ids, many at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Example
from dschat_ppo.data.messages import Message
from dschat_ppo.data.template_limits import GROUP_BYTES, check_size, in_groups
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
    """Token ids of one example; each answer with its final token. `prompt_spans` are half-open ranges of `prompt` that
    are earlier answers of the assistant, each with its end-of-turn token if the chat template has one."""

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
        self.size = 0  # bytes of all texts
        self._ids: list[list[int] | UserError] = []
        self._offsets: list[list[Span]] = []

    def add(self, text: str) -> None:
        """To be encoded by `encode`; `UserError` if it is too long."""
        if text not in self._slots:
            self.size += check_size(text)
            self._slots[text] = len(self._slots)

    def encode(self) -> None:
        """Encode all texts, in few calls. If the tokenizer rejects one, one by one."""
        for texts in in_groups(self._slots):
            try:
                with reading("the tokenizer rejects this text"):
                    found = self._tokenizer(
                        texts, add_special_tokens=self._add_special_tokens, return_attention_mask=False,
                        return_token_type_ids=False, return_offsets_mapping=self._with_offsets, verbose=False,
                    )  # fmt: skip
            except UserError:
                self._ids, self._offsets = [self._encode_one(text) for text in self._slots], []
                return
            self._ids += found["input_ids"]
            if self._with_offsets:
                self._offsets += found["offset_mapping"]

    def _encode_one(self, text: str) -> list[int] | UserError:
        try:
            return ids_of(self._tokenizer, text, self._add_special_tokens)
        except UserError as problem:
            return problem

    def ids(self, text: str) -> list[int]:
        """Ids of an added text, shared by all who ask for them; `UserError` if the tokenizer rejects it."""
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
    tokenizer: PreTrainedTokenizerBase, examples: Iterable[Example], all_turns: bool
) -> Iterator[EncodedExample | UserError]:
    """Encode examples in few calls of the tokenizer. The ids equal those of `encode_prompt` and `encode_answer`.

    With `all_turns` the earlier answers in prompts of chat messages are found too; otherwise `prompt_spans` is empty.

    Yields:
        For each example its ids, or the reason why it cannot be encoded (without the row's name). Examples with equal
        texts share their lists. Texts of `GROUP_BYTES` are encoded together, so use or drop the ids before you ask for
        more: a batch of long rows needs gigabytes.
    """
    special = _special_tokens(tokenizer)
    group = _Group(tokenizer, all_turns, special)
    for example in examples:
        group.add(example)
        if group.size > GROUP_BYTES:
            yield from group.encoded()
            group = _Group(tokenizer, all_turns, special)
    yield from group.encoded()


class _Group:
    """Examples that are encoded together; see `encode_examples`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, all_turns: bool, special: re.Pattern[str] | None):
        self._tokenizer, self._all_turns, self._special = tokenizer, all_turns, special
        # text prompts, by whether BOS is added
        self._prompts = {added: _Texts(tokenizer, added) for added in (True, False)}
        self._plain = self._prompts[False]  # and answers
        self._traced = _Texts(tokenizer, False, with_offsets=tokenizer.is_fast)
        self._rendered: list[tuple[Example, _Rendered | UserError | None]] = []

    @property
    def size(self) -> int:
        """Bytes of all texts."""
        return self._prompts[True].size + self._plain.size + self._traced.size

    def add(self, example: Example) -> None:
        """Render an example."""
        try:
            self._rendered.append((example, self._add_texts(example)))
        except UserError as problem:
            self._rendered.append((example, problem))

    def _add_texts(self, example: Example) -> _Rendered | None:
        """Add the texts of an example; None if its prompt is text."""
        if isinstance(example.prompt, str):
            self._prompts[not starts_with_bos(self._tokenizer, example.prompt)].add(example.prompt)
            anchor = text_anchor(self._tokenizer, example.prompt)
            for text in (anchor, *(anchor + text_answer(self._tokenizer, answer)[0] for answer in example.answers)):
                self._plain.add(text)
            return None
        texts = _render(self._tokenizer, example, self._all_turns, self._special)
        (self._traced if texts.spans else self._plain).add(texts.opening)
        for turn, _ in texts.turns:
            self._plain.add(texts.tail + turn)
        return texts

    def encoded(self) -> Iterator[EncodedExample | UserError]:
        """The ids of each example, or its problem."""
        for texts in (*self._prompts.values(), self._traced):
            texts.encode()
        for example, rendered in self._rendered:
            try:
                yield rendered if isinstance(rendered, UserError) else self._ids(example, rendered)
            except UserError as problem:
                yield problem

    def _ids(self, example: Example, rendered: _Rendered | None) -> EncodedExample:
        tokenizer, plain = self._tokenizer, self._plain
        if rendered is not None:
            return _assemble(tokenizer, example, rendered, self._traced if rendered.spans else plain, plain)
        assert isinstance(example.prompt, str)
        prompt = self._prompts[not starts_with_bos(tokenizer, example.prompt)].ids(example.prompt)
        answers = [self._text_answer_ids(example.prompt, answer) for answer in example.answers]
        prompt = without_eos(tokenizer, prompt)
        if prompt == [tokenizer.bos_token_id]:  # plain text, which may bring its own BOS
            answers = [answer[1:] if answer[:1] == prompt else answer for answer in answers]
        return EncodedExample(prompt, answers, [])

    def _text_answer_ids(self, prompt: str, answer: str | Message) -> list[int]:
        anchor = text_anchor(self._tokenizer, prompt)
        text, final = text_answer(self._tokenizer, answer)
        known, ids = self._plain.ids(anchor), self._plain.ids(anchor + text)
        if ids[: len(known)] != known:
            return encode_answer(self._tokenizer, prompt, answer)
        return finished(ids[len(known) :], final)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Finds the added tokens that split a text into parts which are encoded independently; None if there are none. Slow
    tokenizers treat the parts of a text differently, so their texts are encoded whole."""
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
    said = [number for number, message in enumerate(example.prompt) if message["role"] == "assistant"]
    spans = [span for turn, span in zip(said, spans, strict=False) if turn not in example.context]
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
    """How many of the first `ids` are the last ones of `prompt`, from its last token equal to `ids[0]` on; None if they
    differ.

    Args:
        ids: of an answer, after the end of the prompt's text from its last special token.
        is_whole: the answer was encoded after the whole text of the prompt.
    """
    start = 0 if is_whole else next((i for i in reversed(range(len(prompt))) if prompt[i] == ids[0]), len(prompt))
    known = len(prompt) - start
    return known if prompt[start:] == ids[:known] and (known or is_whole) else None
