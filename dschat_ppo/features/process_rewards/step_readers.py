"""Readers of answers with a label for each step, for process reward models.

A label is 1 for a right step, 0 for a wrong one, or a number between them (an estimated
probability); NaN stands for a step without a label. As other readers (`form_readers.py`), these
take `(cells, use)`.
"""

from __future__ import annotations

import math
import re
from typing import Any

from dschat_ppo.config.data_flags import Use
from dschat_ppo.data.cells import LABELS, Cells, JudgedAnswer, PromptAndAnswers
from dschat_ppo.data.examples import checked, field_at, number_of
from dschat_ppo.data.verdicts import number_in
from dschat_ppo.errors import UserError

_RATINGS = {1: 1.0, 0: 1.0, -1: 0.0, None: math.nan}  # of PRM800K: good, neutral, bad, not rated
# Keys of a step that is an object: its text, and its label
STEP_TEXTS = ("text", "step", "content")
LABELS_IN_STEPS = ("label", "rating", "correct", "is_correct", "score")
# Words of the name of a column of the first wrong step, which is null where no step is wrong
_OF_ERRORS = re.compile(r"error|wrong|mistake|incorrect", re.IGNORECASE)
_SHEPHERD_TAG = "ки"  # ends a step in Math-Shepherd
_SHEPHERD_SIGNS = {"+": 1.0, "-": 0.0}


def read_stepwise(cells: Cells, use: Use) -> PromptAndAnswers:
    """A prompt, the steps of one answer, and a label for each (TRL's stepwise supervision), or the
    number of the first wrong step, from 0, and -1 if all are right (ProcessBench), or null if the
    name of the column speaks of errors. Steps after the first wrong one have no label. A label that
    stands in each step (`steps.0.label`) is read with its text."""
    prompt = cells.prompt()
    if use == "prompt":
        return prompt, []
    name = cells.called("response")
    column = cells.called("label")
    steps = cells.listed("response", "a list with an entry for each step")
    if cells.columns["label"].startswith(f"{cells.columns['response']}.0."):
        key = cells.columns["label"].rpartition(".")[2]
        return prompt, [_answer_of_objects(steps, key, name)]
    for step_number, step in enumerate(steps, start=1):
        checked(step, str, f"step {step_number} of {name}", "text")
    label = field_at(cells.row, cells.columns["label"])
    first_wrong = number_in(label)
    if label is None and _OF_ERRORS.search(cells.columns["label"]):
        first_wrong = -1
    if first_wrong is not None:
        if first_wrong not in range(-1, len(steps)):
            raise UserError(
                f"{column} is {first_wrong:g}, but {name} has {len(steps)} steps; expected the"
                " number of the first wrong step, from 0, or -1 if all are right"
            )
        if first_wrong == -1:
            return prompt, [JudgedAnswer(steps, (1.0,) * len(steps))]
        labels = [1.0] * int(first_wrong) + [0.0]
        labels += [math.nan] * (len(steps) - len(labels))
        return prompt, [JudgedAnswer(steps, tuple(labels))]
    expected = (
        "a list with an entry for each step, or the number of the first wrong step, from 0, and -1"
        " if all are right"
    )
    values = cells.listed("label", expected)
    if len(steps) != len(values):
        raise UserError(f"{name} has {len(steps)} steps, but {column} {len(values)}")
    return prompt, [JudgedAnswer(steps, _step_labels(values, column))]


def _answer_of_objects(steps: list[Any], key: str, name: str) -> JudgedAnswer:
    """The answer of steps that are objects with a text, and a label under this key. `rating` is one
    of PRM800K if all are -1, 0, 1 or null and one is -1; without it, 0 is a wrong step."""
    texts = list[str]()
    values = list[Any]()
    for step_number, step in enumerate(steps, start=1):
        where = f"step {step_number} of {name}"
        checked(step, dict, where, f"an object with '{key}' and a text")
        text = next((step[text_key] for text_key in STEP_TEXTS if text_key in step), None)
        texts.append(checked(text, str, f"the text of {where}", f"one in {', '.join(STEP_TEXTS)}"))
        values.append(step.get(key))
    is_prm800k = -1 in values and all(value in (-1, 0, 1, None) for value in values)
    if key == "rating" and is_prm800k:
        return JudgedAnswer(texts, tuple(_RATINGS[value] for value in values))
    return JudgedAnswer(texts, _step_labels(values, f"'{key}' in {name}"))


def _step_labels(values: list[Any], column: str) -> tuple[float, ...]:
    """The label of each step. -1 is a wrong step; beside 0 it is not known what 0 is."""
    words = [str(value).strip().lower() for value in values]
    known = LABELS | {"+": 1.0, "-": 0.0, "none": math.nan, "null": math.nan, "nan": math.nan}
    labels = []
    for value, word in zip(values, words, strict=True):
        labels.append(known[word] if word in known else number_of(value, f"an entry of {column}"))
    is_clear = not ({"-1", "-1.0"} & set(words) and {"0", "0.0"} & set(words))
    if not is_clear or not all(math.isnan(label) or 0 <= label <= 1 for label in labels):
        raise UserError(
            f"{column} is {str(values)[:60]}; expected true, false, or numbers from 0 to 1 (also"
            " +/-, good/bad, 1/-1, ...)"
        )
    return tuple(labels)


def read_prm800k(cells: Cells, use: Use) -> PromptAndAnswers:
    """A problem, and for each step several continuations with ratings (Lightman et al. 2023). The
    chosen continuations make one answer. Each other rated continuation makes an answer that ends
    with it, in which only that last step has a label. A neutral step counts as right, as in the
    paper's scores."""
    prompt = cells.prompt()
    if use == "prompt":
        return prompt, []
    path = list[str]()
    labels = list[float]()
    rejected = list[JudgedAnswer]()
    for step_number, step in enumerate(cells.listed("response", "a list of steps"), start=1):
        try:
            options = [
                (one["text"], _RATINGS[one.get("rating")]) for one in step.get("completions") or []
            ]
            chosen = step.get("chosen_completion")
            human = step.get("human_completion")
            taken = None
            if chosen is not None:
                taken = options[chosen]
            elif human:
                taken = (human["text"], 1.0)
            if not all(isinstance(text, str) for text, _ in [*options, taken or ("", 1.0)]):
                raise TypeError("'text' is no text")
        except (AttributeError, IndexError, KeyError, TypeError) as problem:
            expected = (
                "completions with 'text' and 'rating' (-1, 0, 1 or null), and the number of the"
                " chosen one"
            )
            where = f"step {step_number} of {cells.called('response')}"
            raise UserError(
                f"{where} is no step of PRM800K ({problem}); expected {expected}"
            ) from None
        for index, (text, label) in enumerate(options):
            if index != chosen and not math.isnan(label):
                only_last = (*[math.nan] * len(path), label)
                name = f"step {step_number}, completion {index + 1}"
                rejected.append(JudgedAnswer([*path, text], only_last, name))
        if taken is None:
            break
        path.append(taken[0])
        labels.append(taken[1])
    if all(math.isnan(label) for label in labels):
        return prompt, rejected
    return prompt, [JudgedAnswer(path, tuple(labels), "the chosen steps"), *rejected]


def read_math_shepherd(cells: Cells, use: Use) -> PromptAndAnswers:
    """A problem and its steps in one text, each step with a tag at its end; a second text has the
    labels in place of the tags, `+` or `-` (Wang et al. 2024)."""
    asked = cells.called("prompt")
    prompt, first_step, rest = cells.text("prompt").partition("Step 1:")
    if not first_step:
        raise UserError(f"{asked} has no 'Step 1:'")
    prompt = prompt.rstrip() + ("" if cells.as_chat else "\n")
    if use == "prompt":
        return prompt, []
    *steps, after = [step.strip() for step in (first_step + rest).split(_SHEPHERD_TAG)]
    if not steps or after:
        raise UserError(f"{asked} does not end each step with {_SHEPHERD_TAG!r}")
    signs = re.findall(r"([+-])\s*(?:\n|$)", cells.text("label"))  # at the end of each step's line
    if len(signs) != len(steps):
        raise UserError(
            f"{cells.called('label')} has {len(signs)} + or -, but {asked} {len(steps)} steps"
        )
    return prompt, [JudgedAnswer(steps, tuple(_SHEPHERD_SIGNS[sign] for sign in signs))]
