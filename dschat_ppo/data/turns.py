"""Earlier answers of the assistant inside a rendered conversation, for `--train_on all`."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from dschat_ppo.data.messages import check_rendered
from dschat_ppo.data.templates import Messages, Tools, TurnEnd, render, turn_end
from dschat_ppo.errors import UserError, reading

Span = tuple[int, int]
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBES = re.compile(r"PROBE7f3a(\d+)PROBE")  # stand for the contents of answers; with the number of the message


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
        spans = find(tokenizer, prompt, turns, opening, tools, end)
        answers = [prompt[turn].get("content") for turn in turns]
        if (
            len(spans) == len(turns)
            and all(first[1] <= second[0] for first, second in pairwise(spans))
            and all(_holds(opening[slice(*span)], answer, end) for span, answer in zip(spans, answers, strict=True))
        ):
            return spans
    if turns:
        raise UserError(
            "the earlier answers of the assistant cannot be found for certain in what the chat template renders; "
            "--train_on last trains the last answer only"
        )
    return []


def _marked(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, turns: list[int], opening: str, tools: Tools | None,
    end: TurnEnd,
) -> list[Span]:  # fmt: skip
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
    marks = marks if text == opening else []
    return [(start, _to_end(opening, start, stop, end)) for start, stop in marks if start < stop]


def _probed(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, turns: list[int], opening: str, tools: Tools | None,
    end: TurnEnd,
) -> list[Span]:  # fmt: skip
    """The ranges that differ when other texts take the place of the answers, whose tool calls belong to them; [] if one
    is not certain."""
    probed = list(prompt)
    for turn in turns:
        probed[turn] = {"role": "assistant", "content": f"PROBE7f3a{turn}PROBE"}
    try:
        first, *parts = _PROBES.split(render(tokenizer, probed, open_answer=True, tools=tools))
    except UserError:  # such as a tool's message without a call before it
        return []
    if parts[::2] != [str(turn) for turn in turns] or not opening.startswith(first):
        return []
    contents, begin = list[Span](), len(first)
    for turn, after in zip(turns, parts[1::2], strict=True):
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


def _added(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, turns: list[int], opening: str, tools: Tools | None,
    end: TurnEnd,
) -> list[Span]:  # fmt: skip
    """What each answer adds to the rendering of the messages before it; [] if they are rendered differently there."""
    spans = []
    for turn in turns:
        if turn == 0:
            return []
        before = render(tokenizer, prompt[:turn], open_answer=True, tools=tools)
        whole = render(tokenizer, prompt[: turn + 1], open_answer=False, tools=tools)
        if not whole.endswith(end.kept + end.dropped) or not whole.startswith(before):
            return []
        whole = whole[: len(whole) - len(end.dropped)]
        if not opening.startswith(whole):
            return []
        spans.append((len(before), len(whole)))
    return spans


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
