"""Forms with a label for each step of an answer, for process reward models. A label is 1 for a right step, 0 for a
wrong one, or a number between them (an estimated probability); NaN stands for a step without a label."""

from __future__ import annotations

import math
from typing import Any

from dschat_ppo.data.examples import Row, Use, value_at
from dschat_ppo.data.form_readers import prompt_value
from dschat_ppo.data.form_rows import Draft, Reading
from dschat_ppo.data.messages import kind_of
from dschat_ppo.errors import UserError

_LABELS = {"+": 1.0, "-": 0.0, "true": 1.0, "false": 0.0}
_RATINGS = {1: 1.0, 0: 1.0, -1: 0.0, None: math.nan}  # of PRM800K: good, neutral, bad, not rated
SHEPHERD_TAG = "ки"  # ends a step in Math-Shepherd


def read_stepwise(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """A prompt, the steps of one answer, and a label for each (TRL's stepwise supervision)."""
    prompt = prompt_value(row, reading)
    if use == "prompt":
        return [Draft(prompt)]
    columns = dict(reading.columns)
    steps, labels = reading.listed(row, "response"), reading.listed(row, "label")
    for column, values in ((columns["response"], steps), (columns["label"], labels)):
        if not isinstance(values, list):
            raise UserError(f"'{column}' is {kind_of(values)}; expected a list with an entry for each step")
    if len(steps) != len(labels):
        raise UserError(f"'{columns['response']}' has {len(steps)} steps, but '{columns['label']}' {len(labels)}")
    for number, step in enumerate(steps, start=1):
        if not isinstance(step, str):
            raise UserError(f"step {number} of '{columns['response']}' is {kind_of(step)}; expected text")
    return [Draft(prompt, steps, labels=tuple(_label(value, columns["label"]) for value in labels))]


def _label(value: Any, column: str) -> float:
    """A label as a number in [0, 1], or NaN for null."""
    if value is None:
        return math.nan
    text = str(value).lower()
    try:
        number = _LABELS[text] if text in _LABELS else float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise UserError(f"'{column}' holds {str(value)[:20]!r}; expected true, false, or a number from 0 to 1")
    return number


def read_prm800k(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """A problem, and for each step several continuations with ratings (Lightman et al. 2023). The chosen continuations
    make one answer. Each other rated continuation makes an answer that ends with it, in which only that last step has a
    label. A neutral step counts as right, as in the paper's scores."""
    prompt = prompt_value(row, reading)
    if use == "prompt":
        return [Draft(prompt)]
    column = dict(reading.columns)["response"]
    steps = value_at(row, column)
    if not isinstance(steps, list):
        raise UserError(f"'{column}' is {kind_of(steps)}; expected a list of steps")
    path: list[str] = []
    labels: list[float] = []
    drafts = []
    for number, step in enumerate(steps, start=1):
        options, chosen, human = _options(step, f"step {number} of '{column}'")
        for place, (text, label) in enumerate(options):
            if place != chosen and not math.isnan(label):
                only_last = (*[math.nan] * len(path), label)
                drafts.append(Draft(prompt, [*path, text], f", step {number}, completion {place + 1}", only_last))
        if chosen is None and human is None:
            break
        text, label = options[chosen] if chosen is not None else (str(human), 1.0)
        path.append(text)
        labels.append(label)
    rated = any(not math.isnan(label) for label in labels)
    return [Draft(prompt, list(path), labels=tuple(labels)), *drafts] if rated else drafts


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


def read_math_shepherd(row: Row, reading: Reading, use: Use) -> list[Draft]:
    """A problem and its steps in one text, each step with a tag at its end; a second text has the labels in place of
    the tags, `+` or `-` (Wang et al. 2024)."""
    columns = dict(reading.columns)
    text, marked = reading.text(row, "prompt"), reading.text(row, "label")
    prompt, found, rest = text.partition("Step 1:")
    if not found:
        raise UserError(f"'{columns['prompt']}' has no 'Step 1:'")
    prompt = prompt.rstrip() + ("\n" if reading.rendering == "text" else "")
    if use == "prompt":
        return [Draft(prompt)]
    steps = (found + rest).split(SHEPHERD_TAG)
    if len(steps) < 2 or steps[-1].strip():
        raise UserError(f"'{columns['prompt']}' does not end each step with {SHEPHERD_TAG!r}")
    signs, place = [], marked.find("Step 1:")
    for number, step in enumerate(steps[:-1], start=1):
        place = marked.find(step.strip(), max(0, place))
        place += len(step.strip()) if place >= 0 else 0
        sign = marked[max(0, place) :].lstrip()[:1]
        if place < 0 or sign not in ("+", "-"):
            raise UserError(f"'{columns['label']}' has no + or - after step {number} of '{columns['prompt']}'")
        signs.append(_LABELS[sign])
    return [Draft(prompt, [step.strip() for step in steps[:-1]], labels=tuple(signs))]
