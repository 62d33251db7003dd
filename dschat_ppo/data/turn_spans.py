"""Where the earlier answers of a conversation begin and end in the text that its chat template
renders, for `--train_on all`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dschat_ppo.data.examples import Message, Messages
from dschat_ppo.data.templates import (
    MARKS,
    Span,
    Tools,
    TurnEnd,
    Variables,
    first_token,
    render,
    turn_end,
)
from dschat_ppo.errors import UserError, reading

_PROBE = "PROBE7f3a"  # stands for the contents of answers


def turn_spans(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    opening: str,
    tools: Tools | None,
    variables: Variables | None = None,
) -> list[Span]:
    """Ranges of characters of `opening`, which is `render` of `prompt`, that are answers of the
    assistant, each with its end-of-turn token: by the `{% generation %}` marks of the template if
    it has them, or else by what changes where another text takes the place of all answers.
    `UserError` if one cannot be found for certain."""
    indices = [index for index, message in enumerate(prompt) if message["role"] == "assistant"]
    if not indices:
        return []
    end = turn_end(tokenizer)
    for spans_without_ends in (_marked_spans, _probed_spans):
        with suppress(UserError):
            spans = list[Span]()
            for start, stop in spans_without_ends(
                tokenizer, prompt, indices, opening, tools, variables
            ):
                spans.append((start, _to_end(tokenizer, opening, start, stop, end)))
            if len(spans) == len(indices) and all(
                _holds(opening[start:stop], prompt[index], end)
                for (start, stop), index in zip(spans, indices, strict=True)
            ):
                return spans
    raise UserError(
        "the earlier answers of the assistant cannot be found for certain in what the chat template"
        " renders; --train_on last trains the last answer only, or mark them with {% generation %}"
        " in a --chat_template"
    )


def _marked_spans(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    indices: list[int],
    opening: str,
    tools: Tools | None,
    variables: Variables | None,
) -> list[Span]:
    """The ranges that the template's `{% generation %}` marks enclose; [] without marks."""
    template = tokenizer.get_chat_template(None, tools)
    if not MARKS.search(template):
        return []
    tokens: dict[str, Any] = {**(variables or {}), **tokenizer.special_tokens_map}
    with reading("the chat template rejects these messages"):
        rendered: Any = render_jinja_template(
            conversations=[prompt],
            tools=tools or None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=True,
            **tokens,
        )
    [text], [marks] = rendered
    if text != opening:
        return []
    return [(start, stop) for start, stop in marks if start < stop]


def _probed_spans(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Messages,
    indices: list[int],
    opening: str,
    tools: Tools | None,
    variables: Variables | None,
) -> list[Span]:
    """The ranges that differ when another text takes the place of the answers, which have these
    indices in the prompt; their tool calls belong to them. [] if the rest is not the same."""
    probed = list(prompt)
    for index in indices:
        probed[index] = {"role": prompt[index]["role"], "content": _PROBE}
    before, *texts_after = render(tokenizer, probed, True, tools, variables).split(_PROBE)
    lead = turn_end(tokenizer).lead  # of an answer that is text; one that calls tools may have none
    if indices[0] > 0:
        before = before.removesuffix(lead)
    # the leads of the next answers; nothing follows the last text
    texts_after[:-1] = [after.removesuffix(lead) for after in texts_after[:-1]]
    if len(texts_after) != len(indices) or not opening.startswith(before):
        return []
    spans = list[Span]()
    begin = len(before)
    for index, after in zip(indices, texts_after, strict=True):
        content = prompt[index].get("content") or ""
        if index < indices[-1]:
            stop = opening.find(after, begin)
        else:
            stop = len(opening) - len(after)
        for text in (content, lead + content):  # `after` may be in the content too
            if opening.startswith(text + after, begin):
                stop = begin + len(text)
        if stop < begin or not opening.startswith(after, stop):
            return []
        spans.append((begin, stop))
        begin = stop + len(after)
    return spans


def _to_end(
    tokenizer: PreTrainedTokenizerBase, text: str, start: int, stop: int, end: TurnEnd
) -> int:
    """Where an answer ends that begins at `start` and reaches about to `stop`: after its
    end-of-turn token. Where templates have none, the first token of the next turn ends it, such as
    `<|observation|>` after a call of a tool."""
    for end_of_answer, closing in ((end.kept, end.kept + end.dropped), (end.earlier, end.earlier)):
        if not end_of_answer:
            continue
        for back in range(min(len(closing), stop - start), -1, -1):
            begin = stop - back
            if text.startswith(end_of_answer, begin) and closing.startswith(text[begin:stop]):
                return begin + len(end_of_answer)
    if end.earlier and not end.kept:
        return stop + len(first_token(tokenizer, text[stop:]))
    return stop


def _holds(text: str, answer: Message, end: TurnEnd) -> bool:
    """Whether `text` is this answer, or the rest of it that the template keeps."""
    content = (answer.get("content") or "").strip()
    rest = text.removesuffix(end.kept).removesuffix(end.earlier).strip()
    return content in text or (bool(rest) and rest in content)
