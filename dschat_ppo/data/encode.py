"""Texts to token ids, in one way for all steps.

A text prompt is encoded unchanged, and an answer to it ends with EOS. Chat messages are rendered by the chat template
(`templates.py`), and an answer to them ends with the template's end-of-turn token. Prompt and answer are separate
lists, because in step 3 the prompt ends there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.examples import Example
from dschat_ppo.data.messages import check_rendered
from dschat_ppo.data.templates import (
    Messages,
    Tools,
    render,
    render_answer,
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
    """What is encoded of an example."""

    prompt: str  # with the opening of the assistant's turn if it is a chat
    has_own_bos: bool  # the tokenizer adds no tokens of its own, such as BOS, to the prompt
    # Texts that an answer may follow. It is encoded after the first one whose ids stay the same, and these are removed:
    # some tokenizers put a space before every text.
    before: tuple[str, ...]
    answers: list[tuple[str, int]]  # text and id of the final token of each
    spans: list[Span]  # characters of `prompt` that are earlier answers

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
    """The number of bytes of a text in UTF-8; `UserError` above `MOST_BYTES`."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MOST_BYTES:
        raise UserError(
            f"a text of {len(text):,} characters is too long for the tokenizer, which takes {MOST_BYTES >> 20} MiB at "
            "once; split it"
        )
    return size


def _texts_of(tokenizer: PreTrainedTokenizerBase, example: Example, all_turns: bool) -> _Texts:
    """Render an example."""
    prompt = example.prompt
    if isinstance(prompt, str):
        has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        # Without a text before it, the answer " The" after "Answer:" would be "Answer:  The". A token may span the end
        # of the line break.
        before = ("\n", ":", "") if prompt and _puts_a_space_before(tokenizer) else ("",)
        return _Texts(prompt, has_bos, before, [text_answer(tokenizer, answer) for answer in example.answers], [])
    opening = render(tokenizer, prompt, open_answer=True, tools=example.tools)
    check_rendered(opening, prompt, example.tools)
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
    return _Texts(opening, True, (opening[last:], ""), answers, spans)


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
    plain = _Encoder(tokenizer)
    try:
        anchor, text, both = (plain.ids(part) for part in ("\n", "x", "\nx"))
    except UserError:  # a vocabulary without these characters and without an unknown token
        return False
    return both[: len(anchor)] == anchor and both[len(anchor) :] != text


def _encoded(
    tokenizer: PreTrainedTokenizerBase, group: list[_Texts | UserError]
) -> Iterator[EncodedExample | UserError]:
    """The ids of each example, or its problem."""
    known = [texts for texts in group if isinstance(texts, _Texts)]
    plain, with_bos = _Encoder(tokenizer), _Encoder(tokenizer, add_special_tokens=True)
    prompts = [texts.prompt for texts in known if texts.has_own_bos]
    plain.add(prompts + [each for texts in known for each in texts.after()], {t.prompt for t in known if t.spans})
    with_bos.add([texts.prompt for texts in known if not texts.has_own_bos])
    for texts in group:
        if isinstance(texts, UserError):
            yield texts
            continue
        try:
            prompt = (plain if texts.has_own_bos else with_bos).ids(texts.prompt)
            if not texts.has_own_bos and len(prompt) > 1 and prompt[-1] == tokenizer.eos_token_id:
                prompt = prompt[:-1]  # some tokenizers append EOS to every text
            answers = []
            for text, final in texts.answers:
                for before in texts.before:
                    start, ids = plain.ids(before) if before else [], plain.ids(before + text)
                    if ids[: len(start)] == start:
                        break
                ids = ids[len(start) :]
                answers.append(ids if ids[-1:] == [final] else [*ids, final])
            if prompt == [tokenizer.bos_token_id]:  # plain text, which may bring its own BOS
                answers = [answer[1:] if answer[:1] == prompt else answer for answer in answers]
            yield EncodedExample(prompt, answers, plain.token_spans(texts.prompt, texts.spans))
        except UserError as problem:
            yield problem


class _Encoder:
    """The ids of texts: those of `add` in one call of the tokenizer, any other one when it is asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = False):
        self._tokenizer, self._add_special_tokens = tokenizer, add_special_tokens
        self._ids: dict[str, list[int] | UserError] = {}
        self._encodings: dict[str, Any] = {}

    def add(self, texts: Iterable[str], traced: Collection[str] = ()) -> None:
        """Encode texts together, those in `traced` for `token_spans`; one by one if the tokenizer rejects one."""
        if not (texts := list(dict.fromkeys(texts))):
            return
        try:
            with reading("the tokenizer rejects this text"):
                found = self._tokenizer(
                    texts, add_special_tokens=self._add_special_tokens, return_attention_mask=False,
                    return_token_type_ids=False, verbose=False,
                )  # fmt: skip
        except UserError as problem:
            self._ids[texts[0]] = problem
            for text in texts if len(texts) > 1 else ():
                self.add([text], traced)
            return
        self._ids |= zip(texts, found["input_ids"], strict=True)
        encodings = zip(texts, found.encodings or (), strict=False)  # slow tokenizers have none
        self._encodings |= {text: encoding for text, encoding in encodings if text in traced}

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
        if text not in self._encodings:  # no offsets are told: how many first tokens are those of the text's start?
            whole, places = self.ids(text) if spans else [], [place for span in spans for place in span]
            counts = [len(commonprefix([self.ids(text[:place]), whole])) for place in places]
            return list(zip(counts[::2], counts[1::2], strict=True))
        offsets: list[Span] = self._encodings[text].offsets  # first and last + 1 character of each token
        found, token = list[Span](), 0
        for start, stop in spans:
            while token < len(offsets) and offsets[token][1] <= start:
                token += 1
            first = token
            while token < len(offsets) and offsets[token][0] < stop:
                token += 1
            found.append((first, token))
        return found


def joined_steps(example: Example, separator: str) -> Example:
    """The example with one answer: its steps with `separator` between them, which is removed from their ends.
    `UserError` if there are no steps or labels, or a step is empty or contains the separator."""
    steps, ends = list[str](), re.escape(separator)
    for number, step in enumerate(example.answers, start=1):
        assert isinstance(step, str)
        step = re.sub(rf"\A(?:{ends})+|(?<!{ends})(?:{ends})+\Z", "", step)  # a run inside is tried once
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
