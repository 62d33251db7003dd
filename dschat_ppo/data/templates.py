"""Chat templates: that of a run (`--chat_template`, `--chat_template_kwargs`), chat messages as its
text, and where the answer that follows a prompt begins and ends in it (`turn_spans.py`: those
inside a prompt).

Both flags become part of the tokenizer's own template text. It is saved with the model, so later
steps, generation, the reward server and plain transformers render the same text without these
flags.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AddedToken, PreTrainedTokenizerBase

from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.examples import THOUGHTS, Message, Messages, functions_of
from dschat_ppo.errors import UserError, reading

FLAG, VARIABLES_FLAG = "--chat_template", "--chat_template_kwargs"
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
    found = tokenizer.chat_template
    if variables:
        if not isinstance(found, str):  # some have several, such as "default" and "tool_use"
            number = "several chat templates" if found else "no chat template"
            raise UserError(f"{VARIABLES_FLAG}: the tokenizer has {number}; give one with {FLAG}")
        tokenizer.chat_template = with_variables(found, variables)
        logger().info(f"chat template: {flags.chat_template_kwargs} ({VARIABLES_FLAG})")
    return tokenizer


def named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The Jinja text of a named template for `tokenizer`. Turns end with the template's own token
    if the tokenizer has it, otherwise with EOS. The text starts with BOS if the tokenizer writes
    BOS before plain text."""
    end = NAMED[name]
    has_end = end in tokenizer.get_vocab()
    begins = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [
        tokenizer.bos_token_id
    ]
    head = f"{{%- set start = {'bos_token' if begins else repr('')} %}}\n"
    head += f"{{%- set end_of_turn = {repr(end) if has_end else 'eos_token'} %}}\n"
    logger().info(
        f"chat template: {name}; turns end with {end if has_end else tokenizer.eos_token}"
    )
    if end and not has_end:
        note = (
            f"the tokenizer has no token {end}; other tokens of the template become several tokens"
            " of plain text too"
        )
        logger().warning(f"{FLAG} {name}: {note}")
    checks = _TEXTS.joinpath("checks.jinja").read_text(encoding="utf-8")
    text = _TEXTS.joinpath(f"{name}.jinja").read_text(encoding="utf-8")
    return head + checks.replace("NAME", name) + text


def template_of_file(name: str) -> str:
    """The text of a Jinja file, whose syntax is checked; `rendered.py` checks what it
    renders."""
    path = Path(name)
    if not path.is_file():
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
    for name in variables:
        others = _BAKED.format("[A-Za-z_0-9]+")
        template = re.sub(rf"\A((?:{others})*?){_BAKED.format(re.escape(name))}", r"\1", template)
    readable = variables_read(template)
    for name in variables:
        if name not in readable:
            if readable:
                known = f"it reads {', '.join(sorted(readable))}"
            else:
                known = "it reads none"
            raise UserError(
                f"{VARIABLES_FLAG}: the chat template reads no variable '{name}' of yours; {known}"
            )
    # Python writes values as Jinja reads them, on one line. In transformers' Jinja the line break
    # after a block is no output, and what follows starts a line, as before.
    return (
        "".join(f"{{%- set {name} = {value!r} %}}\n" for name, value in variables.items())
        + template
    )


# Messages as text


@dataclass(frozen=True)
class TurnEnd:
    """The text that a chat template renders after an answer: `kept + dropped`. If the template has
    no end-of-turn token, `kept` is empty and `token` is the tokenizer's EOS."""

    kept: str  # ends with the end-of-turn token, and belongs to the answer
    # before which generation stops, such as the line break after ChatML's `<|im_end|>`
    dropped: str
    token: int  # id of the end-of-turn token
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
    closing = opening = before = between = earlier = ""
    ask: Message = {"role": "user", "content": "A question."}
    talk: Messages = [ask, {"role": "assistant", "content": _EXAMPLE}]
    # no template, or it rejects the example; it may still accept the rows
    with suppress(UserError):
        closing = render(tokenizer, talk, open_answer=False).partition(_EXAMPLE)[2]
        opening = render(tokenizer, [ask], open_answer=True)
        before, _, between = render(tokenizer, [*talk, ask], open_answer=True).partition(_EXAMPLE)
    added = [entry for entry in _added_tokens(tokenizer) if entry[0] in closing]
    token, number, _ = min(
        added, key=lambda a: (not a[2], closing.index(a[0]), -len(a[0])), default=("", eos_id, True)
    )
    kept, _, dropped = closing.partition(token) if token else ("", "", closing)
    kept += token
    if not (kept and between.startswith(kept)):
        earlier = first_token(tokenizer, between)
    if before.startswith(opening):
        lead = before[len(opening) :]
    else:
        lead = ""
    called = "" if kept else _end_of_call(tokenizer, ask)
    return TurnEnd(kept, dropped, number, earlier, lead, called)


def first_token(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The start of a text up to and including the added token that begins it, perhaps after white
    space; "" if none does."""
    bare = text.lstrip()
    names = [name for name, _, _ in _added_tokens(tokenizer) if bare.startswith(name)]
    token = max(names, key=len, default="")
    if token:
        return text[: len(text) - len(bare) + len(token)]
    return ""


def _end_of_call(tokenizer: PreTrainedTokenizerBase, ask: Message) -> str:
    """What follows a call of a tool up to and including the token that begins the result."""
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
    talk: Messages = [ask, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": _EXAMPLE}
    with suppress(UserError):
        called = render(tokenizer, talk, open_answer=False)
        whole = render(tokenizer, [*talk, result], open_answer=True)
        result_turn = whole.removeprefix(called)
        if whole.startswith(called) and _EXAMPLE in result_turn:
            return first_token(tokenizer, result_turn)
    return ""


@lru_cache(maxsize=16)
def added_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[int, AddedToken]:
    """id -> added token. Cached: a tokenizer with thousands of them takes 20 ms. `size`: of its
    vocabulary."""
    return dict(tokenizer.added_tokens_decoder)


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, int, bool]]:
    """(token, id, whether it is special) of each added token and of EOS, without those of spaces
    alone."""
    added = [
        (token.content, n, token.special)
        for n, token in added_tokens(tokenizer, len(tokenizer)).items()
    ]
    added.append((str(tokenizer.eos_token), int(tokenizer.eos_token_id), True))
    return [entry for entry in added if entry[0].strip()]


def _id_of(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """The id of an added token."""
    return next(number for name, number, _ in _added_tokens(tokenizer) if name == token)


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
    ends = [eos_id, end.token]
    if end.called:
        ends.append(_id_of(tokenizer, end.called.lstrip()))
    return {str(tokenizer.convert_ids_to_tokens(number)): number for number in ends}


def without_final(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[str, int | None]:
    """(a text without the tokens at its end that end answers, and without white space around them;
    the id of the first of these tokens)."""
    ends = _answer_ends(tokenizer, str(tokenizer.chat_template), int(tokenizer.eos_token_id))
    first = None
    token = next(filter(text.rstrip().endswith, ends), None)
    while token is not None:
        text = text.rstrip().removesuffix(token)
        first = ends[token]
        token = next(filter(text.rstrip().endswith, ends), None)
    return text, first


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
    bare, first = without_final(tokenizer, answer)
    return bare, int(tokenizer.eos_token_id) if first is None else first


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
    if isinstance(answer, dict):
        message = answer
    else:
        message = {"role": "assistant", "content": answer}
    content, _ = without_final(tokenizer, message.get("content") or "")
    message = {**message, "content": content}
    whole = render(tokenizer, [*prompt, message], False, tools, variables)
    is_opened = whole.startswith(opening)
    is_ended = is_opened and whole.endswith(end.kept + end.dropped)
    turn = whole[len(opening) : len(whole) - len(end.dropped) * is_ended]
    if not any(message.get(key) for key in _BESIDES_CONTENT):
        unopened = _without_opening(content, opening)
        if is_ended and "".join(unopened.split()) in "".join(turn.split()):
            return turn, end.token
        # The template renders the opening in two ways, or drops a part of an answer (the thinking,
        # as a rule).
        return unopened + end.kept, end.token
    if not is_opened:
        raise UserError(
            "the chat template renders the prompt differently before this answer, so its tool calls"
            " or reasoning cannot be told from the prompt; give the answer as text, or take another"
            " template (--chat_template)"
        )
    if end.called and message.get("tool_calls"):
        return turn + end.called, _id_of(tokenizer, end.called.lstrip())
    if is_ended:
        return turn, end.token
    # some templates end tool calls with another token
    found = [
        (turn.rfind(token) + len(token), n)
        for token, n, _ in _added_tokens(tokenizer)
        if token in turn
    ]
    last, token_id = max(found, default=(len(turn), end.token))
    return turn[:last], token_id


def _without_opening(content: str, opening: str) -> str:
    """`content` without its start if `opening` ends with that: templates that open an answer with
    `<think>` do not render it again, but answers of a data set begin with it."""
    tail = opening[-_LONGEST_TAG:]
    texts = (text[start:] for start in range(len(tail)) for text in (tail, tail.rstrip()))
    begun = next((text for text in texts if len(text.strip()) > 2 and content.startswith(text)), "")
    return content[len(begun) :]


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
    with suppress(UserError):
        text = _apply_template(tokenizer, messages, open_answer, tools, variables)
        arguments = [function.get("arguments") for function in functions_of(messages)]
        if not any(isinstance(found, dict) and found and str(found) in text for found in arguments):
            return text
    # Some templates write the arguments of tool calls as they are, or join them with texts: they
    # expect JSON text.
    with_text = deepcopy(messages)
    for function in functions_of(with_text):
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return _apply_template(tokenizer, with_text, open_answer, tools, variables)


def _apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    open_answer: bool,
    tools: Tools | None,
    variables: Variables | None,
) -> str:
    settings: dict[str, Any] = {
        **(variables or {}),
        "tools": tools or None,
        "tokenize": False,
        "add_generation_prompt": open_answer,
    }
    with reading("the chat template rejects these messages"):
        return str(tokenizer.apply_chat_template(messages, **settings))
