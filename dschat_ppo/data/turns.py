"""Earlier answers of the assistant inside a rendered conversation, for `--train_on all`."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dschat_ppo.data.templates import Messages, Tools, TurnEnd, render, turn_end
from dschat_ppo.data.tool_calls import check_rendered, has_calls
from dschat_ppo.errors import UserError, reading

Span = tuple[int, int]
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "PROBE7f3aPROBE"  # stands for an answer's content
_PROBES = re.compile(r"PROBE7f3a(\d+)PROBE")  # the same, with the number of the message


def turn_spans(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, opening: str, tools: Tools | None = None
) -> list[Span]:
    """Ranges of characters of `opening`, which is `render_prompt` of `prompt`, that are answers of the assistant, each
    with its end-of-turn token. `UserError` if one cannot be found for certain.

    They come from the `{% generation %}` marks of the template if it has them. Otherwise the template is rendered with
    other texts in place of all answers: the ranges are what changes. If it refuses that, as some do for the answer of a
    tool without its call, they are what each message adds to the rendering, which takes time quadratic in the turns.
    """
    turns = [number for number, message in enumerate(prompt) if message["role"] == "assistant"]
    if not turns:
        return []
    end = turn_end(tokenizer)
    marked = _marked_spans(tokenizer, prompt, opening, tools)
    if len(marked) == len(turns):
        marked = [(start, _to_end(opening, start, stop, end)) for start, stop in marked]
        pairs = zip(turns, marked, strict=True)
        if all(_holds(opening[slice(*span)], prompt[turn].get("content"), end) for turn, span in pairs):
            return marked
    if spans := _probed_spans(tokenizer, prompt, turns, opening, tools, end):
        return spans
    found = [_span_of_turn(tokenizer, prompt, turn, opening, tools, end) for turn in turns]
    spans = [span for span in found if span is not None]
    if len(spans) < len(turns) or any(first[1] > second[0] for first, second in pairwise(spans)):
        raise UserError(
            "the earlier answers of the assistant cannot be found for certain in what the chat template renders; "
            "--train_on last trains the last answer only"
        )
    return spans


def _marked_spans(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, opening: str, tools: Tools | None
) -> list[Span]:
    """The ranges that the template's `{% generation %}` marks enclose; [] without marks."""
    template = tokenizer.get_chat_template(None, tools)
    if not _MARKED.search(template):
        return []
    plain = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    tokens: dict[str, Any] = tokenizer.special_tokens_map
    with reading("the chat template rejects these messages"):
        found: Any = render_jinja_template(
            conversations=[plain],
            tools=tools or None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=True,
            **tokens,
        )
    (text,), (marks,) = found
    return [(start, stop) for start, stop in marks if start < stop] if text == opening else []


def _probed_spans(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, turns: list[int], opening: str, tools: Tools | None,
    end: TurnEnd,
) -> list[Span]:  # fmt: skip
    """The range of each of `turns`, from three renderings; [] if one is not certain."""
    probes = {turn: f"PROBE7f3a{turn}PROBE" for turn in turns}
    probed = [
        {"role": "assistant", "content": probes[turn]} if turn in probes else message
        for turn, message in enumerate(prompt)
    ]
    try:
        parts = _PROBES.split(render(tokenizer, probed, open_answer=True, tools=tools))
    except UserError:  # such as a tool's message without a call before it
        return []
    if parts[1::2] != [str(turn) for turn in turns]:
        return []
    contents, begin = list[Span](), len(parts[0])
    if not opening.startswith(parts[0]):
        return []
    for turn, after in zip(turns, parts[2::2], strict=True):
        content = prompt[turn].get("content") or ""
        stop = next(
            (begin + len(text) for text in (content, content.strip()) if opening.startswith(text + after, begin)),
            opening.find(after, begin) if turn < turns[-1] else len(opening) - len(after),
        )
        if stop < begin or not opening.startswith(after, stop) or not _holds(opening[begin:stop], content, end):
            return []
        try:
            check_rendered(opening[begin:stop], [prompt[turn]], None)
        except UserError:
            return []
        contents.append((begin, stop))
        begin = stop + len(after)
    if begin < len(opening):
        return []
    lead = ""  # what the template renders of an answer before its content, such as a space or a channel's name
    for turn, (begin, _) in list(zip(turns, contents, strict=True))[turns[0] == 0 :][:1]:
        before = render(tokenizer, prompt[:turn], open_answer=True, tools=tools)
        lead = opening[len(before) : begin] if opening.startswith(before) else ""
    stops = [_to_end(opening, begin, stop, end) for begin, stop in contents]
    return [
        (begin - len(lead) if turn > 0 and opening.endswith(lead, before, begin) else begin, stop)
        for turn, (begin, _), stop, before in zip(turns, contents, stops, [0, *stops], strict=False)
    ]


def _span_of_turn(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, turn: int, opening: str, tools: Tools | None, end: TurnEnd
) -> Span | None:
    """The range of message `turn` in `opening`; None if it is not certain."""
    content = prompt[turn].get("content") or ""
    if turn > 0:
        before = render(tokenizer, prompt[:turn], open_answer=True, tools=tools)
        whole = render(tokenizer, prompt[: turn + 1], open_answer=False, tools=tools)
        if whole.endswith(end.kept + end.dropped):
            whole = whole[: len(whole) - len(end.dropped)]
            if whole.startswith(before) and opening.startswith(whole) and _holds(whole[len(before) :], content, end):
                return len(before), len(whole)
    if not content.strip() and not has_calls([prompt[turn]]):
        return None
    other = {"role": "assistant"} if has_calls([prompt[turn]]) else prompt[turn]  # the calls belong to the answer
    probed = [{**other, "content": _PROBE} if i == turn else message for i, message in enumerate(prompt)]
    try:
        before, probe, after = render(tokenizer, probed, open_answer=True, tools=tools).partition(_PROBE)
    except UserError:  # such as a tool's message without a call before it
        return None
    stop = len(opening) - len(after)
    is_certain = probe and _PROBE not in after and opening.startswith(before) and opening.endswith(after)
    if not is_certain or stop <= len(before) or not _holds(opening[len(before) : stop], content, end):
        return None
    with suppress(UserError):
        check_rendered(opening[len(before) : stop], [prompt[turn]], None)
        return len(before), _to_end(opening, len(before), stop, end)
    return None


def _to_end(text: str, start: int, stop: int, end: TurnEnd) -> int:
    """Where an answer ends that begins at `start` and reaches about to `stop`: after its end-of-turn token."""
    closings = ((end.kept, end.kept + end.dropped), (end.earlier, end.earlier))
    for kept, closing in ((kept, closing) for kept, closing in closings if kept):
        for back in range(min(len(closing), stop - start), -1, -1):
            if text.startswith(kept, stop - back) and closing.startswith(text[stop - back : stop]):
                return stop - back + len(kept)
    return stop


def _holds(text: str, content: str | None, end: TurnEnd) -> bool:
    """Whether `text` is an answer with this content, or with the rest of it that the template keeps."""
    content = (content or "").strip()
    rest = text.removesuffix(end.kept).removesuffix(end.earlier).strip()
    return content in text or (bool(rest) and rest in content)
