"""Readers of the forms with one answer or one pair per row: from the columns of a row to its prompt and answers.

Each reader takes `(cells, use)` and returns examples before the rendering. The prompt of a row does not depend on
`use`. For "prompt" nothing is read that only answers need. Errors do not name the row.
"""

from __future__ import annotations

import re
from typing import Any

from dschat_ppo.data.examples import Example, Use
from dschat_ppo.data.form_rows import Cells
from dschat_ppo.data.messages import (
    Message,
    Messages,
    kind_of,
    looks_like_messages,
    split_answer,
    up_to_last_target,
    without_context,
)
from dschat_ppo.errors import UserError

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
_ALPACA_INPUT = ", paired with an input that provides further context"


def read_pair(cells: Cells, use: Use) -> list[Example]:
    """A prompt and one answer, or a better and a worse one, each text or messages."""
    return _answered(prompt_value(cells), cells, use)


def _answered(prompt: str | Messages, cells: Cells, use: Use) -> list[Example]:
    """The answers to a prompt, which messages of the (better) answer may repeat or continue."""
    trained = "response" if cells.has("response") else "chosen"
    better = "chosen" if cells.has("chosen") else "response"
    prefix: Messages = []
    answer: str | Message = ""
    is_chat = False
    if cells.has_messages(better) or use == "preference" or (use == "sft" and trained == better):
        prefix, answer, is_chat = _answer(cells, better, use)
    asked = cells.column("prompt" if cells.has("prompt") else "messages")
    whole = _closed(_joined(prompt, prefix, is_chat, cells, better), asked)
    if use == "prompt":
        return [Example(whole)]
    if use == "sft":
        return [Example(whole, [answer if trained == better else _answer(cells, trained, use)[1]])]
    prefix, worse, is_chat = _answer(cells, "rejected", use)
    if is_chat and not _same(_joined(prompt, prefix, is_chat, cells, "rejected"), whole):
        raise UserError("chosen and rejected answer different prompts")
    return [Example(whole, [answer, worse])]


def read_conversation(cells: Cells, use: Use) -> list[Example]:
    """Messages whose last one is the answer, perhaps beside a rejected one; or messages up to the answer, which is in
    the columns chosen and rejected."""
    column = cells.column("messages")
    messages = up_to_last_target(cells.messages("messages"), column, use != "prompt")
    if cells.has("chosen"):
        return _answered(messages, cells, use)
    if use == "prompt" and messages[-1]["role"] != "assistant":
        return [Example(messages)]
    prompt, answer = split_answer(messages, column, use != "prompt")
    if not prompt:
        raise UserError(f"'{column}' has nothing before the assistant's answer")
    answers = [answer]
    if use == "preference":
        prefix, rejected, _ = _answer(cells, "rejected", use)
        if prefix and not _same(prefix, prompt):
            raise UserError(f"'{cells.column('rejected')}' answers another prompt than '{column}'")
        answers.append(rejected)
    return [_of_use(_closed(prompt, column), answers, use)]


def read_implicit_preference(cells: Cells, use: Use) -> list[Example]:
    """Two conversations or texts that start with the same prompt, which ends where they begin to differ."""
    if cells.has_messages("chosen") and cells.has_messages("rejected"):
        whole, other = cells.messages("chosen"), cells.messages("rejected")
        if whole == other:
            raise UserError("chosen and rejected are equal")
        prompt, answer = split_answer(whole, cells.column("chosen"), use != "prompt")
        beside, worse = split_answer(other, cells.column("rejected"), use == "preference")
        if not _same(prompt, beside):
            raise UserError("chosen and rejected answer different prompts: they differ before the last message")
        if not prompt:
            raise UserError(f"'{cells.column('chosen')}' has nothing before the assistant's answer")
        return [_of_use(_closed(prompt, cells.column("chosen")), [answer, worse], use)]
    texts = [cells.text(role) for role in ("chosen", "rejected")]
    if texts[0] == texts[1]:
        raise UserError("chosen and rejected are equal")
    shorter = min(map(len, texts))
    cut = next((at for at in range(shorter) if texts[0][at] != texts[1][at]), None)
    if cut is None:  # one text starts with the other: its last character is the answer, as in TRL
        cut = max(0, shorter - 1)
    elif cut > 0 and texts[0][cut - 1] == " ":
        cut -= 1
    if cut == 0:
        raise UserError("chosen and rejected do not start with the same prompt")
    return [_of_use(texts[0][:cut], [text[cut:] for text in texts], use)]


def read_transcript(cells: Cells, use: Use) -> list[Example]:
    """Text with turns that start with two line breaks and `Human:` or `Assistant:`; the last turn is the answer."""
    role = "messages" if cells.has("messages") else "chosen"
    prompt, answer = _split_transcript(cells, role)
    answers = [answer]
    if use == "preference":
        other, worse = _split_transcript(cells, "rejected")
        answers.append(worse)
        if other != prompt:
            raise UserError("chosen and rejected answer different prompts: they differ before the last turn")
    if cells.reading.rendering == "text":
        return [_of_use(prompt, answers, use)]
    first, *parts = re.split(r"\n\n(Human|Assistant):", prompt)
    turns = [{"role": "system", "content": first.strip()}] if first.strip() else []
    names = {"Human": "user", "Assistant": "assistant"}
    turns += [{"role": names[parts[at]], "content": parts[at + 1].strip()} for at in range(0, len(parts) - 2, 2)]
    if not turns:
        raise UserError("the transcript has no turn before the answer")
    return [_of_use(turns, [answer.strip() for answer in answers], use)]


def _split_transcript(cells: Cells, role: str) -> tuple[str, str]:
    """(everything up to and including the last `Assistant:`, the rest)."""
    before, marker, answer = cells.text(role).rpartition(ASSISTANT)
    if not marker:
        raise UserError(f"'{cells.column(role)}' has no turn that starts with {ASSISTANT!r}")
    if HUMAN in answer:
        raise UserError(f"'{cells.column(role)}' ends with a turn of the human; expected the assistant's")
    return before + marker, answer


def read_alpaca(cells: Cells, use: Use) -> list[Example]:
    """An instruction with an optional input and earlier turns, and its answer (or the better and the worse one)."""
    question, reading = cells.text("prompt"), cells.reading
    extra = cells.value("input") if cells.has("input") else None
    history = _history(cells)
    if extra is not None and not isinstance(extra, str):
        raise UserError(f"'{cells.column('input')}' is {kind_of(extra)}; expected text")
    if not question:
        question, extra = extra or "", None
    if not question:
        raise UserError("the instruction is empty")
    whole = f"{question}\n\n{extra}" if extra else question
    prompt: str | Messages = whole
    if reading.rendering == "chat":
        if reading.input_template is not None:
            whole = reading.input_template.replace("{}", whole)
        prompt = [*history, {"role": "user", "content": whole}]
    elif history:
        raise UserError("'history' holds earlier turns, which need the chat template; --apply_chat_template True")
    elif reading.input_template is None:
        prompt = _ALPACA.format(_ALPACA_INPUT if extra else "") + f"### Instruction:\n{question}\n\n"
        prompt += (f"### Input:\n{extra}\n\n" if extra else "") + "### Response:\n"
    if cells.has("pair"):
        answers = cells.value("pair")
        if not (isinstance(answers, list) and len(answers) == 2 and all(isinstance(text, str) for text in answers)):
            raise UserError(f"'{cells.column('pair')}' is {kind_of(answers)}; expected a better and a worse answer")
        return [_of_use(prompt, answers, use)]
    roles = ["chosen", "rejected"] if use == "preference" else ["response" if cells.has("response") else "chosen"]
    return [Example(prompt, [] if use == "prompt" else [cells.text(role) for role in roles])]


def read_better(cells: Cells, use: Use) -> list[Example]:
    """A prompt, two answers, and which one is better: by the end of its column's name, that name, or its place."""
    texts = [cells.text(role) for role in ("first", "second")]
    names = [cells.column(role).lower() for role in ("first", "second")]
    ends = [name.rpartition("_")[2] for name in names]
    known = {name: place for pair in (("0", "1"), ends, names) for place, name in enumerate(pair)}
    given = cells.text("better").strip().lower()
    if given not in known:
        expected = f"expected one of {', '.join(known)} (places count from 0)"
        raise UserError(f"'{cells.column('better')}' is {given!r}; {expected}")
    better = known[given]
    return [_of_use(_closed(prompt_value(cells), cells.column("prompt")), [texts[better], texts[1 - better]], use)]


def read_question_answer(cells: Cells, use: Use) -> list[Example]:
    """A question and its answer, which may end with the result after `####`."""
    return [Example(cells.text("prompt"), [] if use == "prompt" else [cells.text("response")])]


def read_text(cells: Cells, use: Use) -> list[Example]:
    """Plain text without a prompt, for SFT."""
    return [Example("", [cells.text("response")])]


def prompt_value(cells: Cells) -> str | Messages:
    """The prompt of a row as text or messages, after its earlier turns if there are any."""
    value = cells.value("prompt")
    if isinstance(value, str):
        return [*_history(cells), {"role": "user", "content": value}] if cells.has("history") else value
    if isinstance(value, list) and (not value or looks_like_messages(value)):
        return [*_history(cells), *cells.messages("prompt", value)]
    raise UserError(f"'{cells.column('prompt')}' is {kind_of(value)}; expected text or a list of role/content messages")


def _history(cells: Cells) -> Messages:
    """The earlier turns of a row: pairs of question and answer, or messages; [] without any."""
    history = cells.listed("history") if cells.has("history") else None
    if looks_like_messages(history):
        return cells.messages("history", history)
    if not isinstance(history or [], list):
        raise UserError(f"'history' is {kind_of(history)}; expected pairs of question and answer")
    turns: Messages = []
    for pair in history or []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise UserError(f"'history' holds {kind_of(pair)}; expected pairs of question and answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _answer(cells: Cells, role: str, use: Use) -> tuple[Messages, str | Message, bool]:
    """(messages before the answer, the answer, whether it is given as messages)."""
    value = cells.value(role)
    if isinstance(value, str | bool | int | float):
        return [], cells.text(role), False
    if looks_like_messages(value):
        return *split_answer(cells.messages(role, value), cells.column(role), use != "prompt"), True
    expected = "expected text (or messages that end with the assistant's)"
    raise UserError(f"'{cells.column(role)}' is {kind_of(value)}; {expected}")


def _same(one: str | Messages, other: str | Messages) -> bool:
    """Whether prompts are equal, whatever turns of messages are excluded from training."""
    bare = [prompt if isinstance(prompt, str) else without_context(prompt) for prompt in (one, other)]
    return bare[0] == bare[1]


def _joined(prompt: str | Messages, prefix: Messages, is_chat: bool, cells: Cells, role: str) -> str | Messages:
    """The whole prompt of the answer of `role`: `prompt` and the messages before the answer, which may repeat it."""
    if isinstance(prompt, str):
        if not is_chat:
            return prompt
        if not prefix:
            return [{"role": "user", "content": prompt}]
        if prompt.strip() not in [turn["content"].strip() for turn in prefix if turn["role"] == "user"]:
            raise UserError(f"the prompt is not among the messages of '{cells.column(role)}'")
        return prefix
    if not prefix or prefix[0]["role"] == "assistant":
        return prompt + prefix
    if _same(prefix[: len(prompt)], prompt) or _same(prefix[-len(prompt) :], prompt):
        return prefix
    raise UserError(f"the messages of '{cells.column(role)}' do not start with those of the prompt")


def _closed(prompt: str | Messages, column: str) -> str | Messages:
    """A prompt that the assistant can answer: its last message is not the assistant's."""
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise UserError(f"the prompt in '{column}' ends with the assistant's message: nothing is left to answer")
    return prompt


def _of_use(prompt: str | Messages, answers: list[Any], use: Use) -> Example:
    """[better, worse] answers cut to what a use takes."""
    return Example(prompt, answers[: {"sft": 1, "preference": 2, "prompt": 0}[use]])
