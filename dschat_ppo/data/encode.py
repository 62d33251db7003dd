"""Texts to token ids, in one way for all steps.

A text prompt is encoded unchanged, and an answer to it ends with EOS. Chat messages are rendered by the chat template
(`templates.py`), and an answer to them ends with the template's end-of-turn token. Prompt and answer are separate
lists, because in step 3 the prompt ends there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Example
from dschat_ppo.data.templates import (
    Messages,
    Tools,
    render_answer,
    render_prompt,
    text_answer,
    turn_end,
    without_final,
)  # fmt: skip
from dschat_ppo.data.turns import Span, turn_spans
from dschat_ppo.errors import UserError, reading

MOST_BYTES = 2**24  # of a text to encode: the tokenizers library needs up to 300 times as many, and aborts without them
GROUP_BYTES = 2**22  # of texts that are encoded together


@dataclass(frozen=True)
class EncodedExample:
    """Token ids of one example; each answer with its final token. `prompt_spans` are half-open ranges of `prompt` that
    are earlier answers of the assistant, each with its end-of-turn token if the chat template has one."""

    prompt: list[int]
    answers: list[list[int]]
    prompt_spans: list[tuple[int, int]]


@dataclass(frozen=True)
class _Texts:
    """What is encoded of an example.

    Attributes:
        prompt: text, with the opening of the assistant's turn if it is a chat.
        kind: of the prompt: "special" if the tokenizer adds its own tokens, such as BOS; "traced" if the characters of
            each token are needed, for `spans`; otherwise "plain", as answers are.
        before: texts that an answer may follow. It is encoded after the first one whose ids stay the same, and these
            are removed: some tokenizers put a space before every text.
        answers: text and id of the final token of each.
        spans: characters of `prompt` that are earlier answers.
    """

    prompt: str
    is_chat: bool
    kind: Literal["special", "traced", "plain"]
    before: tuple[str, ...]
    answers: list[tuple[str, int]]
    spans: list[Span]

    def after(self) -> list[str]:
        """The texts from which the ids of the answers are taken first."""
        return [self.before[0], *(self.before[0] + text for text, _ in self.answers)] if self.answers else []


def encode_examples(
    tokenizer: PreTrainedTokenizerBase, examples: Iterable[Example], all_turns: bool
) -> Iterator[EncodedExample | UserError]:
    """Encode examples in few calls of the tokenizer.

    With `all_turns` the earlier answers in prompts of chat messages are found too; otherwise `prompt_spans` is empty.

    Yields:
        For each example its ids, or the reason why it cannot be encoded (without the row's name). Examples with equal
        texts share their lists. Texts of `GROUP_BYTES` are encoded together, so use or drop the ids before you ask for
        more: a batch of long rows needs gigabytes.
    """
    group, size = list[_Texts | UserError](), 0
    for example in examples:
        try:
            texts = _texts_of(tokenizer, example, all_turns)
            size += sum(map(check_size, {texts.prompt, *texts.after()}))
            group.append(texts)
        except UserError as problem:
            group.append(problem)
        if size > GROUP_BYTES:
            yield from _encoded(tokenizer, group)
            group, size = [], 0
    yield from _encoded(tokenizer, group)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, tools: Tools | None = None) -> list[int]:
    """Token ids of one prompt; `UserError`, without the name of the row, if it cannot be encoded."""
    (found,) = encode_examples(tokenizer, [Example(prompt, [], tools=tools)], False)
    if isinstance(found, UserError):
        raise found
    return found.prompt


def encode_finished(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that holds prompt and answer, with exactly one final token. If the text contains the chat
    template's end-of-turn token, the template has rendered it and that token is the final one; otherwise EOS is."""
    turn, eos = turn_end(tokenizer).token, int(tokenizer.eos_token_id)
    names = tuple(map(str, tokenizer.convert_ids_to_tokens([turn, eos])))
    end = turn if names[0] in text else eos
    ids = list(encode_prompt(tokenizer, without_final(text, names)))
    while ids and ids[-1] == end:
        ids.pop()
    return [*ids, end]


def check_size(text: str) -> int:
    """The number of bytes of a text in UTF-8, at least: four for each character unless all are ASCII. `UserError` above
    `MOST_BYTES`."""
    size = len(text) if text.isascii() else 4 * len(text)
    if size > MOST_BYTES and len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise UserError(
            f"a text of {len(text):,} characters is too long for the tokenizer, which takes {MOST_BYTES >> 20} MiB at "
            "once; split it"
        )
    return size


def in_groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in the same order, in lists to encode together."""
    group, size = list[str](), 0
    for text in texts:
        group.append(text)
        size += check_size(text)
        if size > GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _texts_of(tokenizer: PreTrainedTokenizerBase, example: Example, all_turns: bool) -> _Texts:
    """Render an example."""
    prompt = example.prompt
    if isinstance(prompt, str):
        has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        answers = [text_answer(tokenizer, answer) for answer in example.answers]
        # Without a text before it, the answer " The" after "Answer:" would be "Answer:  The". A token may span the end
        # of the line break.
        before = ("\n", ":", "") if prompt and _puts_a_space_before(tokenizer) else ("",)
        return _Texts(prompt, False, "plain" if has_bos else "special", before, answers, [])
    opening = render_prompt(tokenizer, prompt, example.tools)
    spans: list[Span] = []
    if all_turns:
        said = [number for number, message in enumerate(prompt) if message["role"] == "assistant"]
        found = zip(said, turn_spans(tokenizer, prompt, opening, example.tools), strict=True)
        spans = [span for turn, span in found if turn not in example.context]
    answers = [render_answer(tokenizer, prompt, opening, answer, example.tools) for answer in example.answers]
    # The end from the last special token on is short; a token may span the end of the prompt.
    last, special = 0, _special_tokens(tokenizer, len(tokenizer))
    for place in special.finditer(opening) if special else ():
        last = place.start()
    return _Texts(opening, True, "traced" if spans else "plain", (opening[last:], opening, ""), answers, spans)


@lru_cache(maxsize=16)
def _special_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> re.Pattern[str] | None:
    """Finds the added tokens that split a text into parts which are encoded independently; None if there are none. Slow
    tokenizers treat the parts of a text differently. `size`: of the vocabulary."""
    if not tokenizer.is_fast:
        return None
    tokens = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if not token.normalized and not token.single_word and token.content.strip()
    ]
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


@lru_cache(maxsize=16)
def _puts_a_space_before(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a space before every text, as those of Llama 2 do."""
    found = _Encoder(tokenizer)
    try:
        anchor, text, both = (found.ids(part) for part in ("\n", "x", "\nx"))
    except UserError:  # a vocabulary without these characters and without an unknown token
        return False
    return both[: len(anchor)] == anchor and both[len(anchor) :] != text


def _encoded(
    tokenizer: PreTrainedTokenizerBase, group: list[_Texts | UserError]
) -> Iterator[EncodedExample | UserError]:
    """The ids of each example, or its problem."""
    encoders = {kind: _Encoder(tokenizer, kind) for kind in ("special", "traced", "plain")}
    known = [texts for texts in group if isinstance(texts, _Texts)]
    for kind, encoder in encoders.items():
        prompts = [texts.prompt for texts in known if texts.kind == kind]
        encoder.add(prompts + [text for texts in known for text in texts.after()] * (kind == "plain"))
    for texts in group:
        try:
            yield texts if isinstance(texts, UserError) else _ids_of(tokenizer, texts, encoders)
        except UserError as problem:
            yield problem


def _ids_of(tokenizer: PreTrainedTokenizerBase, texts: _Texts, encoders: dict[str, _Encoder]) -> EncodedExample:
    prompt, plain = encoders[texts.kind].ids(texts.prompt), encoders["plain"]
    if not texts.is_chat and len(prompt) > 1 and prompt[-1] == tokenizer.eos_token_id:
        prompt = prompt[:-1]  # some tokenizers append EOS to every text
    answers = []
    for text, final in texts.answers:
        for before in texts.before:
            known, ids = plain.ids(before) if before else [], plain.ids(before + text)
            is_end = not texts.is_chat or prompt[len(prompt) - len(known) :] == known
            if ids[: len(known)] == known and is_end:
                break
        ids = ids[len(known) :]
        answers.append(ids if ids[-1:] == [final] else [*ids, final])
    if not texts.is_chat and prompt == [tokenizer.bos_token_id]:  # plain text, which may bring its own BOS
        answers = [answer[1:] if answer[:1] == prompt else answer for answer in answers]
    return EncodedExample(prompt, answers, encoders[texts.kind].token_spans(texts.prompt, texts.spans))


class _Encoder:
    """Encodes each text once, those that `add` names in few calls of the tokenizer. `kind`: see `_Texts`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: str = "plain"):
        self._tokenizer, self._kind = tokenizer, kind
        self._ids: dict[str, list[int] | UserError] = {}
        self._offsets: dict[str, list[Span]] = {}  # first and last + 1 character of each token

    def add(self, texts: Iterable[str]) -> None:
        """Encode texts together; one by one if the tokenizer rejects one of them."""
        for group in in_groups(dict.fromkeys(texts)):
            try:
                self._encode(group)
            except UserError as problem:
                self._ids[group[0]] = problem
                for text in group if len(group) > 1 else ():
                    self.add([text])

    def _encode(self, texts: list[str]) -> None:
        has_offsets = self._kind == "traced" and self._tokenizer.is_fast
        with reading("the tokenizer rejects this text"):
            found = self._tokenizer(
                texts, add_special_tokens=self._kind == "special", return_attention_mask=False,
                return_token_type_ids=False, return_offsets_mapping=has_offsets, verbose=False,
            )  # fmt: skip
        self._ids |= zip(texts, found["input_ids"], strict=True)
        self._offsets |= zip(texts, found["offset_mapping"] if has_offsets else (), strict=False)

    def ids(self, text: str) -> list[int]:
        """Ids of a text, shared by all who ask for them; `UserError` if the tokenizer rejects it."""
        if text not in self._ids:
            self.add([text])
        found = self._ids[text]
        if isinstance(found, UserError):
            raise found
        return found

    def token_spans(self, text: str, spans: list[Span]) -> list[Span]:
        """Ranges of tokens for ranges of characters of a text, in order and disjoint. A token on a boundary belongs to
        the range."""
        if text not in self._offsets:
            return [(self._tokens_before(text, start), self._tokens_before(text, stop)) for start, stop in spans]
        offsets, found, token = self._offsets[text], list[Span](), 0
        for start, stop in spans:
            while token < len(offsets) and offsets[token][1] <= start:
                token += 1
            first = token
            while token < len(offsets) and offsets[token][0] < stop:
                token += 1
            found.append((first, token))
        return found

    def _tokens_before(self, text: str, character: int) -> int:
        """How many of the first tokens of a text are those of its start, for tokenizers that do not tell offsets."""
        start, whole = self.ids(text[:character]), self.ids(text)
        differ = (place for place, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b)
        return next(differ, min(len(start), len(whole)))
