"""Chat templates: that of a run (`--chat_template`, `--chat_template_kwargs`), chat messages as its text, and where
answers begin and end in it: the one that follows a prompt, and for `--train_on all` those inside it.

Both flags become part of the tokenizer's own template text. It is saved with the model, so later steps, generation, the
reward server and plain transformers render the same text without these flags.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AddedToken, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dschat_ppo.common.logging import logger
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.examples import (
    THOUGHTS,
    Message,
    Messages,
    check_rendered,
    shows_python,
    with_arguments_as_text,
)  # fmt: skip
from dschat_ppo.errors import UserError, reading

FLAG, VARIABLES_FLAG = "--chat_template", "--chat_template_kwargs"
# Variables and functions that each rendering has.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # around the assistant's text in some templates
_JINJA = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
_BAKED = r"\{{%- set {} = [^\n]* %\}}\n"  # a line of `with_variables`

# name -> the token that ends a turn, "" for the tokenizer's EOS; human-assistant is the text of DeepSpeed-Chat's data
# sets, without line breaks
NAMED = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "zephyr": "", "human-assistant": ""}
_TEXTS = Path(__file__).parent / "named_templates"  # `checks.jinja` precedes each of them
Tools = list[Any]
Span = tuple[int, int]
_EXAMPLE = "An answer."
_LONGEST_TAG = 64  # characters of the text with which a template opens an answer, such as `<think>`
_BESIDES_CONTENT = ("tool_calls", *THOUGHTS)  # what templates render of an answer
_PROBES = re.compile(r"PROBE7f3a(\d+)PROBE")  # stand for the contents of answers; with the number of the message


# The template of a run


def with_template_flags(tokenizer: PreTrainedTokenizerBase, flags: DataFlags) -> PreTrainedTokenizerBase:
    """Give `tokenizer`, in place, the template of `--chat_template` with the variables of `--chat_template_kwargs`."""
    if flags.chat_template in NAMED:
        tokenizer.chat_template = named_template(flags.chat_template, tokenizer)
    elif flags.chat_template is not None:
        tokenizer.chat_template = template_of_file(flags.chat_template)
        logger().info(f"chat template: {flags.chat_template}")
    variables, found = flags.template_variables, tokenizer.chat_template
    if not variables:
        return tokenizer
    if not found:
        raise UserError(f"{VARIABLES_FLAG}: the tokenizer has no chat template; give one with {FLAG}")
    # Some tokenizers have several templates, such as "default" and "tool_use".
    texts = with_variables(found if isinstance(found, dict) else {"default": found}, variables)
    tokenizer.chat_template = texts if isinstance(found, dict) else texts["default"]
    logger().info(f"chat template: {flags.chat_template_kwargs} ({VARIABLES_FLAG})")
    return tokenizer


def named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The Jinja text of a named template for `tokenizer`. Turns end with the template's own token if the tokenizer has
    it, otherwise with EOS. The text starts with BOS if the tokenizer writes BOS before plain text."""
    end = NAMED[name]
    has_end = end in tokenizer.get_vocab()
    begins = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    head = f"{{%- set start = {'bos_token' if begins else repr('')} %}}\n"
    head += f"{{%- set end_of_turn = {repr(end) if has_end else 'eos_token'} %}}\n"
    logger().info(f"chat template: {name}; turns end with {end if has_end else tokenizer.eos_token}")
    if end and not has_end:
        note = f"the tokenizer has no token {end}; other tokens of the template become several tokens of plain text too"
        logger().warning(f"{FLAG} {name}: {note}")
    checks, text = (_TEXTS.joinpath(f"{part}.jinja").read_text(encoding="utf-8") for part in ("checks", name))
    return head + checks.replace("NAME", name) + text


def template_of_file(name: str) -> str:
    """The text of a Jinja file, whose syntax is checked; `check_rendered` checks what it renders."""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{FLAG} {name}: neither a file nor one of {', '.join(NAMED)}")
    with reading(f"{FLAG} {name}: cannot be used"):  # Python's parser and Jinja's limit the nesting
        text = path.read_text(encoding="utf-8-sig")
        try:
            _JINJA.from_string(_MARKS.sub("", text))  # also finds unknown filters, which parsing does not
        except jinja2.TemplateSyntaxError as problem:
            raise UserError(f"{FLAG} {name}, line {problem.lineno}: {problem.message}") from None
    return text


def with_variables(templates: dict[str, str], variables: dict[str, Any]) -> dict[str, str]:
    """Jinja texts that set `variables` first, each those that it reads, and otherwise render as before. Values that an
    earlier call has set under the same names are replaced. A name that no template reads is refused."""
    try:
        json.dumps(variables, allow_nan=False)
    except ValueError:
        raise UserError(f"{VARIABLES_FLAG}: a number is not finite") from None
    result, readable = {}, set[str]()
    for which, text in templates.items():
        for name in variables:
            text = re.sub(rf"\A((?:{_BAKED.format('[A-Za-z_0-9]+')})*?){_BAKED.format(re.escape(name))}", r"\1", text)
        with reading(f"{VARIABLES_FLAG}: the tokenizer's chat template cannot be parsed"):
            read = (
                meta.find_undeclared_variables(_JINJA.parse(_MARKS.sub("", text))) - _GIVEN
            )  # without those that it sets itself
        readable |= read
        # Python writes values as Jinja reads them, on one line. In transformers' Jinja the line break after a block is
        # no output, and what follows starts a line, as before.
        lines = [f"{{%- set {name} = {value!r} %}}\n" for name, value in variables.items() if name in read]
        result[which] = "".join(lines) + text
    for name in variables:
        if name not in readable:
            known = f"it reads {', '.join(sorted(readable))}" if readable else "it reads none"
            raise UserError(f"{VARIABLES_FLAG}: the chat template reads no variable '{name}' of yours; {known}")
    return result


# Messages as text


@dataclass(frozen=True)
class TurnEnd:
    """The text that a chat template renders after an answer: `kept + dropped`.

    `kept` ends with the end-of-turn token, whose id is `token`, and belongs to the answer. `dropped`, such as the line
    break after ChatML's `<|im_end|>`, does not, because generation stops before it. If the template has no end-of-turn
    token, `kept` is empty and `token` is the tokenizer's EOS.

    `earlier` is what the template renders in place of `kept` where another message follows, up to and including its
    first added token: `<|end|>` for gpt-oss, the next turn's `<|user|>` for GLM. It is "" if that is `kept` too.
    `earlier_token` is the id of that token; None without one, or if answers hold the token themselves, as those of
    gpt-oss do after their thinking.

    `lead` is what the template renders before the content of an earlier answer, such as a space or a channel's name.
    """

    kept: str
    dropped: str
    token: int
    earlier: str = ""
    earlier_token: int | None = None
    lead: str = ""


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd:
    """The end of the assistant's turn in the tokenizer's chat template, found by rendering an example. The end-of-turn
    token is the first special token after the answer, or else the first other added token."""
    return _turn_end(tokenizer, str(tokenizer.chat_template), int(tokenizer.eos_token_id))


@lru_cache(maxsize=16)
def _turn_end(tokenizer: PreTrainedTokenizerBase, template: str, eos_id: int) -> TurnEnd:
    """Cached: every answer needs it. `template` and `eos_id` are arguments because a tokenizer can change, and the
    result depends on both."""
    rendered, closing, between, thought, lead = "", "", "", "", ""
    ask: Message = {"role": "user", "content": "A question."}
    answer: Message = {"role": "assistant", "content": _EXAMPLE}
    thinking = answer | dict.fromkeys(("reasoning_content", "thinking"), "A thought.")
    with suppress(UserError):  # no template, or it rejects the example; it may still accept the rows
        rendered = render(tokenizer, [ask, answer], open_answer=False)
        closing = rendered.rpartition(_EXAMPLE)[2] if _EXAMPLE in rendered else ""
        talk = [ask, answer, {"role": "user", "content": "Another question."}]
        before, _, between = render(tokenizer, talk, open_answer=True).partition(_EXAMPLE)
        opening = render(tokenizer, [ask], open_answer=True)
        lead = before[len(opening) :] if before.startswith(opening) else ""
        thought = render(tokenizer, [ask, thinking], open_answer=False).rpartition(_EXAMPLE)[0]
    added = _added_tokens(tokenizer)
    found = [
        (not special, closing.index(token), -len(token), token, number)
        for token, number, special in added
        if token in closing
    ]
    _, first, _, token, number = min(found, default=(False, 0, 0, "", eos_id))
    last = first + len(token)
    kept = closing[:last]
    token, other = max(((token, n) for token, n, _ in added if between.lstrip().startswith(token)), default=("", None))
    if not token or (kept and between.startswith(kept)):
        return TurnEnd(kept, closing[last:], number, lead=lead)
    is_inside = thought.count(token) > rendered.rpartition(_EXAMPLE)[0].count(token)
    earlier = between[: between.index(token) + len(token)]
    return TurnEnd(kept, closing[last:], number, earlier, None if is_inside else other, lead)


@lru_cache(maxsize=16)
def added_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[int, AddedToken]:
    """id -> added token. Cached: a tokenizer with thousands of them takes 20 ms. `size`: of its vocabulary."""
    return dict(tokenizer.added_tokens_decoder)


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, int, bool]]:
    """(token, id, whether it is special) of each added token and of EOS, without those of spaces alone."""
    added = [(token.content, n, token.special) for n, token in added_tokens(tokenizer, len(tokenizer)).items()]
    added.append((str(tokenizer.eos_token), int(tokenizer.eos_token_id), True))
    return [entry for entry in added if entry[0].strip()]


def answer_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the tokens that end an answer: EOS, and those of the chat template's `turn_end` that differ."""
    end = turn_end(tokenizer)
    earlier = () if end.earlier_token is None else (end.earlier_token,)
    return tuple(dict.fromkeys((int(tokenizer.eos_token_id), end.token, *earlier)))


def text_answer(tokenizer: PreTrainedTokenizerBase, answer: str | Message) -> tuple[str, int]:
    """(text of an answer to a text prompt, id of its final token). A text that is rendered already ends with the
    end-of-turn token; that one is its final token, and white space after it is dropped. Tool calls are refused."""
    if isinstance(answer, dict):
        if answer.get("tool_calls"):
            raise UserError("the answer has tool calls, which need chat messages as the prompt, but the prompt is text")
        answer = str(answer.get("content") or "")
    ends = {str(tokenizer.convert_ids_to_tokens(number)): number for number in answer_ends(tokenizer)}
    bare = without_final(answer, tuple(ends))
    first = next((number for token, number in ends.items() if answer[len(bare) :].startswith(token)), None)
    return bare, int(tokenizer.eos_token_id) if first is None else first


def render_answer(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    opening: str,
    answer: str | Message,
    tools: Tools | None = None,
) -> tuple[str, int]:
    """(the assistant's turn as the template renders it after `opening`, which is `render` of `prompt`; id of the
    token that ends the answer). The text ends with that token, unless the template writes none."""
    end = turn_end(tokenizer)
    final = (str(tokenizer.eos_token), str(tokenizer.convert_ids_to_tokens(end.token)))
    message = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
    content = without_final(message.get("content") or "", final)
    message = {**message, "content": content} if message.get("content") is not None else message
    whole = render(tokenizer, [*prompt, message], open_answer=False, tools=tools)
    is_opened = whole.startswith(opening)
    rest = whole[len(opening) :] if is_opened else ""
    is_ended = is_opened and rest.endswith(end.kept + end.dropped)
    turn = rest[: len(rest) - len(end.dropped)] if is_ended else rest
    if not any(message.get(key) for key in _BESIDES_CONTENT):
        unopened = _without_opening(content, opening)
        for text in (content, unopened) if is_ended else ():
            if text.strip() in turn or _letters(turn) >= _letters(text + end.kept):
                return turn, end.token
        # The template renders the opening in two ways, or drops a part of an answer (the thinking, as a rule).
        return unopened + end.kept, end.token
    if not is_opened:
        raise UserError(
            "the chat template renders the prompt differently before this answer, so its tool calls or reasoning "
            "cannot be told from the prompt; give the answer as text, or take another template (--chat_template)"
        )
    check_rendered(turn, [message], None)
    if is_ended:
        return turn, end.token
    # some templates end tool calls with another token
    found = [(rest.rfind(token) + len(token), n) for token, n, _ in _added_tokens(tokenizer) if token in rest]
    last, token_id = max(found, default=(len(rest), end.token))
    return rest[:last], token_id


def _without_opening(content: str, opening: str) -> str:
    """`content` without its start if `opening` ends with that: templates that open an answer with `<think>` do not
    render it again, but answers of a data set begin with it."""
    tail = opening[-_LONGEST_TAG:]
    texts = (text[start:] for start in range(len(tail)) for text in (tail, tail.rstrip()))
    begun = next((text for text in texts if len(text.strip()) > 2 and content.startswith(text)), "")
    return content[len(begun) :]


def without_final(answer: str, final: tuple[str, ...]) -> str:
    """A text without the tokens `final` at its end."""
    while (bare := answer.rstrip()).endswith(final):
        answer = bare
        for token in final:
            answer = answer.removesuffix(token)
    return answer


def _letters(text: str) -> int:
    return sum(map(len, text.split()))


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, open_answer: bool, tools: Tools | None = None
) -> str:
    """Messages as text by the tokenizer's chat template, with or without the opening of the assistant's turn."""
    if tokenizer.chat_template is None:
        raise UserError(
            "the data holds chat messages, but the model's tokenizer has no chat template; give prompts as text, name "
            "a template with --chat_template, or save a `chat_template.jinja` in the folder of the tokenizer"
        )
    with suppress(UserError):
        text = _apply(tokenizer, messages, open_answer, tools)
        if not shows_python(text, messages):
            return text
    return _apply(tokenizer, with_arguments_as_text(messages), open_answer, tools)


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Messages, open_answer: bool, tools: Tools | None) -> str:
    # Templates print None as text. transformers removes these keys itself from 5.21 on.
    plain = [{k: v for k, v in m.items() if v is not None or k not in ("content", "tool_calls")} for m in messages]
    with reading("the chat template rejects these messages"):
        return str(
            tokenizer.apply_chat_template(plain, tools=tools or None, tokenize=False, add_generation_prompt=open_answer)
        )


# Earlier answers


def turn_spans(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, opening: str, tools: Tools | None = None
) -> list[Span]:
    """Ranges of characters of `opening`, which is `render` of `prompt`, that are answers of the assistant, each
    with its end-of-turn token. `UserError` if one cannot be found for certain.

    They come from the `{% generation %}` marks of the template if it has them. Otherwise the template is rendered with
    other texts in place of all answers: the ranges are what changes. If it refuses that, as some do for the answer of a
    tool without its call, they are what each message adds to the rendering, which takes time quadratic in the turns.
    """
    turns = [number for number, message in enumerate(prompt) if message["role"] == "assistant"]
    end = turn_end(tokenizer)
    for find in (_marked, _probed, _added) if turns else ():
        spans = list[Span]()
        with suppress(UserError):
            spans = [
                (start, _to_end(opening, start, stop, end))
                for start, stop in find(tokenizer, prompt, turns, opening, tools)
            ]
        if (
            len(spans) == len(turns)
            and all(first[1] <= second[0] for first, second in pairwise(spans))
            and all(_holds(opening[slice(*span)], prompt[turn], end) for span, turn in zip(spans, turns, strict=True))
        ):
            return spans
    if turns:
        raise UserError(
            "the earlier answers of the assistant cannot be found for certain in what the chat template renders; "
            "--train_on last trains the last answer only"
        )
    return []


def _marked(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, turns: list[int], opening: str, tools: Tools | None
) -> list[Span]:
    """The ranges that the template's `{% generation %}` marks enclose; [] without marks."""
    template = tokenizer.get_chat_template(None, tools)
    if not _MARKS.search(template):
        return []
    plain = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    tokens: dict[str, Any] = tokenizer.special_tokens_map
    with reading("the chat template rejects these messages"):
        found: Any = render_jinja_template(
            conversations=[plain], tools=tools or None, chat_template=template, return_assistant_tokens_mask=True,
            add_generation_prompt=True, **tokens,
        )  # fmt: skip
    (text,), (marks,) = found
    return [(start, stop) for start, stop in marks if start < stop and text == opening]


def _probed(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, turns: list[int], opening: str, tools: Tools | None
) -> list[Span]:
    """The ranges that differ when other texts take the place of the answers, whose tool calls belong to them; [] if one
    is not certain."""
    probed = [
        {"role": "assistant", "content": f"PROBE7f3a{number}PROBE"} if number in turns else message
        for number, message in enumerate(prompt)
    ]
    first, *parts = _PROBES.split(render(tokenizer, probed, open_answer=True, tools=tools))
    if parts[::2] != list(map(str, turns)) or not opening.startswith(first):
        return []
    spans, begin, lead = list[Span](), len(first), turn_end(tokenizer).lead
    for turn, after in zip(turns, parts[1::2], strict=True):
        content = prompt[turn].get("content") or ""
        exact = [begin + len(text) for text in (content, content.strip()) if opening.startswith(text + after, begin)]
        other = opening.find(after, begin) if turn < turns[-1] else len(opening) - len(after)
        stop = exact[0] if exact else other
        if stop < begin or not opening.startswith(after, stop):
            return []
        check_rendered(opening[begin:stop], [prompt[turn]], None)
        spans.append((begin - len(lead) if turn and opening.endswith(lead, 0, begin) else begin, stop))
        begin = stop + len(after)
    return spans if begin == len(opening) else []


def _added(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, turns: list[int], opening: str, tools: Tools | None
) -> list[Span]:
    """What each answer adds to the rendering of the messages before it; [] if they are rendered differently there."""
    spans = list[Span]()
    for turn in turns:
        before = render(tokenizer, prompt[:turn], open_answer=True, tools=tools)
        answer, _ = render_answer(tokenizer, prompt[:turn], before, prompt[turn], tools)
        if not opening.startswith(before + answer):
            return []
        spans.append((len(before), len(before + answer)))
    return spans


def _to_end(text: str, start: int, stop: int, end: TurnEnd) -> int:
    """Where an answer ends that begins at `start` and reaches about to `stop`: after its end-of-turn token."""
    closings = ((end.kept, end.kept + end.dropped), (end.earlier, end.earlier))
    for kept, closing in ((kept, closing) for kept, closing in closings if kept):
        for back in range(min(len(closing), stop - start), -1, -1):
            if text.startswith(kept, stop - back) and closing.startswith(text[stop - back : stop]):
                return stop - back + len(kept)
    return stop


def _holds(text: str, answer: Message, end: TurnEnd) -> bool:
    """Whether `text` is this answer, or the rest of it that the template keeps."""
    content = (answer.get("content") or "").strip()
    rest = text.removesuffix(end.kept).removesuffix(end.earlier).strip()
    return content in text or (bool(rest) and rest in content)
