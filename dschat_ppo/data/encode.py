"""Texts to token ids, in one way for all steps.

A text prompt is encoded unchanged, and an answer to it ends with EOS. Chat messages are rendered by
the chat template (`templates.py`), and an answer to them ends with the template's end-of-turn
token. Prompt and answer are separate lists, because in step 3 the prompt ends there.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from os.path import commonprefix

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dschat_ppo.data.examples import SAID_BY_TOOLS, Example
from dschat_ppo.data.rendered import check_calls, check_prompt, known_variables, remarks_on
from dschat_ppo.data.templates import (
    Messages,
    Span,
    Tools,
    added_tokens,
    render,
    render_answer,
    text_answer,
    turn_end,
    without_final,
)
from dschat_ppo.data.turn_spans import turn_spans
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
    the chat template has one."""

    prompt: list[int]
    answers: list[list[int]]
    prompt_spans: list[Span]
    remarks: tuple[str, ...] = ()  # what the owner of the data should know


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
    end = str(tokenizer.convert_ids_to_tokens(turn_end(tokenizer).token))
    found = encode_example(
        tokenizer, Example(without_final(tokenizer, text)[0], [end if end in text else ""])
    )
    return [*found.prompt, *found.answers[0]]


def encode_example(
    tokenizer: PreTrainedTokenizerBase, example: Example, all_turns: bool = False
) -> EncodedExample:
    """The ids of one example, in lists that others may share; `UserError`, without the row's name,
    if it cannot be encoded. With `all_turns` the earlier answers in a prompt of chat messages are
    found too."""
    prompt, spans = example.prompt, list[Span]()  # spans: characters of the prompt
    if isinstance(prompt, str):
        text = prompt
        is_bare = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        answers = [text_answer(tokenizer, answer) for answer in example.answers]
    else:
        prompt = [
            (
                {
                    **message,
                    "content": divided(tokenizer, _result_of(tokenizer, message["content"])),
                }
                if message["role"] in SAID_BY_TOOLS
                else message
            )
            for message in prompt
        ]
        tools = example.tools
        variables = known_variables(tokenizer, example.variables, tools)
        text = render(tokenizer, prompt, True, tools, variables)
        is_bare = True
        check_prompt(tokenizer, text, prompt, tools, variables)
        if all_turns:
            said = [
                number for number, message in enumerate(prompt) if message["role"] == "assistant"
            ]
            found = zip(said, turn_spans(tokenizer, prompt, text, tools, variables), strict=True)
            spans = [span for turn, span in found if turn not in example.context]
        answers = [
            render_answer(tokenizer, prompt, text, answer, tools, variables)
            for answer in example.answers
        ]
        for message in example.answers:
            if isinstance(message, dict):
                check_calls(tokenizer, prompt, message, tools, variables)
    if prompt == example.prompt:
        ids, prompt_spans = _encode(tokenizer, text, tuple(spans), not is_bare)
    else:
        ids, prompt_spans = _encode_divided(tokenizer, text, spans)
    if not is_bare and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]  # some tokenizers append EOS to every text
    # of a plain text, which may bring its own
    is_bos = len(ids) == 1 and ids[0] == tokenizer.bos_token_id
    encoded = []
    for answer, final in answers:
        whole = encode_after(tokenizer, text[-_TAIL:], answer)
        if is_bos and whole[:1] == ids:
            whole = whole[1:]
        encoded.append(whole if whole[-1:] == [final] else [*whole, final])
    turns = [turn for turn, _ in answers]
    remarks = remarks_on(tokenizer, example, text, turns, all_turns)
    return EncodedExample(ids, encoded, prompt_spans, remarks)


def encode_after(tokenizer: PreTrainedTokenizerBase, before: str, answer: str) -> list[int]:
    """The ids of an answer after `before`, the end of its prompt, if the tokenizer puts a space
    before every text. If a token would span the two, it is encoded after another text, or alone."""
    for start in (
        (before, "\n", ":") if before and _puts_a_space_before(tokenizer, len(tokenizer)) else ()
    ):
        first = _encode(tokenizer, start)[0]
        whole = _encode(tokenizer, start + answer)[0]
        if whole[: len(first)] == first:
            return whole[len(first) :]
    return _encode(tokenizer, answer)[0]


@lru_cache(maxsize=16)
def _puts_a_space_before(tokenizer: PreTrainedTokenizerBase, size: int) -> bool:
    """Whether the tokenizer puts a space before every text, as those of Llama 2 do. `size`: of its
    vocabulary."""
    try:
        anchor, text, both = (_encode(tokenizer, part)[0] for part in ("\n", "x", "\nx"))
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
                [found] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                return found.ids, []
            found = backend.encode(text, add_special_tokens=add_special_tokens)
            return found.ids, token_spans(found.offsets, spans)
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)[
            "input_ids"
        ]
    # how many first tokens are those of the text's start?
    ends = [
        len(commonprefix([_encode(tokenizer, text[:end])[0], ids]))
        for span in spans
        for end in span
    ]
    return ids, list(zip(ends[::2], ends[1::2], strict=True))


def _encode_divided(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span]
) -> tuple[list[int], list[Span]]:
    """`_encode` of a text whose parts between `SPLIT`s are encoded one by one, later ones as by
    `encode_after` after a line break. No span contains a `SPLIT`."""
    ids = list[int]()
    found = list[Span]()
    place = 0
    for part in text.split(SPLIT):
        for start in (
            ("\n", ":", "") if place and _puts_a_space_before(tokenizer, len(tokenizer)) else ("",)
        ):
            first = _encode(tokenizer, start)[0] if start else []
            shift = len(start) - place
            inside = tuple(
                (a + shift, b + shift) for a, b in spans if place <= a and b <= place + len(part)
            )
            more, ranges = _encode(tokenizer, start + part, inside)
            if more[: len(first)] == first:
                break
        found += [(len(ids) + a - len(first), len(ids) + b - len(first)) for a, b in ranges]
        ids += more[len(first) :]
        place += len(part) + len(SPLIT)
    return ids, found


def _result_of(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """What a tool said, without the marks of Hermes around it if the chat template writes them."""
    begin, end = "<tool_response>", "</tool_response>"
    bare = content.strip()
    has_marks = bare.startswith(begin) and bare.endswith(end)
    if not has_marks or begin not in str(tokenizer.chat_template):
        return content
    return bare.removeprefix(begin).removesuffix(end).strip("\n")


def divided(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """A text from outside, such as what a tool returned, in which the texts of special tokens, and
    of added tokens that the chat template writes, are divided by `SPLIT`."""
    reserved = _reserved(tokenizer, str(tokenizer.chat_template), len(tokenizer))
    while True:
        ids = {number for part in content.split(SPLIT) for number in _encode(tokenizer, part)[0]}
        texts = [
            reserved[number]
            for number in sorted(ids & reserved.keys())
            if reserved[number] in content
        ]
        if not texts:
            return content
        for text in texts:
            content = content.replace(text, text[0] + SPLIT + text[1:])


@lru_cache(maxsize=16)
def _reserved(tokenizer: PreTrainedTokenizerBase, template: str, size: int) -> dict[int, str]:
    """Id -> text of the added tokens that mean something to the chat template. Others, such as
    those of Gemma for line breaks, stay as they are. `size`: of the vocabulary."""
    added = added_tokens(tokenizer, size).items()
    return {
        n: str(t.content)
        for n, t in added
        if len(t.content) > 1 and (t.special or t.content in template)
    }


def token_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Ranges of tokens for ranges of characters; `offsets` are the first and the last + 1 character
    of each token."""
    starts, stops = ([offset[side] for offset in offsets] for side in (0, 1))
    return [(bisect_right(stops, start), bisect_left(starts, stop)) for start, stop in spans]


def joined_steps(example: Example, separator: str) -> Example:
    """The example with one answer: its steps with `separator` between them, which is removed from
    their ends. `UserError` if there are no steps or labels, or a step is empty or contains the
    separator."""
    steps = list[str]()
    ends = re.escape(separator)
    for number, step in enumerate(example.answers, start=1):
        assert isinstance(step, str)
        # a run inside is tried once
        step = re.sub(rf"\A(?:{ends})+|(?<!{ends})(?:{ends})+\Z", "", step)
        if not step.strip():
            raise UserError(f"step {number} is empty")
        if separator in step:
            raise UserError(
                f"step {number} contains the separator {separator!r}; choose another"
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
    place = 0
    spaces = len(separator) - (len(separator.rstrip(" ")) or len(separator))
    *steps, rest = text.split(separator)
    for step in steps:
        place += len(step) + len(separator)
        if step.strip():
            # Texts are compared, not lengths: the bytes of half a character decode to one or
            # several characters.
            start = text[: place - spaces]
            lasts = range(len(ids) - 1)
            ends.append(
                bisect_left(
                    lasts, True, key=lambda n: decoded(tokenizer, ids[: n + 1]).startswith(start)
                )
            )
    if ids[-1] in added_tokens(tokenizer, len(tokenizer)) or ids[-1] in tokenizer.all_special_ids:
        rest = rest.removesuffix(decoded(tokenizer, ids[-1:]))
    if ends and not rest.strip():  # the final token alone is no step
        ends.pop()
    return sorted({*ends, len(ids) - 1})


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of tokens, special ones included, with all of its spaces."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


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
    kept = [(end, label) for end, label in zip(ends, labels, strict=True) if label == label]
    return [end for end, _ in kept], [label for _, label in kept]
