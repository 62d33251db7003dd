"""Readers of the forms: from the columns of a row to its prompt and answers.

Each reader takes `(cells, use)` and returns examples before the rendering. The prompt of a row does not depend on
`use`. For "prompt" nothing is read that only answers need. Errors do not name the row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any, cast

from dschat_ppo.data.examples import Example, Use, has_value, number_of, value_at
from dschat_ppo.data.forms import GROUP_ANSWERS, GROUP_LABELS, LABELS, RANKS, SCORES, Cells, is_label
from dschat_ppo.data.messages import (
    CONTEXT,
    Message,
    Messages,
    checked,
    from_json,
    kind_of,
    looks_like_messages,
    split_answer,
    without_context,
)
from dschat_ppo.errors import UserError

_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
_ALPACA_INPUT = ", paired with an input that provides further context"
_TEXTS = ("text", "answer", "response", "completion", "content")  # keys of a ranked answer that is an object
_SCORE = ("score", "overall_score", "rating", "reward")
_STEP_LABELS = {"+": 1.0, "-": 0.0, "true": 1.0, "false": 0.0}
_RATINGS = {1: 1.0, 0: 1.0, -1: 0.0, None: math.nan}  # of PRM800K: good, neutral, bad, not rated
_SHEPHERD_TAG = "ки"  # ends a step in Math-Shepherd


# Prompts and answers that are text or messages


def _prompt(cells: Cells) -> str | Messages:
    """The prompt of a row as text or messages, after its earlier turns if there are any."""
    value = cells.value("prompt")
    if isinstance(value, str):
        return [*_history(cells), {"role": "user", "content": value}] if cells.has("history") else value
    if value != [] and not looks_like_messages(value):
        raise cells.wrong("prompt", value, "text or a list of role/content messages")
    return [*_history(cells), *cells.messages("prompt", value)]


def _history(cells: Cells) -> Messages:
    """The earlier turns of a row: pairs of question and answer, or messages; [] without any."""
    history = cells.listed("history") if cells.has("history") else None
    if looks_like_messages(history):
        return cells.messages("history", history)
    turns: Messages = []
    for pair in checked(history or [], list, "'history'", "pairs of question and answer"):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise UserError(f"'history' holds {kind_of(pair)}; expected pairs of question and answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _answer(cells: Cells, role: str, use: Use) -> tuple[Messages | None, str | Message]:
    """(messages before the answer, or None if it is text; the answer)."""
    value = cells.value(role)
    if isinstance(value, str | bool | int | float):
        return None, cells.text(role)
    if not looks_like_messages(value):
        raise cells.wrong(role, value, "text (or messages that end with the assistant's)")
    return split_answer(cells.messages(role, value), cells.column(role), use != "prompt")


def _same(one: str | Messages, other: str | Messages) -> bool:
    """Whether prompts are equal, whatever turns of messages are excluded from training."""
    bare = [prompt if isinstance(prompt, str) else without_context(prompt) for prompt in (one, other)]
    return bare[0] == bare[1]


def _joined(prompt: str | Messages, before: Messages | None, cells: Cells, role: str) -> str | Messages:
    """The whole prompt of the answer of `role`: `prompt` and the messages before the answer, which may repeat it."""
    if isinstance(prompt, str):
        if not before:
            return prompt if before is None else [{"role": "user", "content": prompt}]
        if prompt.strip() not in [turn["content"].strip() for turn in before if turn["role"] == "user"]:
            raise UserError(f"the prompt is not among the messages of '{cells.column(role)}'")
        return before
    if not before or before[0]["role"] == "assistant":
        return prompt + (before or [])
    if _same(before[: len(prompt)], prompt) or _same(before[-len(prompt) :], prompt):
        return before
    raise UserError(f"the messages of '{cells.column(role)}' do not start with those of the prompt")


def _of_use(prompt: str | Messages, answers: list[Any], use: Use, column: str = "") -> list[Example]:
    """[better, worse] answers cut to what a use takes. A prompt of messages leaves the assistant something to answer;
    `column` is its column."""
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise UserError(f"the prompt in '{column}' ends with the assistant's message: nothing is left to answer")
    return [Example(prompt, answers[: {"sft": 1, "preference": 2}.get(use, 0)])]


def read_pair(cells: Cells, use: Use) -> list[Example]:
    """A prompt and one answer, or a better and a worse one, each text or messages."""
    return _answered(_prompt(cells), cells, use)


def _answered(prompt: str | Messages, cells: Cells, use: Use) -> list[Example]:
    """The answers to a prompt, which messages of the (better) answer may repeat or continue. SFT learns the response if
    there is one."""
    better = "chosen" if cells.has("chosen") else "response"
    trained = "response" if cells.has("response") else "chosen"
    before, answer = cast(tuple[Messages | None, str | Message], (None, ""))
    if cells.has_messages(better) or use == "preference" or (use == "sft" and trained == better):
        before, answer = _answer(cells, better, use)
    whole = _joined(prompt, before, cells, better)
    column = next(cells.column(role) for role in ("prompt", "messages", better) if cells.has(role))
    [example] = _of_use(whole, [answer], use, column)
    if use == "sft" and trained != better:
        return [Example(whole, [_answer(cells, trained, use)[1]])]
    if use != "preference":
        return [example]
    before, worse = _answer(cells, "rejected", use)
    if before is not None and not _same(_joined(prompt, before, cells, "rejected"), whole):
        raise UserError("chosen and rejected answer different prompts")
    return [Example(whole, [answer, worse])]


def read_conversation(cells: Cells, use: Use) -> list[Example]:
    """Messages whose last one is the answer, perhaps beside a rejected one; or messages up to the answer, which is in
    the columns chosen and rejected. If the last turn is excluded from training, the last one that is not is the answer;
    if all are, the row has a prompt alone."""
    column, messages = cells.column("messages"), cells.messages("messages")
    if CONTEXT in messages[-1]:
        targets = [at for at, turn in enumerate(messages) if turn["role"] == "assistant" and CONTEXT not in turn]
        if not targets and (use != "prompt" or len(messages) == 1):
            raise UserError(f"'{column}' excludes every turn of the assistant from training")
        messages = messages[: targets[-1] + 1] if targets else messages[:-1]
    if cells.has("chosen"):
        return _answered(messages, cells, use)
    if use == "prompt" and messages[-1]["role"] != "assistant":
        return [Example(messages)]
    prompt, answer = _asked(messages, column, use != "prompt")
    answers = [answer]
    if use == "preference":
        before, rejected = _answer(cells, "rejected", use)
        if before and not _same(before, prompt):
            raise UserError(f"'{cells.column('rejected')}' answers another prompt than '{column}'")
        answers.append(rejected)
    return _of_use(prompt, answers, use, column)


def _asked(messages: Messages, column: str, is_trained: bool) -> tuple[Messages, str | Message]:
    """(messages before the answer, at least one; the answer)."""
    prompt, answer = split_answer(messages, column, is_trained)
    if not prompt:
        raise UserError(f"'{column}' has nothing before the assistant's answer")
    return prompt, answer


def read_implicit_preference(cells: Cells, use: Use) -> list[Example]:
    """Two conversations or texts that start with the same prompt, which ends where they begin to differ."""
    if cells.has_messages("chosen") and cells.has_messages("rejected"):
        prompt, _ = _asked(cells.messages("chosen"), cells.column("chosen"), use != "prompt")
        return _answered(prompt, cells, use)
    one, two = (cells.text(role) for role in ("chosen", "rejected"))
    if one == two:
        raise UserError("chosen and rejected are equal")
    cut = len(commonprefix([one, two]))
    if one[cut - 1 : cut] == " " or cut == min(len(one), len(two)):
        cut -= 1  # of a text with which the other starts, the last character is the answer, as in TRL
    if cut <= 0:
        raise UserError("chosen and rejected do not start with the same prompt")
    return _of_use(one[:cut], [one[cut:], two[cut:]], use)


def read_transcript(cells: Cells, use: Use) -> list[Example]:
    """Text with turns that start with two line breaks and `Human:` or `Assistant:`; the last turn is the answer."""
    prompts, answers = [], []
    for role in ("messages" if cells.has("messages") else "chosen", *(["rejected"] if use == "preference" else [])):
        before, marker, answer = cells.text(role).rpartition(_ASSISTANT)
        if not marker:
            raise UserError(f"'{cells.column(role)}' has no turn that starts with {_ASSISTANT!r}")
        if _HUMAN in answer:
            raise UserError(f"'{cells.column(role)}' ends with a turn of the human; expected the assistant's")
        prompts.append(before + marker)
        answers.append(answer)
    if prompts[-1] != prompts[0]:
        raise UserError("chosen and rejected answer different prompts: they differ before the last turn")
    if cells.reading.rendering == "text":
        return _of_use(prompts[0], answers, use)
    first, *parts = re.split(r"\n\n(Human|Assistant):", prompts[0].removesuffix(_ASSISTANT))
    turns = [{"role": "system", "content": first.strip()}] if first.strip() else []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        turns.append({"role": "user" if name == "Human" else "assistant", "content": text.strip()})
    if not turns:
        raise UserError("the transcript has no turn before the answer")
    return [Example(turns, _of_use("", [answer.strip() for answer in answers], use)[0].answers)]


def read_alpaca(cells: Cells, use: Use) -> list[Example]:
    """An instruction with an optional input and earlier turns, and its answer (or the better and the worse one)."""
    question, template, history = cells.text("prompt"), cells.reading.input_template, _history(cells)
    extra = cells.value("input") if cells.has("input") else ""
    if not isinstance(extra, str | None):
        raise cells.wrong("input", extra, "text")
    if not question:
        question, extra = extra or "", ""
    if not question:
        raise UserError("the instruction is empty")
    whole = f"{question}\n\n{extra}" if extra else question
    prompt: str | Messages = whole
    if cells.reading.rendering == "chat":
        whole = whole if template is None else template.replace("{}", whole)
        prompt = [*history, {"role": "user", "content": whole}]
    elif history:
        raise UserError("'history' holds earlier turns, which need the chat template; --apply_chat_template True")
    elif template is None:
        prompt = _ALPACA.format(_ALPACA_INPUT if extra else "") + f"### Instruction:\n{question}\n\n"
        prompt += (f"### Input:\n{extra}\n\n" if extra else "") + "### Response:\n"
    if cells.has("pair"):
        answers = cells.value("pair")
        if not (isinstance(answers, list) and len(answers) == 2 and all(isinstance(text, str) for text in answers)):
            raise cells.wrong("pair", answers, "a better and a worse answer")
        return _of_use(prompt, answers, use)
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
    return _of_use(_prompt(cells), [texts[better], texts[1 - better]], use, cells.column("prompt"))


def read_text(cells: Cells, use: Use) -> list[Example]:
    """Plain text without a prompt, for SFT."""
    return [Example("", [cells.text("response")])]


# Answers with ranks or labels


def read_ranked(cells: Cells, use: Use) -> list[Example]:
    """A list of answers with scores or ranks: the best one, every pair of different rank, or the best answer as a
    desirable and the worst one as an undesirable answer (of equal ones the first; nothing if all are equal)."""
    prompt = _prompt(cells)
    if use == "prompt":
        return [Example(prompt)]
    column, values = cells.column("response"), cells.listed("response")
    if not isinstance(values, list) or not values:
        raise cells.wrong("response", values, "a list of answers")
    texts = []
    for number, value in enumerate(values, start=1):
        if isinstance(value, dict):
            value = next((value[key] for key in _TEXTS if value.get(key) is not None), value)
        name = f"answer {number} of '{column}'"
        texts.append(checked(value, str, name, f"text, or an object with {', '.join(_TEXTS[:3])}"))
        if not value.strip():
            raise UserError(f"{name} is empty")
    worths = _worths(cells, values)
    best, lowest = worths.index(max(worths)), worths.index(min(worths))
    if use == "sft":
        return [Example(prompt, [texts[best]])]
    if use == "unpaired":
        ends = ((best, 1.0), (lowest, 0.0)) if worths[best] > worths[lowest] else ()
        return [Example(prompt, [texts[at]], suffix=f", answer {at + 1}", labels=(label,)) for at, label in ends]
    return _pairs(prompt, texts, worths, column)


def _pairs(prompt: str | Messages, answers: Sequence[str | Message], worths: list[float], column: str) -> list[Example]:
    """Every pair of a better and a worse answer of a column, the best ones first."""
    order = sorted(range(len(answers)), key=lambda at: -worths[at])  # stable: equal ones in the order of the row
    pairs = [(a, b) for at, a in enumerate(order) for b in order[at + 1 :] if worths[a] > worths[b]]
    for a, b in pairs:
        if answers[a] == answers[b]:
            raise UserError(f"answers {a + 1} and {b + 1} of '{column}' are equal, but one is called the better one")
    return [Example(prompt, [answers[a], answers[b]], suffix=f", answers {a + 1} and {b + 1}") for a, b in pairs]


def _worths(cells: Cells, values: list[Any]) -> list[float]:
    """How good each answer is: its score, or minus its rank, of a column or of the answers themselves."""
    if role := next((role for role in ("ranks", "scores") if cells.has(role)), ""):
        numbers, sign, name = cells.listed(role), -1 if role == "ranks" else 1, f"'{cells.column(role)}'"
        if not isinstance(numbers, list) or len(numbers) != len(values):
            raise cells.wrong(role, numbers, f"a list of {len(values)} numbers, one per answer")
    else:
        column, known = cells.column("response"), [value if isinstance(value, dict) else {} for value in values]
        key = next((key for key in (*RANKS, *_SCORE) if all(key in value for value in known)), "")
        if not key:
            missing = f"have no score or rank, and no column {', '.join(SCORES)} is there"
            raise UserError(f"the answers of '{column}' {missing}")
        numbers, sign, name = [value[key] for value in known], -1 if key in RANKS else 1, f"'{key}' in '{column}'"
    return [sign * number_of(number, f"an entry of {name}") for number in numbers]


def read_kto(cells: Cells, use: Use) -> list[Example]:
    """An answer and whether it is good; or all answers to one prompt, if the rows are joined by prompt. SFT takes the
    good answers, a preference is every good answer with every bad one. KTO takes each answer alone."""
    row, answers, prompt = cells.row, list[Any](), cast(str | Messages, "")
    is_group = {GROUP_ANSWERS, GROUP_LABELS} <= set(row) and not cells.has("messages")
    if cells.has("messages"):
        prompt, answer = _asked(cells.messages("messages"), cells.column("messages"), use != "prompt")
        answers = [answer]
    else:
        prompt, column = _prompt(cells), cells.column("response")
        is_given = use != "prompt" or has_value(row, column)  # a prompt alone needs no answer
        answers = row[GROUP_ANSWERS] if is_group else [value_at(row, column) if is_given else None]
        if isinstance(prompt, str) and looks_like_messages(answers[0]):
            prompt = [{"role": "user", "content": prompt}]
    if use == "prompt":
        return [Example(prompt)]
    if not cells.has("messages"):
        answers = [_completion(value, cells) for value in answers]
    worths = []
    for label in row[GROUP_LABELS] if is_group else [value_at(row, cells.column("label"))]:
        if not is_label(label) or isinstance(label, list):
            raise UserError(f"'label' is {kind_of(label)}; expected true or false (also good/bad, yes/no, 1/0, ...)")
        worths.append(float(LABELS[str(label).strip().lower()]))
    if use == "preference":
        if not is_group:
            raise UserError("pairs of KTO rows need all rows of a prompt, so the data set cannot be streamed")
        return _pairs(prompt, answers, worths, cells.column("response"))
    named = is_group and (use == "unpaired" or len(answers) > 1)
    return [
        Example(prompt, [answer], suffix=f", answer {number}" if named else "",
                labels=(worth,) if use == "unpaired" else ())
        for number, (answer, worth) in enumerate(zip(answers, worths, strict=True), start=1)
        if worth or use == "unpaired"
    ]  # fmt: skip


def _completion(value: Any, cells: Cells) -> str | Message:
    value = from_json(value)
    if isinstance(value, str):
        return value
    if looks_like_messages(value):
        before, answer = split_answer(cells.messages("response", value), cells.column("response"))
        if not before:
            return answer
    raise cells.wrong("response", value, "text or one message of the assistant")


# A label for each step of an answer, for process reward models: 1 for a right step, 0 for a wrong one, or a number
# between them (an estimated probability); NaN stands for a step without a label


def read_stepwise(cells: Cells, use: Use) -> list[Example]:
    """A prompt, the steps of one answer, and a label for each (TRL's stepwise supervision)."""
    prompt = _prompt(cells)
    if use == "prompt":
        return [Example(prompt)]
    name, column = (f"'{cells.column(role)}'" for role in ("response", "label"))
    steps = checked(cells.listed("response"), list, name, "a list with an entry for each step")
    values = checked(cells.listed("label"), list, column, "a list with an entry for each step")
    if len(steps) != len(values):
        raise UserError(f"{name} has {len(steps)} steps, but {column} {len(values)}")
    labels = []
    for number, (step, value) in enumerate(zip(steps, values, strict=True), start=1):
        checked(step, str, f"step {number} of {name}", "text")
        try:
            label = math.nan if value is None else float(_STEP_LABELS.get(str(value).lower(), value))
        except (TypeError, ValueError):
            label = -1.0
        if value is not None and not 0 <= label <= 1:
            raise UserError(f"{column} holds {str(value)[:20]!r}; expected true, false, or a number from 0 to 1")
        labels.append(label)
    return [Example(prompt, steps, labels=tuple(labels))]


def read_prm800k(cells: Cells, use: Use) -> list[Example]:
    """A problem, and for each step several continuations with ratings (Lightman et al. 2023). The chosen continuations
    make one answer. Each other rated continuation makes an answer that ends with it, in which only that last step has a
    label. A neutral step counts as right, as in the paper's scores."""
    prompt = _prompt(cells)
    if use == "prompt":
        return [Example(prompt)]
    name = f"'{cells.column('response')}'"
    path, labels, others = list[str](), list[float](), []
    for number, step in enumerate(checked(cells.listed("response"), list, name, "a list of steps"), start=1):
        where = f"step {number} of {name}"
        checked(step, dict, where, "an object with 'completions'")
        options, chosen = step.get("completions") or [], step.get("chosen_completion")
        human = step.get("human_completion")
        for option in [*options, *([human] if human else [])]:
            if not isinstance(option, dict) or not isinstance(option.get("text"), str):
                raise UserError(f"{where} has a completion without 'text'")
            if option.get("rating") not in tuple(_RATINGS):
                raise UserError(f"{where} has the rating {option['rating']!r}; expected -1, 0 or 1")
        for place, option in enumerate(options):
            label = _RATINGS[option.get("rating")]
            if place != chosen and not math.isnan(label):
                only_last = (*[math.nan] * len(path), label)
                suffix = f", step {number}, completion {place + 1}"
                others.append(Example(prompt, [*path, option["text"]], suffix=suffix, labels=only_last))
        if chosen is not None and chosen not in range(len(options)):
            raise UserError(f"{where} has {len(options)} completions, but 'chosen_completion' is {chosen!r}")
        taken = options[chosen] if chosen is not None else human and {**human, "rating": 1}
        if not taken:
            break
        path.append(taken["text"])
        labels.append(_RATINGS[taken.get("rating")])
    rated = any(not math.isnan(label) for label in labels)
    return [Example(prompt, path, labels=tuple(labels)), *others] if rated else others


def read_math_shepherd(cells: Cells, use: Use) -> list[Example]:
    """A problem and its steps in one text, each step with a tag at its end; a second text has the labels in place of
    the tags, `+` or `-` (Wang et al. 2024)."""
    asked, text, marked = cells.column("prompt"), cells.text("prompt"), cells.text("label")
    prompt, found, rest = text.partition("Step 1:")
    if not found:
        raise UserError(f"'{asked}' has no 'Step 1:'")
    prompt = prompt.rstrip() + ("\n" if cells.reading.rendering == "text" else "")
    if use == "prompt":
        return [Example(prompt)]
    *steps, after = [step.strip() for step in (found + rest).split(_SHEPHERD_TAG)]
    if not steps or after:
        raise UserError(f"'{asked}' does not end each step with {_SHEPHERD_TAG!r}")
    signs, place = [], max(0, marked.find("Step 1:"))
    for number, step in enumerate(steps, start=1):
        place = marked.find(step, place)
        sign = marked[place + len(step) :].lstrip()[:1]
        if place < 0 or sign not in ("+", "-"):
            raise UserError(f"'{cells.column('label')}' has no + or - after step {number} of '{asked}'")
        place += len(step)
        signs.append(_STEP_LABELS[sign])
    return [Example(prompt, steps, labels=tuple(signs))]
