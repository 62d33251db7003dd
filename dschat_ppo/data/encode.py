"""Texts to token ids, in one way for all steps.

A text prompt is encoded unchanged, and an answer to it ends with EOS. Chat messages are rendered by
the chat template (`templates.py`), and an answer to them ends with the template's end-of-turn
token. Prompt and answer are separate lists, because in step 3 the prompt ends there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dschat_ppo.data.examples import Example
from dschat_ppo.data.messages import SAID_BY_TOOLS
from dschat_ppo.data.rendered import Piece, render_example
from dschat_ppo.data.templates import (
    Messages,
    Span,
    Tools,
    added_tokens,
    turn_end,
    without_final,
)
from dschat_ppo.errors import UserError, reading

# of a text to encode: the tokenizers library needs up to 300 times as many, and aborts without
# them
MOST_BYTES = 2**24
_FAST = (PreTrainedTokenizerFast.__call__, PreTrainedTokenizerFast._encode_plus)
_TAIL = 64  # characters of a prompt after which its answers are encoded
SPLIT = "\ufdd0"  # no character: divides the text of an added token, so that it is encoded as text


@dataclass(frozen=True)
class EncodedExample:
    """Token ids of one example; each answer with its final token. `prompt_spans` are half-open
    ranges of `prompt` that are earlier answers of the assistant, each with its end-of-turn token if
    the chat template has one. `untrained_spans` are those of each answer of several messages that
    others say, or that are excluded from training."""

    prompt: list[int]
    answers: list[list[int]]
    prompt_spans: list[Span]
    remarks: tuple[str, ...] = ()  # what the owner of the data should know
    untrained_spans: list[list[Span]] = field(default_factory=list)
    # ranges of `prompt` of which the length limit leaves all or nothing
    fixed_spans: list[Span] = field(default_factory=list)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, tools: Tools | None = None
) -> list[int]:
    """Token ids of one prompt; `UserError`, without the name of the row, if it cannot be
    encoded."""
    return encode_example(tokenizer, Example(prompt, [], tools=tools)).prompt


def encode_finished(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that holds prompt and answer, with exactly one final token. If the text
    contains the chat template's end-of-turn token, the template has rendered it and that token is
    the final one; otherwise EOS is."""
    end = str(tokenizer.convert_ids_to_tokens(turn_end(tokenizer).token_id))
    bare_text, _ = without_final(tokenizer, text)
    answer = ""
    if end in text:
        answer = end
    ids = encode_example(tokenizer, Example(bare_text, [answer]))
    return [*ids.prompt, *ids.answers[0]]


def encode_example(
    tokenizer: PreTrainedTokenizerBase, example: Example, all_turns: bool = False
) -> EncodedExample:
    """The ids of one example, in lists that others may share; `UserError`, without the row's name,
    if it cannot be encoded. With `all_turns` the earlier answers in a prompt of chat messages are
    found too."""
    safe_example = _with_results_divided(tokenizer, example)
    rendered = render_example(tokenizer, safe_example, all_turns)
    text = rendered.prompt
    if safe_example.prompt != example.prompt:
        ids, prompt_spans = _encode_divided(tokenizer, text, rendered.spans)
    else:
        with_bos = not rendered.has_bos
        ids, prompt_spans = _encode(tokenizer, text, tuple(rendered.spans), with_bos)
    if not rendered.has_bos and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]  # some tokenizers append EOS to every text
    # of a plain text, which may bring its own
    is_only_bos = len(ids) == 1 and ids[0] == tokenizer.bos_token_id
    answers = list[list[int]]()
    untrained_spans = list[list[Span]]()
    for rendered_answer in rendered.answers:
        answer, untrained = _encode_pieces(tokenizer, text, rendered_answer.pieces)
        if is_only_bos and answer[:1] == ids:
            answer = answer[1:]
        if answer[-1:] != [rendered_answer.final_id]:
            answer = [*answer, rendered_answer.final_id]
        answers.append(answer)
        untrained_spans.append(untrained)
    return EncodedExample(ids, answers, prompt_spans, rendered.remarks, untrained_spans)


def _with_results_divided(tokenizer: PreTrainedTokenizerBase, example: Example) -> Example:
    """The example, in which the texts of special tokens are divided in what tools returned."""
    conversations = [answer for answer in example.answers if isinstance(answer, list)]
    if isinstance(example.prompt, list):
        conversations.append(example.prompt)
    roles = {message["role"] for messages in conversations for message in messages}
    if roles.isdisjoint(SAID_BY_TOOLS):
        return example

    def safe(said: Any) -> Any:
        """The messages of an example with the results divided; its texts as they are."""
        if isinstance(said, list):
            return [safe(message) for message in said]
        if isinstance(said, dict) and said["role"] in SAID_BY_TOOLS:
            return {**said, "content": divided(tokenizer, _result_of(tokenizer, said["content"]))}
        return said

    return replace(example, prompt=safe(example.prompt), answers=safe(list(example.answers)))


def _encode_pieces(
    tokenizer: PreTrainedTokenizerBase, before: str, pieces: Sequence[Piece]
) -> tuple[list[int], list[Span]]:
    """(ids of an answer after the text `before`; the ranges of them that are not trained)."""
    ids = list[int]()
    untrained = list[Span]()
    for piece in pieces:
        begin = len(ids)
        for text in piece.text.split(SPLIT):
            ids += encode_after(tokenizer, before[-_TAIL:], text)
            before = before[-_TAIL:] + text
        if not piece.is_trained:
            untrained.append((begin, len(ids)))
    return ids, untrained


def encode_after(tokenizer: PreTrainedTokenizerBase, before: str, answer: str) -> list[int]:
    """The ids of an answer after `before`, the end of its prompt, if the tokenizer puts a space
    before every text. If a token would span the two, it is encoded after another text, or alone."""
    starts = tuple[str, ...]()
    if before and _puts_a_space_before(tokenizer, len(tokenizer)):
        starts = (before, "\n", ":")
    for start in starts:
        start_ids = _encode(tokenizer, start)[0]
        ids = _encode(tokenizer, start + answer)[0]
        if ids[: len(start_ids)] == start_ids:
            return ids[len(start_ids) :]
    return _encode(tokenizer, answer)[0]


def encode_divided_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """The ids of a text after `before` (see `encode_after`), each piece between marks of `divided`
    on its own."""
    ids = list[int]()
    for piece in text.split(SPLIT):
        ids += encode_after(tokenizer, before, piece)
        before = "\n"
    return ids


@lru_cache(maxsize=16)
def _puts_a_space_before(tokenizer: PreTrainedTokenizerBase, size: int) -> bool:
    """Whether the tokenizer puts a space before every text, as those of Llama 2 do. `size`: of its
    vocabulary."""
    try:
        anchor = _encode(tokenizer, "\n")[0]
        text = _encode(tokenizer, "x")[0]
        both = _encode(tokenizer, "\nx")[0]
    except UserError:  # a vocabulary without these characters and without an unknown token
        return False
    return both[: len(anchor)] == anchor and both[len(anchor) :] != text


@lru_cache(maxsize=8)  # prompts and answers of several pairs, openings of answers
def _encode(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    spans: tuple[Span, ...] = (),
    add_special_tokens: bool = False,
) -> tuple[list[int], list[Span]]:
    """(ids of a text; ranges of tokens for `spans`, ranges of its characters in order and
    disjoint). A token on a boundary belongs to the range. `UserError` if the tokenizer rejects the
    text."""
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        what = f"a text of {len(text):,} characters is too long for the tokenizer"
        raise UserError(f"{what}, which takes {MOST_BYTES >> 20} MiB at once; split it")
    with reading("the tokenizer rejects this text"):
        # calls of `tokenizer` take as long as the encoding of a short text; a class may encode in
        # its own way
        if tokenizer.is_fast and (type(tokenizer).__call__, type(tokenizer)._encode_plus) == _FAST:
            backend = tokenizer.backend_tokenizer
            # other threads must not encode meanwhile
            if backend.truncation is not None or backend.padding is not None:
                backend.no_truncation()
                backend.no_padding()
            if not spans:
                # without offsets
                batch = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                return batch[0].ids, []
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
            return encoding.ids, token_spans(encoding.offsets, spans)
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)[
            "input_ids"
        ]
    # how many first tokens are those of the text's start?
    token_ranges = list[Span]()
    for start, stop in spans:
        ids_before_start, _ = _encode(tokenizer, text[:start])
        ids_before_stop, _ = _encode(tokenizer, text[:stop])
        first = len(commonprefix([ids_before_start, ids]))
        token_ranges.append((first, len(commonprefix([ids_before_stop, ids]))))
    return ids, token_ranges


def _encode_divided(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span]
) -> tuple[list[int], list[Span]]:
    """`_encode` of a text whose pieces between `SPLIT`s are encoded one by one, later ones after a
    line break if the tokenizer puts a space before every text, as in `encode_after`. No span
    contains a `SPLIT`."""
    ids = list[int]()
    token_ranges = list[Span]()
    begin = 0  # of the piece, in characters of the text
    for piece in text.split(SPLIT):
        end = begin + len(piece)
        starts: tuple[str, ...] = ("",)
        if begin and _puts_a_space_before(tokenizer, len(tokenizer)):
            starts = ("\n", ":", "")
        for start in starts:
            start_ids = list[int]()
            if start:
                start_ids = _encode(tokenizer, start)[0]
            shift = len(start) - begin
            inside = list[Span]()  # the piece, in characters of `start + piece`
            for first, stop in spans:
                if begin <= first and stop <= end:
                    inside.append((first + shift, stop + shift))
            piece_ids, ranges = _encode(tokenizer, start + piece, tuple(inside))
            if piece_ids[: len(start_ids)] == start_ids:
                break
        offset = len(ids) - len(start_ids)
        token_ranges += [(offset + first, offset + stop) for first, stop in ranges]
        ids += piece_ids[len(start_ids) :]
        begin = end + len(SPLIT)
    return ids, token_ranges


def _result_of(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """What a tool said, without the marks of Hermes around it if the chat template writes them."""
    begin = "<tool_response>"
    end = "</tool_response>"
    bare = content.strip()
    has_marks = bare.startswith(begin) and bare.endswith(end)
    if not has_marks or begin not in str(tokenizer.chat_template):
        return content
    return bare.removeprefix(begin).removesuffix(end).strip("\n")


def divided(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """A text from outside, such as what a tool returned, in which the texts of special tokens, and
    of added tokens that the chat template writes, are divided by `SPLIT`."""
    reserved = _reserved(tokenizer, str(tokenizer.chat_template), len(tokenizer))
    if not any(text in content for text in reserved.values()):  # which takes less than to encode it
        return content
    while True:
        ids = set[int]()
        for piece in content.split(SPLIT):
            ids.update(_encode(tokenizer, piece)[0])
        texts = [reserved[token_id] for token_id in sorted(ids & reserved.keys())]
        texts = [text for text in texts if text in content]
        if not texts:
            return content
        for text in texts:
            content = content.replace(text, text[0] + SPLIT + text[1:])


@lru_cache(maxsize=16)
def _reserved(tokenizer: PreTrainedTokenizerBase, template: str, size: int) -> dict[int, str]:
    """Id -> text of the added tokens that mean something to the chat template. Others, such as
    those of Gemma for line breaks, stay as they are. `size`: of the vocabulary."""
    texts = dict[int, str]()
    for token_id, token in added_tokens(tokenizer, size).items():
        text = str(token.content)
        if len(text) > 1 and (token.special or text in template):
            texts[token_id] = text
    return texts


def token_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Ranges of tokens for ranges of characters; `offsets` are the first and the last + 1 character
    of each token."""
    starts = [start for start, _ in offsets]
    stops = [stop for _, stop in offsets]
    return [(bisect_right(stops, start), bisect_left(starts, stop)) for start, stop in spans]


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of tokens, special ones included, with all of its spaces."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
