"""Readers of the forms: from the columns of a row to its prompt and its answers.

A reader takes `(cells, use)` and returns the prompt, which does not depend on `use`, and the
answers that the use may take; for "prompt" it reads nothing that only answers need. What holds for
every form (nothing empty, nothing equal, which answers a use takes) is checked in `forms.py`.
Errors do not name the row.
"""

from __future__ import annotations

import re
from os.path import commonprefix
from typing import Any

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data.cells import Cells, JudgedAnswer, Prompt, PromptAndAnswers, judged
from dschat_ppo.data.examples import Message, Messages, checked
from dschat_ppo.data.messages import (
    CONTEXT,
    looks_like_messages,
    without_context,
)
from dschat_ppo.errors import UserError

_HUMAN = "\n\nHuman:"
_ASSISTANT = "\n\nAssistant:"
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes"
    " the request.\n\n"
)
_ALPACA_INPUT = ", paired with an input that provides further context"


def pair_of(answers: list[Any]) -> list[JudgedAnswer]:
    """The better answer, and the worse one or several of them, if any."""
    pair = [JudgedAnswer(answer, 1.0, "chosen") for answer in answers[:1]]
    for position, answer in enumerate(answers[1:], start=1):
        name = "rejected"
        if len(answers) > 2:
            name = f"rejected answer {position}"
        pair.append(JudgedAnswer(answer, 0.0, name))
    return pair


# Prompts and answers that are text or messages


def read_columns(cells: Cells, use: Use) -> PromptAndAnswers:
    """A prompt, or a conversation that holds it, with an answer, or a better and a worse one; each
    is text or messages. SFT learns the response if there is one. Answers may repeat the prompt, and
    as messages also continue it. Two conversations that part before their last messages are answers
    of several messages to what both begin with."""
    better = next((role for role in ("chosen", "response", "messages") if cells.has(role)), "")
    roles = _roles_to_read(cells, use, better)
    role_of_prompt = ""
    if cells.has("prompt"):
        role_of_prompt = "prompt"
    elif cells.has("messages") and better == "chosen":
        role_of_prompt = "messages"
    said = cells.said(filter(None, [role_of_prompt, *roles]))
    prompt: Prompt | None = said.get(role_of_prompt)
    full_prompt = prompt
    answers = list[Any]()
    conversations = list[Messages]()
    for role in roles:
        if all(isinstance(text, str) for text in said[role]):
            answers += said[role]
            continue
        *before, answer = said[role]
        if role == "messages" and use == "prompt" and answer["role"] != "assistant":
            return [*before, answer], []
        _check_answer(answer, cells.called(role), use)
        begins_itself = before and before[0]["role"] != "assistant"
        if answers and begins_itself and not _same(before, full_prompt):
            prompt_of_answer = before
        else:
            prompt_of_answer = _with_prompt(prompt, before, cells.called(role))
        conversation = [*prompt_of_answer, answer]
        if answers and not _same(prompt_of_answer, full_prompt):
            if use != "preference" or not conversations:
                raise UserError("chosen and rejected answer different prompts")
            return _parted(conversations[0], conversation)
        conversations.append(conversation)
        if not answers:
            full_prompt = prompt_of_answer
        if prompt is None:
            prompt = prompt_of_answer
        answers.append(_bare(answer))
    if isinstance(prompt, str) and _answers_repeat(prompt, cells, better):
        answers = [
            answer.removeprefix(prompt) if isinstance(answer, str) else answer for answer in answers
        ]
    if use == "sft":
        answers = answers[-1:]
    return full_prompt or "", pair_of(answers)


def _parted(chosen: Messages, rejected: Messages) -> PromptAndAnswers:
    """What two conversations have in common, and the rest of each as an answer. `UserError` if they
    do not part at a message of the assistant, before which the user asks the same in both."""
    parting = 0
    for first, second in zip(chosen, rejected, strict=False):
        if not _same([first], [second]):
            break
        parting += 1
    is_of_assistant = all(
        parting < len(messages) and messages[parting]["role"] == "assistant"
        for messages in (chosen, rejected)
    )
    if parting == 0 or not is_of_assistant:
        raise UserError(
            "chosen and rejected answer different prompts: they part at message"
            f" {parting + 1}, which is not the assistant's in both"
        )
    answers = list[Any]()
    for messages in (chosen, rejected):
        rest = messages[parting:]
        answers.append(_bare(rest[0]) if len(rest) == 1 else rest)
    return chosen[:parting], pair_of(answers)


def _bare(answer: Message) -> str | Message:
    """The content of a message, if it has nothing else."""
    if set(answer) == {"role", "content"}:
        return str(answer["content"])
    return answer


def _roles_to_read(cells: Cells, use: Use, better: str) -> list[str]:
    """The roles of the columns whose answers a use takes. `better`: the role of the better answer,
    or "". If that is a conversation, its messages are the prompt of all uses, so it is read
    first."""
    roles = list[str]()
    if use == "sft":
        roles = ["response" if cells.has("response") else better]
    elif use == "preference":
        roles = [better, "rejected"]
    if better == "messages" or (better and looks_like_messages(cells.known(better))):
        return list(dict.fromkeys([better, *roles]))
    return roles


def _check_answer(answer: Message, column: str, use: Use) -> None:
    """Refuse a last message that is not the assistant's, or that a use may not train."""
    if answer["role"] != "assistant":
        raise UserError(
            f"{column} ends with a message of role '{answer['role']}', not the assistant's"
        )
    if CONTEXT in answer and use != "prompt":
        raise UserError(f"the answer of {column} is excluded from training (weight 0)")


def _answers_repeat(prompt: str, cells: Cells, better: str) -> bool:
    """Whether the better answer and the rejected one both start with the prompt."""
    if not better or not cells.has("rejected"):
        return False
    return all(str(cells.known(role)).startswith(prompt) for role in (better, "rejected"))


def _with_prompt(prompt: Prompt | None, before: Messages, column: str) -> Messages:
    """The whole prompt of an answer: a prompt and the messages before the answer, which continue or
    repeat it."""
    if prompt is None and not before:
        raise UserError(f"{column} has nothing before the assistant's answer")
    if prompt is None or prompt == []:
        return before
    if not before or before[0]["role"] == "assistant":
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return prompt + before
    if isinstance(prompt, str):
        questions = [turn["content"].strip() for turn in before if turn["role"] == "user"]
        if prompt.strip() not in questions:
            raise UserError(f"the prompt is not among the messages of {column}")
        return before
    is_start = _same(before[: len(prompt)], prompt)
    is_end = _same(before[-len(prompt) :], prompt)
    if not is_start and not is_end:
        raise UserError(f"the messages of {column} do not start with those of the prompt")
    return before


def _same(first: Prompt | None, second: Prompt | None) -> bool:
    """Whether prompts are equal, whatever messages are excluded from training."""
    if isinstance(first, list):
        first = without_context(first)
    if isinstance(second, list):
        second = without_context(second)
    return first == second


def read_implicit_preference(cells: Cells, use: Use) -> PromptAndAnswers:
    """Two conversations or texts that start with the same prompt; that of texts ends where they
    begin to differ."""
    if all(looks_like_messages(cells.value(role)) for role in ("chosen", "rejected")):
        return read_columns(cells, use)
    chosen = cells.text("chosen")
    rejected = cells.text("rejected")
    cut = len(commonprefix([chosen, rejected]))
    if chosen[cut - 1 : cut] == " " or cut == min(len(chosen), len(rejected)):
        # of a text with which the other starts, the last character is the answer, as in TRL
        cut -= 1
    if cut <= 0:
        raise UserError("chosen and rejected do not start with the same prompt")
    return chosen[:cut], pair_of([chosen[cut:], rejected[cut:]])


def is_transcript(value: Any) -> bool:
    """Whether a value is text with a turn of the assistant, as those of Anthropic."""
    return isinstance(value, str) and _ASSISTANT in value


def read_transcript(cells: Cells, use: Use) -> PromptAndAnswers:
    """Text with messages that start with two line breaks and `Human:` or `Assistant:`; the last
    one is the answer. As messages, two transcripts may part before it."""
    if use == "preference":
        roles = ["chosen", "rejected"]
    elif cells.has("messages"):
        roles = ["messages"]
    else:
        roles = ["chosen"]
    prompts = list[str]()
    answers = list[str]()
    for role in roles:
        before, marker, answer = cells.text(role).rpartition(_ASSISTANT)
        if not marker or _HUMAN in answer:
            raise UserError(
                f"{cells.called(role)} does not end with a turn that starts with {_ASSISTANT!r}"
            )
        prompts.append(before)
        answers.append(answer.strip() if cells.as_chat else answer)
    has_parted = prompts[-1] != prompts[0]
    if not cells.as_chat:
        if has_parted:
            raise UserError(
                "chosen and rejected answer different prompts: they differ before the last turn;"
                " --apply_chat_template True compares them as messages, from the turn on at which"
                " they part"
            )
        return prompts[0] + _ASSISTANT, pair_of(answers)
    conversations = [_messages_of_transcript(prompt) for prompt in prompts]
    if has_parted:
        for messages, answer in zip(conversations, answers, strict=True):
            messages.append({"role": "assistant", "content": answer})
        return _parted(*conversations)
    return conversations[0], pair_of(answers)


def _messages_of_transcript(transcript: str) -> Messages:
    """The messages of a transcript; the text before the first `Human:` is the system's."""
    # then the name and the text of each message
    first, *names_and_texts = re.split(r"\n\n(Human|Assistant):", transcript)
    messages = Messages()
    if first.strip():
        messages.append({"role": "system", "content": first.strip()})
    for name, text in zip(names_and_texts[::2], names_and_texts[1::2], strict=True):
        role = "user" if name == "Human" else "assistant"
        messages.append({"role": role, "content": text.strip()})
    return messages


def read_alpaca(cells: Cells, use: Use) -> PromptAndAnswers:
    """An instruction with an optional input and earlier messages, and its answer, or a better and a
    worse one."""
    lead = 1
    if cells.has("first"):
        cells, lead = judged(cells, use)
    question = cells.text("prompt")
    template = cells.input_template
    history = cells.history()
    extra = ""
    if cells.has("input"):
        extra = cells.value("input") or ""
    checked(extra, str, f"'{cells.columns.get('input')}'", "text")
    if not question:
        question = extra
        extra = ""
    if not question:
        raise UserError("the instruction is empty")
    prompt: Prompt = question
    if extra:
        prompt = f"{question}\n\n{extra}"
    if cells.as_chat:
        content = (template or "{}").replace("{}", str(prompt))
        prompt = [*history, {"role": "user", "content": content}]
    elif history:
        raise UserError(
            "'history' holds earlier messages, which need the chat template; --apply_chat_template"
            " True"
        )
    elif template is None:
        prompt = _alpaca_prompt(question, extra)
    roles = list[str]()
    if use == "sft":
        roles = ["response" if cells.has("response") else "chosen"]
    elif use == "preference":
        roles = ["chosen", "rejected"]
    answers = pair_of([text for role in roles for text in cells.texts(role)])
    return prompt, answers if lead else []


def _alpaca_prompt(question: str, extra: str) -> str:
    """The text of Alpaca around an instruction and its input, which may be ""."""
    if not extra:
        return f"{_ALPACA.format('')}### Instruction:\n{question}\n\n### Response:\n"
    return (
        f"{_ALPACA.format(_ALPACA_INPUT)}### Instruction:\n{question}\n\n"
        f"### Input:\n{extra}\n\n### Response:\n"
    )
