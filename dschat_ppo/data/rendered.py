"""Examples as text: what the chat template renders of them, checks that it leaves nothing out, and
remarks on what it makes of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.content_marks import stands_in
from dschat_ppo.data.examples import VARIABLES_COLUMN, Example, Message, Messages
from dschat_ppo.data.messages import (
    CONTEXT,
    SAID_BY_TOOLS,
    THOUGHTS,
    functions_of,
    names_thoughts,
    without_context,
)
from dschat_ppo.data.replies import opens_thought, read_reply
from dschat_ppo.data.templates import (
    Span,
    Tools,
    Variables,
    render,
    render_answer,
    text_answer,
    variables_read,
)
from dschat_ppo.data.turn_spans import turn_spans
from dschat_ppo.errors import UserError

# in the formats of Hermes, Mistral and Llama 3
_CALL = re.compile(
    r"(?:<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)(.*?)(?:</tool_call>|\Z)", re.DOTALL
)
_PYTHON = re.compile(r"[\s\[]*\{\s*'")
_MARK = "_7f3a{}x"  # after the name of a tool or of a call, which then stands nowhere else
_THOUGHT = "PROBE7f3a"
_LOST_THOUGHTS = (
    "the chat template leaves out the thoughts in '{}', so the answers are trained without them;"
    " take a template that renders them (--chat_template), or let --data_format FILE.py:FUNCTION"
    " put them into the content, as <think>...</think>"
)
_OPEN_THOUGHT = (
    "the chat template opens an answer with the mark of a thought that the answers do not close,"
    " so they are trained as thoughts; take a template that closes it (--chat_template), set its"
    " variable if it has one (--chat_template_kwargs '{\"enable_thinking\": false}'), or give the"
    " answers their thoughts, as <think>...</think>"
)
_PYTHON_CALL = (
    "calls of tools are written as Python ({'name': ...}), not as JSON, so the model learns calls"
    " that step 3 and other programs cannot read; let --data_format FILE.py:FUNCTION write them as"
    " JSON"
)


class Piece(NamedTuple):
    """A piece of an answer as text: what the assistant says, or what is not trained."""

    text: str
    is_trained: bool = True


class RenderedAnswer(NamedTuple):
    """The text of an answer in pieces, and the id of the token that ends it."""

    pieces: tuple[Piece, ...]
    final_id: int


@dataclass(frozen=True)
class RenderedExample:
    """An example as text."""

    prompt: str
    has_bos: bool  # the prompt begins with BOS where one is needed, so that the tokenizer adds none
    answers: Sequence[RenderedAnswer]
    spans: Sequence[Span] = ()  # characters of the prompt that are earlier answers, to be trained
    remarks: tuple[str, ...] = ()  # what the owner of the data should know


def render_example(
    tokenizer: PreTrainedTokenizerBase, example: Example, all_turns: bool
) -> RenderedExample:
    """An example as text. A prompt that is text is used as it is; chat messages are rendered by the
    template. `UserError` if that leaves out what it is given."""
    prompt = example.prompt
    if isinstance(prompt, str):
        return _as_it_is(tokenizer, prompt, example, all_turns)
    tools = example.tools
    variables = known_variables(tokenizer, example.variables, tools)
    text = render(tokenizer, prompt, True, tools, variables)
    check_prompt(tokenizer, text, prompt, tools, variables)
    spans = list[Span]()
    if all_turns:
        earlier = [index for index, message in enumerate(prompt) if message["role"] == "assistant"]
        earlier_spans = turn_spans(tokenizer, prompt, text, tools, variables)
        for index, span in zip(earlier, earlier_spans, strict=True):
            if index not in example.context:
                spans.append(span)
    answers = list[RenderedAnswer]()
    for answer in example.answers:
        if isinstance(answer, list):
            answers.append(_rendered_turns(tokenizer, prompt, text, answer, tools, variables))
            continue
        turn_text, final_id = render_answer(tokenizer, prompt, text, answer, tools, variables)
        answers.append(RenderedAnswer((Piece(turn_text),), final_id))
        if isinstance(answer, dict):
            check_calls(tokenizer, prompt, answer, tools, variables)
    remarks = _remarks_on(tokenizer, example, text, answers, all_turns)
    return RenderedExample(text, True, answers, spans, remarks)


def _as_it_is(
    tokenizer: PreTrainedTokenizerBase, prompt: str, example: Example, all_turns: bool
) -> RenderedExample:
    """An example whose prompt is text."""
    has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
    answers = list[RenderedAnswer]()
    for answer in example.answers:
        assert not isinstance(answer, list)  # which follows chat messages alone
        text, final_id = text_answer(tokenizer, answer)
        answers.append(RenderedAnswer((Piece(text),), final_id))
    remarks = _remarks_on(tokenizer, example, prompt, answers, all_turns)
    return RenderedExample(prompt, has_bos, answers, remarks=remarks)


def _rendered_turns(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    opening: str,
    answer: Messages,
    tools: Tools | None,
    variables: Variables,
) -> RenderedAnswer:
    """An answer of several messages, of which the first and the last one are the assistant's, after
    `opening`, which is `render` of `prompt`."""
    *earlier, last = answer
    messages = [*prompt, *without_context(earlier)]
    text = render(tokenizer, messages, True, tools, variables)
    check_prompt(tokenizer, text, messages, tools, variables)
    try:
        spans = turn_spans(tokenizer, messages, text, tools, variables)
    except UserError:
        raise UserError(
            "the answers of the assistant after which chosen and rejected part cannot be found for"
            " certain in what the chat template renders; mark them with {% generation %} in a"
            " --chat_template"
        ) from None
    earlier_answers = [message for message in earlier if message["role"] == "assistant"]
    earlier_spans = spans[-len(earlier_answers) :]
    pieces = list[Piece]()
    last_end = None
    for earlier_answer, (start, end) in zip(earlier_answers, earlier_spans, strict=True):
        if last_end is not None:  # what others say between two answers
            pieces.append(Piece(text[last_end:start], is_trained=False))
        elif text.startswith(opening):  # with what the template opens an answer with
            start = len(opening)
        pieces.append(Piece(text[start:end], is_trained=CONTEXT not in earlier_answer))
        last_end = end
    pieces.append(Piece(text[last_end:], is_trained=False))
    final_turn, final_id = render_answer(tokenizer, messages, text, last, tools, variables)
    pieces.append(Piece(final_turn))
    check_calls(tokenizer, messages, last, tools, variables)
    return RenderedAnswer(tuple(pieces), final_id)


# Checks


def check_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    messages: Messages,
    tools: Tools | None,
    variables: Variables | None = None,
) -> None:
    """Check that `text`, which the template renders of `messages`, holds the questions, the results
    of tools, the tools and their calls. Earlier answers are not checked: templates drop their
    thinking."""
    for message in messages:
        words = (message.get("content") or "").strip()
        is_needed = message["role"] in ("system", "user", *SAID_BY_TOOLS)
        if is_needed and not stands_in(words, text) and _quoted(words) not in text:
            _refuse_left_out(f"the {message['role']} message {words[:60]!r}")
    if tools or any("tool_calls" in message for message in messages):
        _check_tools(tokenizer, messages, tools, variables, open_answer=True)


def check_calls(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    answer: Message,
    tools: Tools | None,
    variables: Variables | None = None,
) -> None:
    """Check that the template writes the calls of an answer to `prompt`."""
    if answer.get("tool_calls"):
        _check_tools(tokenizer, [*prompt, answer], tools, variables, open_answer=False)


def _check_tools(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools | None,
    variables: Variables | None,
    open_answer: bool,
) -> None:
    """Check that the template writes each tool and each call: their names are marked, because the
    plain ones may stand in other texts too."""
    marked_messages = deepcopy(messages)
    marked_tools = deepcopy(tools)
    groups = (
        ("the tool call", functions_of(marked_messages)),
        ("the tool", functions_of([{"tool_calls": marked_tools}])),
    )
    needed = list[tuple[str, str, str]]()
    for what, functions in groups:
        for function in functions:
            name = function.get("name")
            if isinstance(name, str):
                mark = _MARK.format(len(needed))
                function["name"] = name + mark
                needed.append((what, name, mark))
    if needed:
        text = render(tokenizer, marked_messages, open_answer, marked_tools, variables)
        for what, name, mark in needed:
            if mark not in text:
                _refuse_left_out(f"{what} {name!r}")


def _quoted(words: str) -> str:
    """The text as it stands inside JSON."""
    return json.dumps(words, ensure_ascii=False)[1:-1]


def _refuse_left_out(what: str) -> Any:
    raise UserError(
        f"the chat template leaves out {what}; take a template that renders it (--chat_template),"
        " or remove it from the data"
    )


# Variables of rows


def known_variables(
    tokenizer: PreTrainedTokenizerBase, variables: Variables | None, tools: Tools | None
) -> Variables:
    """Those of the variables of a row that the chat template reads."""
    if not variables or tokenizer.chat_template is None:
        return {}
    readable = variables_read(tokenizer.get_chat_template(None, tools))
    return {name: value for name, value in variables.items() if name in readable}


def check_variables(tokenizer: PreTrainedTokenizerBase, example: Example) -> None:
    """Check that the chat template reads the variables of an example that hold content, or that the
    flag sets them. Switches, such as `enable_thinking`, may belong to other templates."""
    if not example.variables or isinstance(example.prompt, str):
        return
    known = known_variables(tokenizer, example.variables, example.tools)
    template = tokenizer.get_chat_template(None, example.tools)
    for name, value in example.variables.items():
        is_content = not isinstance(value, bool) and value not in (None, "", [], {})
        if is_content and name not in known and f"{{%- set {name} = " not in template:
            raise UserError(
                f"the chat template reads no variable '{name}' of '{VARIABLES_COLUMN}',"
                f" {str(value)[:60]!r}; take one that does (--chat_template), or leave out the"
                f" column (--ignore_columns {VARIABLES_COLUMN})"
            )


# Remarks


def _remarks_on(
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    text: str,
    rendered_answers: Sequence[RenderedAnswer],
    all_turns: bool,
) -> tuple[str, ...]:
    """What the owner of an example should know of it, in words that are alike for all examples.

    Args:
        tokenizer: Its chat template has rendered the example.
        example: The example.
        text: Its prompt as the template renders it.
        rendered_answers: Its answers.
        all_turns: Whether earlier answers are trained too.
    """
    remarks = list[str]()
    trained_texts = list[str]()
    first_texts = [rendered.pieces[0].text for rendered in rendered_answers]
    for answer, first_text in zip(example.answers, first_texts, strict=True):
        if isinstance(answer, str):
            trained_texts.append(answer)
        if isinstance(answer, dict):
            trained_texts.append(str(answer.get("content") or ""))
            letters = "".join(first_text.split())
            lost_keys = [
                key for key in _thought_keys(answer) if _thought(answer, key) not in letters
            ]
            remarks += [_LOST_THOUGHTS.format(key) for key in lost_keys]
    if all_turns and not isinstance(example.prompt, str):
        template = str(tokenizer.chat_template)
        for message in example.prompt:
            if message["role"] != "assistant":
                continue
            trained_texts.append(str(message.get("content") or ""))
            for key in _thought_keys(message):
                if _thought(message, key) and not _writes_thoughts(tokenizer, template, key):
                    remarks.append(_LOST_THOUGHTS.format(key))
    if opens_thought(text) and any(not read_reply(each, True).outside for each in first_texts):
        remarks.append(_OPEN_THOUGHT)
    calls = [call for content in trained_texts for call in _CALL.findall(content)]
    if any(map(_is_python, calls)):
        remarks.append(_PYTHON_CALL)
    return tuple(dict.fromkeys(remarks))


def _thought_keys(message: Message) -> list[str]:
    """The keys of a message under which thoughts are, by their names."""
    return [key for key in message if key in THOUGHTS or names_thoughts(key)]


def _thought(message: Message, key: str) -> str:
    """The thoughts of a message under this key, without white space."""
    thought = message.get(key)
    if isinstance(thought, str):
        return "".join(thought.split())
    return ""


@lru_cache(maxsize=16)
def _writes_thoughts(tokenizer: PreTrainedTokenizerBase, template: str, key: str) -> bool:
    """Whether the template renders what the last answer has under `key`; it may drop that of
    earlier ones. Cached; `template` is an argument because a tokenizer can change."""
    answer = {"role": "assistant", "content": "An answer.", key: _THOUGHT}
    talk = [{"role": "user", "content": "A question."}, answer]
    return _THOUGHT in render(tokenizer, talk, open_answer=False)


def _is_python(call: str) -> bool:
    """Whether the text of a call of a tool is a dictionary of Python, not JSON."""
    try:
        json.loads(call)
    except (ValueError, RecursionError):
        return _PYTHON.match(call) is not None
    return False
