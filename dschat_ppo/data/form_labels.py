"""Readers of the forms whose answers have labels: ranked lists, answers that are good or bad (KTO), and steps of an
answer; see `form_readers.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from dschat_ppo.data.examples import Example, Use
from dschat_ppo.data.form_readers import prompt_value
from dschat_ppo.data.form_rows import LABELS, RANKS, SCORES, Cells
from dschat_ppo.data.messages import Message, Messages, from_json, kind_of, looks_like_messages, split_answer
from dschat_ppo.data.rows import Row, Rows
from dschat_ppo.errors import UserError

_TEXTS = ("text", "answer", "response", "completion", "content")  # keys of an answer that is an object
_SCORE = ("score", "overall_score", "rating", "reward")
GROUP_ANSWERS, GROUP_LABELS = "_answers", "_labels"  # columns that `group_by_prompt` adds
_STEP_LABELS = {"+": 1.0, "-": 0.0, "true": 1.0, "false": 0.0}
_RATINGS = {1: 1.0, 0: 1.0, -1: 0.0, None: math.nan}  # of PRM800K: good, neutral, bad, not rated
SHEPHERD_TAG = "ки"  # ends a step in Math-Shepherd


def read_ranked(cells: Cells, use: Use) -> list[Example]:
    """A list of answers with scores or ranks: the best one, every pair of different rank, or the best answer as a
    desirable and the worst one as an undesirable answer (of equal ones the first; nothing if all are equal)."""
    prompt = prompt_value(cells)
    if use == "prompt":
        return [Example(prompt)]
    column, values = cells.column("response"), cells.listed("response")
    if not isinstance(values, list) or not values:
        raise UserError(f"'{column}' is {kind_of(values)}; expected a list of answers")
    texts = [_text(value, f"answer {number} of '{column}'") for number, value in enumerate(values, start=1)]
    worths = _worths(cells, values)
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise UserError(f"answer {number} of '{column}' is empty")
    order = sorted(range(len(texts)), key=lambda at: -worths[at])  # stable: equal ones in the order of the row
    if use == "sft":
        return [Example(prompt, [texts[order[0]]])]
    if use == "unpaired":
        best, lowest = order[0], min(range(len(texts)), key=lambda at: worths[at])
        ends = ((best, 1.0), (lowest, 0.0)) if worths[best] > worths[lowest] else ()
        return [Example(prompt, [texts[at]], suffix=f", answer {at + 1}", labels=(label,)) for at, label in ends]
    pairs = [(a, b) for at, a in enumerate(order) for b in order[at + 1 :] if worths[a] > worths[b]]
    for a, b in pairs:
        if texts[a] == texts[b]:
            raise UserError(f"answers {a + 1} and {b + 1} of '{column}' are equal, but their ranks differ")
    return [Example(prompt, [texts[a], texts[b]], suffix=f", answers {a + 1} and {b + 1}") for a, b in pairs]


def _text(value: Any, name: str) -> str:
    if isinstance(value, dict):
        value = next((value[key] for key in _TEXTS if value.get(key) is not None), value)
    if not isinstance(value, str):
        raise UserError(f"{name} is {kind_of(value)}; expected text, or an object with {', '.join(_TEXTS[:3])}")
    return value


def _worths(cells: Cells, values: list[Any]) -> list[float]:
    """How good each answer is: its score, or minus its rank."""
    role = next((role for role in ("ranks", "scores") if cells.has(role)), None)
    if role is not None:
        numbers, sign, name = cells.listed(role), -1 if role == "ranks" else 1, f"'{cells.column(role)}'"
        if not isinstance(numbers, list) or len(numbers) != len(values):
            raise UserError(f"{name} is {kind_of(numbers)}; expected a list of {len(values)} numbers, one per answer")
    else:
        column, dicts = cells.column("response"), [value if isinstance(value, dict) else {} for value in values]
        keys = [(key, sign) for names, sign in ((RANKS, -1), (_SCORE, 1)) for key in names]
        key, sign = next(((key, sign) for key, sign in keys if all(key in value for value in dicts)), ("", 1))
        if not key:
            raise UserError(
                f"the answers of '{column}' have no score or rank, and no column {', '.join(SCORES)} is there"
            )
        numbers, name = [value[key] for value in dicts], f"'{key}' in '{column}'"
    worths = []
    for number in numbers:
        try:
            worths.append(sign * float(number))
        except (TypeError, ValueError):
            raise UserError(f"{name} holds {kind_of(number)}; expected a number") from None
        if not math.isfinite(worths[-1]):
            raise UserError(f"{name} holds {number}; expected a finite number")
    return worths


def read_kto(cells: Cells, use: Use) -> list[Example]:
    """An answer and whether it is good; or all answers to one prompt, after `group_by_prompt`. SFT takes the good
    answers, a preference is every good answer with every bad one. KTO takes each answer alone."""
    prompt: str | Messages
    is_group = GROUP_ANSWERS in cells.row and not cells.has("messages")
    if cells.has("messages"):
        column = cells.column("messages")
        prompt, said = split_answer(cells.messages("messages"), column, use != "prompt")
        if not prompt:
            raise UserError(f"'{column}' has nothing before the assistant's answer")
        found = [(said, _is_good(cells.raw("label")))]
    else:
        prompt = prompt_value(cells)
        values = cells.row[GROUP_ANSWERS] if is_group else [cells.row.get(cells.column("response"))]
        if isinstance(prompt, str) and looks_like_messages(values[0]):
            prompt = [{"role": "user", "content": prompt}]
        found = []
        if use != "prompt":
            values = values if is_group else [cells.raw("response")]
            labels = cells.row[GROUP_LABELS] if is_group else [cells.raw("label")]
            found = [(_completion(value, cells), _is_good(label)) for value, label in zip(values, labels, strict=True)]
    if use == "prompt":
        return [Example(prompt)]
    numbered = [(number, answer, good) for number, (answer, good) in enumerate(found, start=1)]
    if use in ("sft", "unpaired"):
        suffix = ", answer {}" if is_group and (use == "unpaired" or len(found) > 1) else ""
        kept = [one for one in numbered if use == "unpaired" or one[2]]
        labelled = use == "unpaired"
        return [
            Example(prompt, [answer], suffix=suffix.format(number), labels=(float(good),) if labelled else ())
            for number, answer, good in kept
        ]
    if not is_group:
        raise UserError("pairs of KTO rows need all rows of a prompt, so the data set cannot be streamed")
    return [
        Example(prompt, [better, worse], suffix=f", answers {first} and {second}")
        for first, better, is_good in numbered
        for second, worse, is_better in numbered
        if is_good and not is_better
    ]


def _completion(value: Any, cells: Cells) -> str | Message:
    value = from_json(value)
    if isinstance(value, str):
        return value
    if looks_like_messages(value):
        prefix, answer = split_answer(cells.messages("response", value), cells.column("response"))
        if not prefix:
            return answer
    raise UserError(f"'{cells.column('response')}' is {kind_of(value)}; expected text or one message of the assistant")


def _is_good(label: Any) -> bool:
    """The label of an answer: true or false, 1 or 0 (also -1), as numbers of any type or as text, or a word for it."""
    text = str(label).strip().lower()
    if text not in LABELS:
        raise UserError(f"'label' is {kind_of(label)}; expected true or false (also good/bad, yes/no, 1/0, ...)")
    return LABELS[text]


def group_by_prompt(
    rows: Rows, prompt: str, answer: str, label: str, context: tuple[str, ...] = ()
) -> Iterator[tuple[Row, int]]:
    """One row for each prompt of a whole data set of KTO rows, with its origin; `prompt`, `answer` and `label` name its
    columns, `context` further ones that are part of what is asked, such as that of the system message.

    It is the first row of the prompt, in the order of the rows, with all answers to the prompt in `GROUP_ANSWERS` and
    their labels in `GROUP_LABELS`.
    """
    groups: dict[str, tuple[int, list[Any], list[Any]]] = {}
    for number, row in enumerate(rows):
        key = json.dumps([row.get(name) for name in (prompt, *context)])
        _, answers, labels = groups.setdefault(key, (number, [], []))
        answers.append(row.get(answer))
        labels.append(row.get(label))
    for number, answers, labels in groups.values():
        yield rows[number] | {GROUP_ANSWERS: answers, GROUP_LABELS: labels}, rows.origin(number)


# A label for each step of an answer, for process reward models: 1 for a right step, 0 for a wrong one, or a number
# between them (an estimated probability); NaN stands for a step without a label


def read_stepwise(cells: Cells, use: Use) -> list[Example]:
    """A prompt, the steps of one answer, and a label for each (TRL's stepwise supervision)."""
    prompt = prompt_value(cells)
    if use == "prompt":
        return [Example(prompt)]
    columns = cells.reading.columns
    steps, labels = cells.listed("response"), cells.listed("label")
    for column, values in ((columns["response"], steps), (columns["label"], labels)):
        if not isinstance(values, list):
            raise UserError(f"'{column}' is {kind_of(values)}; expected a list with an entry for each step")
    if len(steps) != len(labels):
        raise UserError(f"'{columns['response']}' has {len(steps)} steps, but '{columns['label']}' {len(labels)}")
    for number, step in enumerate(steps, start=1):
        if not isinstance(step, str):
            raise UserError(f"step {number} of '{columns['response']}' is {kind_of(step)}; expected text")
    return [Example(prompt, steps, labels=tuple(_step_label(value, columns["label"]) for value in labels))]


def _step_label(value: Any, column: str) -> float:
    """A label as a number in [0, 1], or NaN for null."""
    if value is None:
        return math.nan
    text = str(value).lower()
    try:
        number = _STEP_LABELS[text] if text in _STEP_LABELS else float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise UserError(f"'{column}' holds {str(value)[:20]!r}; expected true, false, or a number from 0 to 1")
    return number


def read_prm800k(cells: Cells, use: Use) -> list[Example]:
    """A problem, and for each step several continuations with ratings (Lightman et al. 2023). The chosen continuations
    make one answer. Each other rated continuation makes an answer that ends with it, in which only that last step has a
    label. A neutral step counts as right, as in the paper's scores."""
    prompt = prompt_value(cells)
    if use == "prompt":
        return [Example(prompt)]
    column, steps = cells.column("response"), cells.raw("response")
    if not isinstance(steps, list):
        raise UserError(f"'{column}' is {kind_of(steps)}; expected a list of steps")
    path: list[str] = []
    labels: list[float] = []
    others = []
    for number, step in enumerate(steps, start=1):
        options, chosen, human = _options(step, f"step {number} of '{column}'")
        for place, (text, label) in enumerate(options):
            if place != chosen and not math.isnan(label):
                only_last = (*[math.nan] * len(path), label)
                suffix = f", step {number}, completion {place + 1}"
                others.append(Example(prompt, [*path, text], suffix=suffix, labels=only_last))
        if chosen is None and human is None:
            break
        text, label = options[chosen] if chosen is not None else (str(human), 1.0)
        path.append(text)
        labels.append(label)
    rated = any(not math.isnan(label) for label in labels)
    return [Example(prompt, list(path), labels=tuple(labels)), *others] if rated else others


def _options(step: Any, where: str) -> tuple[list[tuple[str, float]], int | None, str | None]:
    """(text and label of each continuation of a step, number of the chosen one, the text that a human wrote)."""
    if not isinstance(step, dict):
        raise UserError(f"{where} is {kind_of(step)}; expected an object with 'completions'")
    found = []
    for option in step.get("completions") or []:
        if not isinstance(option, dict) or not isinstance(option.get("text"), str):
            raise UserError(f"{where} has a completion without 'text'")
        rating = option.get("rating")
        if rating not in tuple(_RATINGS):
            raise UserError(f"{where} has the rating {rating!r}; expected -1, 0 or 1")
        found.append((option["text"], _RATINGS[rating]))
    chosen, human = step.get("chosen_completion"), step.get("human_completion")
    if chosen is not None and chosen not in range(len(found)):
        raise UserError(f"{where} has {len(found)} completions, but 'chosen_completion' is {chosen!r}")
    if human and (not isinstance(human, dict) or not isinstance(human.get("text"), str)):
        raise UserError(f"{where} has a 'human_completion' without 'text'")
    return found, chosen, human["text"] if human else None


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
    steps = (found + rest).split(SHEPHERD_TAG)
    if len(steps) < 2 or steps[-1].strip():
        raise UserError(f"'{asked}' does not end each step with {SHEPHERD_TAG!r}")
    signs, place = [], marked.find("Step 1:")
    for number, step in enumerate(steps[:-1], start=1):
        place = marked.find(step.strip(), max(0, place))
        place += len(step.strip()) if place >= 0 else 0
        sign = marked[max(0, place) :].lstrip()[:1]
        if place < 0 or sign not in ("+", "-"):
            raise UserError(f"'{cells.column('label')}' has no + or - after step {number} of '{asked}'")
        signs.append(_STEP_LABELS[sign])
    return [Example(prompt, [step.strip() for step in steps[:-1]], labels=tuple(signs))]
