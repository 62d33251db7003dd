"""The forms of data sets with one answer or one pair per row: from the columns of a row to its prompt and answers.

Each reader takes `(row, reading, use)` and returns drafts. The prompt of a row does not depend on `use`. Errors do not
name the row.
"""

from __future__ import annotations

import re
from typing import Any

from dschat_ppo.data.examples import Row, Use, has_value, value_at
from dschat_ppo.data.form_rows import Draft, Reading
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


def read_prompt_response(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """A prompt and one answer, each text or messages."""
    prompt = prompt_value(row, reading)
    columns = dict(reading.columns)
    if use == "prompt" and not _holds_messages(row, reading, "response"):
        return [Draft(_closed(prompt, columns["prompt"]))]
    prefix, answer, is_chat = _answer(row, reading, "response", use)
    prompt = _closed(_joined(prompt, prefix, is_chat, columns["response"]), columns["prompt"])
    return [Draft(prompt, [] if use == "prompt" else [answer])]


def read_conversation(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """Messages whose last one is the answer, perhaps beside a rejected one; or messages up to the answer, which is in
    the columns chosen and rejected."""
    column = dict(reading.columns)["messages"]
    messages = up_to_last_target(reading.messages(value_at(row, column), "messages"), column, use != "prompt")
    if reading.column("chosen"):
        return _pair(messages, row, reading, use)
    if use == "prompt" and messages[-1]["role"] != "assistant":
        return [Draft(messages)]
    prompt, answer = split_answer(messages, column, use != "prompt")
    if not prompt:
        raise UserError(f"'{column}' has nothing before the assistant's answer")
    answers = [answer]
    if use == "preference":
        prefix, rejected, _ = _answer(row, reading, "rejected", use)
        if prefix and not _same(prefix, prompt):
            raise UserError(f"'{reading.column('rejected')}' answers another prompt than '{column}'")
        answers.append(rejected)
    return [_of_use(_closed(prompt, column), answers, use)]


def read_preference(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """A prompt, the better and the worse answer, each text or messages."""
    return _pair(prompt_value(row, reading), row, reading, use)


def _pair(prompt: str | Messages, row: Row, reading: Reading, use: Use) -> list[Draft]:
    columns = dict(reading.columns)
    asked = columns.get("prompt") or columns["messages"]
    if use == "prompt" and not _holds_messages(row, reading, "chosen"):
        return [Draft(_closed(prompt, asked))]
    if use == "sft" and reading.column("response") and not _holds_messages(row, reading, "chosen"):
        return [Draft(_closed(prompt, asked), [_answer(row, reading, "response", use)[1]])]
    prefix, chosen, is_chat = _answer(row, reading, "chosen", use)
    joined = _closed(_joined(prompt, prefix, is_chat, columns["chosen"]), asked)
    if use == "prompt":
        return [Draft(joined)]
    if use == "sft":
        return [Draft(joined, [_answer(row, reading, "response", use)[1] if reading.column("response") else chosen])]
    prefix, rejected, is_chat = _answer(row, reading, "rejected", use)
    other = _joined(prompt, prefix, is_chat, columns["rejected"])
    if is_chat and not _same(other, joined):
        raise UserError("chosen and rejected answer different prompts")
    return [Draft(joined, [chosen, rejected])]


def read_implicit_preference(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """Two conversations or texts that start with the same prompt, which ends where they begin to differ."""
    columns = dict(reading.columns)
    chosen, rejected = (reading.value(row, role) for role in ("chosen", "rejected"))
    if looks_like_messages(chosen) and looks_like_messages(rejected):
        whole = [reading.messages(chosen, "chosen"), reading.messages(rejected, "rejected")]
        if whole[0] == whole[1]:
            raise UserError("chosen and rejected are equal")
        prompt, answer = split_answer(whole[0], columns["chosen"], use != "prompt")
        other, worse = split_answer(whole[1], columns["rejected"], use == "preference")
        if not _same(prompt, other):
            raise UserError("chosen and rejected answer different prompts: they differ before the last message")
        if not prompt:
            raise UserError(f"'{columns['chosen']}' has nothing before the assistant's answer")
        return [_of_use(_closed(prompt, columns["chosen"]), [answer, worse], use)]
    texts = [reading.text(row, role) for role in ("chosen", "rejected")]
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


def read_transcript(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """Text with turns that start with two line breaks and `Human:` or `Assistant:`; the last turn is the answer."""
    if reading.column("messages"):
        prompt, answer = _split_transcript(reading.text(row, "messages"), dict(reading.columns)["messages"])
        answers = [answer]
    else:
        prompt, answer = _split_transcript(reading.text(row, "chosen"), dict(reading.columns)["chosen"])
        answers = [answer]
        if use == "preference":
            other, worse = _split_transcript(reading.text(row, "rejected"), dict(reading.columns)["rejected"])
            answers.append(worse)
            if other != prompt:
                raise UserError("chosen and rejected answer different prompts: they differ before the last turn")
    if reading.rendering == "chat":
        return [_of_use(_turns(prompt), [answer.strip() for answer in answers], use)]
    return [_of_use(prompt, answers, use)]


def _split_transcript(text: str, column: str) -> tuple[str, str]:
    """(everything up to and including the last `Assistant:`, the rest)."""
    before, marker, answer = text.rpartition(ASSISTANT)
    if not marker:
        raise UserError(f"'{column}' has no turn that starts with {ASSISTANT!r}")
    if HUMAN in answer:
        raise UserError(f"'{column}' ends with a turn of the human; expected the assistant's")
    return before + marker, answer


def _turns(prompt: str) -> Messages:
    """The messages of a transcript that ends with `Assistant:`."""
    first, *parts = re.split(r"\n\n(Human|Assistant):", prompt)
    turns = [{"role": "system", "content": first.strip()}] if first.strip() else []
    names = {"Human": "user", "Assistant": "assistant"}
    turns += [{"role": names[parts[at]], "content": parts[at + 1].strip()} for at in range(0, len(parts) - 2, 2)]
    if not turns:
        raise UserError("the transcript has no turn before the answer")
    return turns


def read_alpaca(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """An instruction with an optional input and earlier turns, and its answer (or the better and the worse one)."""
    question = reading.text(row, "prompt")
    extra = reading.value(row, "input") if reading.column("input") else None
    history = _history(row, reading)
    if extra is not None and not isinstance(extra, str):
        raise UserError(f"'{reading.column('input')}' is {kind_of(extra)}; expected text")
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
    if reading.column("pair"):
        answers = reading.value(row, "pair")
        if not (isinstance(answers, list) and len(answers) == 2 and all(isinstance(text, str) for text in answers)):
            raise UserError(f"'{reading.column('pair')}' is {kind_of(answers)}; expected a better and a worse answer")
        return [_of_use(prompt, answers, use)]
    roles = ["chosen", "rejected"] if use == "preference" else ["response" if reading.column("response") else "chosen"]
    return [Draft(prompt, [] if use == "prompt" else [reading.text(row, role) for role in roles])]


def _history(row: Row, reading: Reading) -> Messages:
    """The earlier turns of a row: pairs of question and answer, or messages; [] without any."""
    history = reading.listed(row, "history") if reading.column("history") else None
    if looks_like_messages(history):
        return reading.messages(history, "history")
    if isinstance(history, str) and history.strip():
        raise UserError(f"'history' is {kind_of(history)}; expected pairs of question and answer")
    turns: Messages = []
    for pair in history or []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise UserError(f"'history' holds {kind_of(pair)}; expected pairs of question and answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def read_better(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """A prompt, two answers, and which one is better: by the end of its column's name, that name, or its place."""
    columns, texts = dict(reading.columns), [reading.text(row, role) for role in ("first", "second")]
    names = [columns["first"].lower(), columns["second"].lower()]
    ends = [name.rpartition("_")[2] for name in names]
    given = reading.text(row, "better").strip().lower()
    known = {**dict(zip(("0", "1"), (0, 1), strict=True)), **dict(zip(ends, (0, 1), strict=True)),
             **dict(zip(names, (0, 1), strict=True))}  # fmt: skip
    if given not in known:
        raise UserError(f"'{columns['better']}' is {given!r}; expected one of {', '.join(known)} (places count from 0)")
    better = known[given]
    return [_of_use(_closed(prompt_value(row, reading), columns["prompt"]), [texts[better], texts[1 - better]], use)]


def read_question_answer(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """A question and its answer, which may end with the result after `####`."""
    return [Draft(reading.text(row, "prompt"), [] if use == "prompt" else [reading.text(row, "response")])]


def read_text(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """Plain text without a prompt, for SFT."""
    return [Draft("", [reading.text(row, "response")])]


def prompt_value(row: Row, reading: Reading) -> str | Messages:
    """The prompt of a row as text or messages."""
    column = dict(reading.columns)["prompt"]
    value = reading.value(row, "prompt")
    if isinstance(value, str) and reading.column("history"):
        return [*_history(row, reading), {"role": "user", "content": value}]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and (not value or looks_like_messages(value)):
        return [*_history(row, reading), *reading.messages(value, "prompt")]
    raise UserError(f"'{column}' is {kind_of(value)}; expected text or a list of role/content messages")


def _answer(row: Row, reading: Reading, role: str, use: Use) -> tuple[Messages, str | Message, bool]:
    """(messages before the answer, the answer, whether it is given as messages)."""
    column = dict(reading.columns)[role]
    value = reading.value(row, role)
    if isinstance(value, str | bool | int | float):
        return [], reading.text(row, role), False
    if looks_like_messages(value):
        return *split_answer(reading.messages(value, role), column, use != "prompt"), True
    raise UserError(f"'{column}' is {kind_of(value)}; expected text (or messages that end with the assistant's)")


def _same(one: str | Messages, other: str | Messages) -> bool:
    """Whether prompts are equal, whatever turns of messages are excluded from training."""
    bare = [prompt if isinstance(prompt, str) else without_context(prompt) for prompt in (one, other)]
    return bare[0] == bare[1]


def _holds_messages(row: Row, reading: Reading, role: str) -> bool:
    column = reading.column(role)
    return column is not None and has_value(row, column) and looks_like_messages(reading.value(row, role))


def _joined(prompt: str | Messages, prefix: Messages, is_chat: bool, column: str) -> str | Messages:
    """The whole prompt of an answer: `prompt` and the messages before the answer, which may repeat it."""
    if isinstance(prompt, str):
        if not is_chat:
            return prompt
        if not prefix:
            return [{"role": "user", "content": prompt}]
        if prompt.strip() not in [turn["content"].strip() for turn in prefix if turn["role"] == "user"]:
            raise UserError(f"the prompt is not among the messages of '{column}'")
        return prefix
    if not prefix or prefix[0]["role"] == "assistant":
        return prompt + prefix
    if _same(prefix[: len(prompt)], prompt) or _same(prefix[-len(prompt) :], prompt):
        return prefix
    raise UserError(f"the messages of '{column}' do not start with those of the prompt")


def _closed(prompt: str | Messages, column: str) -> str | Messages:
    """A prompt that the assistant can answer: its last message is not the assistant's."""
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise UserError(f"the prompt in '{column}' ends with the assistant's message: nothing is left to answer")
    return prompt


def _of_use(prompt: str | Messages, answers: list[Any], use: Use) -> Draft:
    """[better, worse] answers cut to what a use takes."""
    return Draft(prompt, answers[: {"sft": 1, "preference": 2, "prompt": 0}[use]])
