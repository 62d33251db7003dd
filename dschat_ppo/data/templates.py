"""Chat templates: that of a run (`--chat_template`, `--chat_template_kwargs`), chat messages as its
text, and where the answer that follows a prompt begins and ends in it (`turn_spans.py`: those
inside a prompt).

Both flags become part of the tokenizer's own template text. It is saved with the model, so later
steps, generation, the reward server and plain transformers render the same text without these
flags.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AddedToken, PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.content_marks import has_marks, in_parts
from dschat_ppo.data.examples import Message, Messages
from dschat_ppo.data.messages import (
    THOUGHTS,
    functions_of,
)
from dschat_ppo.errors import UserError, reading

FLAG = "--chat_template"
VARIABLES_FLAG = "--chat_template_kwargs"
# Variables and functions that each rendering has.
_GIVEN = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
}
# around the assistant's text in some templates
MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_JINJA = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
)
_BAKED = r"\{{%- set {} = [^\n]* %\}}\n"  # a line of `with_variables`

# name -> the token that ends a turn, "" for the tokenizer's EOS; human-assistant is the text of
# DeepSpeed-Chat's data sets, without line breaks
NAMED = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "zephyr": "", "human-assistant": ""}
_TEXTS = Path(__file__).parent / "named_templates"  # `checks.jinja` precedes each of them
Tools = list[Any]
Variables = dict[str, Any]  # of a chat template
Span = tuple[int, int]
_EXAMPLE = "An answer."  # stands for the content of an answer
_LONGEST_TAG = 64  # characters of the text with which a template opens an answer, such as `<think>`
_BESIDES_CONTENT = ("tool_calls", *THOUGHTS)  # what templates render of an answer


# The template of a run


def with_template_flags(
    tokenizer: PreTrainedTokenizerBase, flags: DataFlags
) -> PreTrainedTokenizerBase:
    """Give `tokenizer`, in place, the template of `--chat_template` with the variables of
    `--chat_template_kwargs`."""
    if flags.chat_template in NAMED:
        tokenizer.chat_template = named_template(flags.chat_template, tokenizer)
    elif flags.chat_template is not None:
        tokenizer.chat_template = template_of_file(flags.chat_template)
        logger().info(f"chat template: {flags.chat_template}")
    variables = flags.template_variables
    if variables:
        template = tokenizer.chat_template
        if not isinstance(template, str):
            has = "no chat template"
            if template:  # a dict, as of "default" and "tool_use"
                has = "several chat templates"
            raise UserError(f"{VARIABLES_FLAG}: the tokenizer has {has}; give one with {FLAG}")
        tokenizer.chat_template = with_variables(template, variables)
        logger().info(f"chat template: {flags.chat_template_kwargs} ({VARIABLES_FLAG})")
    return tokenizer


def named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The Jinja text of a named template for `tokenizer`. Turns end with the template's own token
    if the tokenizer has it, otherwise with EOS. The text starts with BOS if the tokenizer writes
    BOS before plain text."""
    end = NAMED[name]
    has_end = end in tokenizer.get_vocab()
    start_in_jinja = "''"
    if tokenizer.bos_token is not None:
        first_ids = tokenizer("a")["input_ids"][:1]
        if first_ids == [tokenizer.bos_token_id]:
            start_in_jinja = "bos_token"
    end_in_jinja = "eos_token"
    end_in_log = tokenizer.eos_token
    if has_end:
        end_in_jinja = repr(end)
        end_in_log = end
    logger().info(f"chat template: {name}; messages end with {end_in_log}")
    if end and not has_end:
        logger().warning(
            f"{FLAG} {name}: the tokenizer has no token {end}; other tokens of the template become"
            " several tokens of plain text too"
        )
    checks = _TEXTS.joinpath("checks.jinja").read_text(encoding="utf-8")
    text = _TEXTS.joinpath(f"{name}.jinja").read_text(encoding="utf-8")
    return (
        f"{{%- set start = {start_in_jinja} %}}\n"
        f"{{%- set end_of_turn = {end_in_jinja} %}}\n"
        f"{checks.replace('NAME', name)}{text}"
    )


def template_of_file(name: str) -> str:
    """The text of a Jinja file, whose syntax is checked; `rendered.py` checks what it
    renders."""
    path = Path(name)
    if not os.path.isfile(path):  # also of a name that is too long
        raise UserError(f"{FLAG} {name}: neither a file nor one of {', '.join(NAMED)}")
    with reading(f"{FLAG} {name}: cannot be used"):  # Python's parser and Jinja's limit the nesting
        text = path.read_text(encoding="utf-8-sig")
        try:
            # also finds unknown filters, which parsing does not
            _JINJA.from_string(MARKS.sub("", text))
        except jinja2.TemplateSyntaxError as problem:
            raise UserError(f"{FLAG} {name}, line {problem.lineno}: {problem.message}") from None
    return text


@lru_cache(maxsize=16)
def variables_read(template: str) -> set[str]:
    """The names of the variables that a template reads besides those of each rendering, and that
    the flag does not set."""
    with reading(f"{VARIABLES_FLAG}: the tokenizer's chat template cannot be parsed"):
        return meta.find_undeclared_variables(_JINJA.parse(MARKS.sub("", template))) - _GIVEN


def with_variables(template: str, variables: dict[str, Any]) -> str:
    """The Jinja text that sets `variables` first and otherwise renders as before. Values that an
    earlier call has set under the same names are replaced. A name that the template does not read
    is refused."""
    any_line = _BAKED.format("[A-Za-z_0-9]+")
    for name in variables:
        line = _BAKED.format(re.escape(name))
        template = re.sub(rf"\A((?:{any_line})*?){line}", r"\1", template)
    readable = variables_read(template)
    for name in variables:
        if name not in readable:
            known = ", ".join(sorted(readable)) or "none"
            raise UserError(
                f"{VARIABLES_FLAG}: the chat template reads no variable '{name}' of yours; it reads"
                f" {known}"
            )
    # Python writes values as Jinja reads them, on one line. In transformers' Jinja the line break
    # after a block is no output, and what follows starts a line, as before.
    lines = [f"{{%- set {name} = {value!r} %}}\n" for name, value in variables.items()]
    return "".join(lines) + template


# Messages as text


@dataclass(frozen=True)
class TurnEnd:
    """The text that a chat template renders after an answer: `kept + dropped`. If the template has
    no end-of-turn token, `kept` is empty and `token_id` is the tokenizer's EOS."""

    kept: str  # ends with the end-of-turn token, and belongs to the answer
    # before which generation stops, such as the line break after ChatML's `<|im_end|>`
    dropped: str
    token_id: int  # of the end-of-turn token
    # in place of `kept` where another message follows, up to and including its first added token:
    # `<|end|>` for gpt-oss, the next turn's `<|user|>` for GLM; "" if that is `kept` too
    earlier: str = ""
    lead: str = ""  # before the content of an earlier answer, such as a space or a channel's name
    called: str = ""  # as `earlier`, after a call whose result follows: `<|observation|>` for GLM


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd:
    """The end of the assistant's turn in the tokenizer's chat template, found by rendering an
    example. The end-of-turn token is the first special token after the answer, or else the first
    other added token."""
    return _turn_end(tokenizer, str(tokenizer.chat_template), int(tokenizer.eos_token_id))


@lru_cache(maxsize=16)
def _turn_end(tokenizer: PreTrainedTokenizerBase, template: str, eos_id: int) -> TurnEnd:
    """Cached: every answer needs it. `template` and `eos_id` are arguments because a tokenizer can
    change, and the result depends on both."""
    closing = ""  # what the template renders after the last answer
    opening = ""  # the question, and what precedes the answer to it
    before = ""  # what precedes an earlier answer
    between = ""  # what follows it, with a second question
    question: Message = {"role": "user", "content": "A question."}
    talk: Messages = [question, {"role": "assistant", "content": _EXAMPLE}]
    # no template, or it rejects the example; it may still accept the rows
    with suppress(UserError):
        closing = render(tokenizer, talk, open_answer=False).partition(_EXAMPLE)[2]
        opening = render(tokenizer, [question], open_answer=True)
        asked_again = render(tokenizer, [*talk, question], open_answer=True)
        before, _, between = asked_again.partition(_EXAMPLE)
    tokens = [token for token in _added_tokens(tokenizer) if token.text in closing]
    kept_text = ""
    dropped_text = closing
    token_id = eos_id
    if tokens:
        # special ones first, of these the first in the text, of these the longest
        end = min(
            tokens,
            key=lambda token: (
                not token.is_special,
                closing.index(token.text),
                -len(token.text),
            ),
        )
        before_end, _, dropped_text = closing.partition(end.text)
        kept_text = before_end + end.text
        token_id = end.token_id
    earlier = ""
    if not (kept_text and between.startswith(kept_text)):
        earlier = first_token(tokenizer, between)
    lead = ""
    if before.startswith(opening):
        lead = before[len(opening) :]
    called = ""
    if not kept_text:
        called = _end_of_call(tokenizer, question)
    return TurnEnd(kept_text, dropped_text, token_id, earlier, lead, called)


def first_token(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The start of a text up to and including the added token that begins it, perhaps after white
    space; "" if none does."""
    bare = text.lstrip()
    tokens = [token.text for token in _added_tokens(tokenizer) if bare.startswith(token.text)]
    longest = max(tokens, key=len, default="")
    if longest:
        return text[: len(text) - len(bare) + len(longest)]
    return ""


def _end_of_call(tokenizer: PreTrainedTokenizerBase, question: Message) -> str:
    """What follows a call of a tool up to and including the token that begins the result."""
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
    talk: Messages = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": _EXAMPLE}
    with suppress(UserError):
        up_to_call = render(tokenizer, talk, open_answer=False)
        with_result = render(tokenizer, [*talk, result], open_answer=True)
        result_turn = with_result.removeprefix(up_to_call)
        if with_result.startswith(up_to_call) and _EXAMPLE in result_turn:
            return first_token(tokenizer, result_turn)
    return ""


@lru_cache(maxsize=16)
def added_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[int, AddedToken]:
    """id -> added token. Cached: a tokenizer with thousands of them takes 20 ms. `size`: of its
    vocabulary."""
    return dict(tokenizer.added_tokens_decoder)


class _TemplateToken(NamedTuple):
    """An added token, or EOS."""

    text: str
    token_id: int
    is_special: bool


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[_TemplateToken]:
    """Each added token and EOS, without those of spaces alone."""
    tokens = list[_TemplateToken]()
    for token_id, token in added_tokens(tokenizer, len(tokenizer)).items():
        tokens.append(_TemplateToken(token.content, token_id, token.special))
    tokens.append(_TemplateToken(str(tokenizer.eos_token), int(tokenizer.eos_token_id), True))
    return [token for token in tokens if token.text.strip()]


def _id_of(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """The id of the added token with this text."""
    return next(token.token_id for token in _added_tokens(tokenizer) if token.text == text)


def answer_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the tokens that end an answer: EOS, and the chat template's end-of-turn token if it
    differs, and the one that ends a call if the result's turn begins with it."""
    return tuple(
        _answer_ends(tokenizer, str(tokenizer.chat_template), int(tokenizer.eos_token_id)).values()
    )


@lru_cache(maxsize=16)
def _answer_ends(tokenizer: PreTrainedTokenizerBase, template: str, eos_id: int) -> dict[str, int]:
    """Text -> id of the tokens that end an answer, EOS first; cached as `_turn_end`."""
    end = _turn_end(tokenizer, template, eos_id)
    token_ids = [eos_id, end.token_id]
    if end.called:
        token_ids.append(_id_of(tokenizer, end.called.lstrip()))
    return {str(tokenizer.convert_ids_to_tokens(token_id)): token_id for token_id in token_ids}


def without_final(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[str, int | None]:
    """(a text without the tokens at its end that end answers, and without white space around them;
    the id of the first of these tokens)."""
    ends = _answer_ends(tokenizer, str(tokenizer.chat_template), int(tokenizer.eos_token_id))
    first_id = None
    token = next(filter(text.rstrip().endswith, ends), None)
    while token is not None:
        text = text.rstrip().removesuffix(token)
        first_id = ends[token]
        token = next(filter(text.rstrip().endswith, ends), None)
    return text, first_id


def text_answer(tokenizer: PreTrainedTokenizerBase, answer: str | Message) -> tuple[str, int]:
    """(text of an answer to a text prompt, id of its final token). A text that is rendered already
    ends with the end-of-turn token; that one is its final token, and white space after it is
    dropped. Tool calls are refused."""
    if isinstance(answer, dict):
        if answer.get("tool_calls"):
            raise UserError(
                "the answer has tool calls, which need chat messages as the prompt, but the prompt"
                " is text"
            )
        answer = str(answer.get("content") or "")
    bare, final_id = without_final(tokenizer, answer)
    if final_id is None:
        final_id = int(tokenizer.eos_token_id)
    return bare, final_id


def render_answer(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    opening: str,
    answer: str | Message,
    tools: Tools | None,
    variables: Variables | None = None,
) -> tuple[str, int]:
    """(the assistant's turn as the template renders it after `opening`, which is `render` of
    `prompt`; id of the token that ends the answer). The text ends with that token, unless the
    template writes none."""
    end = turn_end(tokenizer)
    message: Message = {"role": "assistant", "content": answer}
    if isinstance(answer, dict):
        message = answer
    content, _ = without_final(tokenizer, message.get("content") or "")
    message = {**message, "content": content}
    conversation = render(tokenizer, [*prompt, message], False, tools, variables)
    is_opened = conversation.startswith(opening)
    is_ended = is_opened and conversation.endswith(end.kept + end.dropped)
    turn = conversation[len(opening) :]
    if is_ended:
        turn = conversation[len(opening) : len(conversation) - len(end.dropped)]
    if not any(message.get(key) for key in _BESIDES_CONTENT):
        unopened = _without_opening(content, opening)
        if is_ended and "".join(unopened.split()) in "".join(turn.split()):
            return turn, end.token_id
        # The template renders the opening in two ways, or drops a part of an answer (the thinking,
        # as a rule).
        return unopened + end.kept, end.token_id
    if not is_opened:
        raise UserError(
            "the chat template renders the prompt differently before this answer, so its tool calls"
            " or reasoning cannot be told from the prompt; give the answer as text, or take another"
            " template (--chat_template)"
        )
    if end.called and message.get("tool_calls"):
        return turn + end.called, _id_of(tokenizer, end.called.lstrip())
    if is_ended:
        return turn, end.token_id
    # some templates end tool calls with another token
    ends = list[tuple[int, int]]()  # where the last one of each token ends in the turn, and its id
    for token in _added_tokens(tokenizer):
        if token.text in turn:
            ends.append((turn.rfind(token.text) + len(token.text), token.token_id))
    last, token_id = max(ends, default=(len(turn), end.token_id))
    return turn[:last], token_id


def _without_opening(content: str, opening: str) -> str:
    """`content` without its start if `opening` ends with that: templates that open an answer with
    `<think>` do not render it again, but answers of a data set begin with it."""
    tail = opening[-_LONGEST_TAG:]
    for start in range(len(tail)):
        for text in (tail[start:], tail.rstrip()[start:]):
            if len(text.strip()) > 2 and content.startswith(text):
                return content.removeprefix(text)
    return content


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    open_answer: bool,
    tools: Tools | None = None,
    variables: Variables | None = None,
) -> str:
    """Messages as text by the tokenizer's chat template, with or without the opening of the
    assistant's turn. `variables`: of a row, for the template; those of the flag go first."""
    if tokenizer.chat_template is None:
        raise UserError(
            "the data holds chat messages, but the model's tokenizer has no chat template; give"
            " prompts as text, name a template with --chat_template, or save a"
            " `chat_template.jinja` in the folder of the tokenizer"
        )
    settings: dict[str, Any] = {
        **(variables or {}),
        "tools": tools or None,
        "tokenize": False,
        "add_generation_prompt": open_answer,
    }
    messages = _with_parts(tokenizer, messages)
    has_calls = any("tool_calls" in message for message in messages)
    with suppress(UserError):
        text = _apply_template(tokenizer, messages, settings)
        if not has_calls or not _writes_python(messages, text):
            return text
    # Such templates, and those that join arguments with texts, expect JSON text.
    messages_with_json = deepcopy(messages)
    for function in functions_of(messages_with_json):
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return _apply_template(tokenizer, messages_with_json, settings)


def _with_parts(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> Messages:
    """Messages with lists of parts in place of texts that have marks, or of all texts if the
    template takes nothing else."""
    takes_parts = takes_parts_alone(tokenizer, str(tokenizer.chat_template))
    changed = Messages()
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and (takes_parts or has_marks(content)):
            message = {**message, "content": in_parts(content)}
        changed.append(message)
    return changed


@lru_cache(maxsize=16)
def takes_parts_alone(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a template renders nothing of a text, but a list of parts, as that of SmolVLM."""
    if "content" not in template or "'text'" not in template.replace('"', "'"):
        return False
    settings = {"tools": None, "tokenize": False, "add_generation_prompt": False}
    message: Message = {"role": "user", "content": _EXAMPLE}
    message_of_parts: Message = {"role": "user", "content": in_parts(_EXAMPLE)}
    with suppress(UserError):
        if _EXAMPLE in _apply_template(tokenizer, [message], settings):
            return False
    with suppress(UserError):
        return _EXAMPLE in _apply_template(tokenizer, [message_of_parts], settings)
    return False


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, settings: dict[str, Any]
) -> str:
    with reading("the chat template rejects these messages"):
        return str(tokenizer.apply_chat_template(messages, **settings))


def _writes_python(messages: Messages, text: str) -> bool:
    """Whether the text of messages holds the arguments of a call as a dictionary of Python."""
    for function in functions_of(messages):
        arguments = function.get("arguments")
        if isinstance(arguments, dict) and arguments and str(arguments) in text:
            return True
    return False
