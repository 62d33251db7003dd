"""The use of the data that reads labelled steps: from the answers of a reader to token rows, and
flags by which other rows can be read so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from datasets import List, Value
from transformers import PreTrainedTokenizerBase

from dschat_ppo.data.cells import JudgedAnswer, Prompt
from dschat_ppo.data.encode import EncodedExample
from dschat_ppo.data.examples import Example, Row, json_value
from dschat_ppo.data.uses import FurtherUse
from dschat_ppo.features.process_rewards.step_readers import STEP_TEXTS
from dschat_ppo.features.process_rewards.steps import joined_steps, labelled_ends

_OF_STEPS = re.compile(
    r"label|rating|error|wrong|mistake|correct|score|reward|judg|verdict|annot|feedback|valid"
)
_OF_A_STEP = re.compile(r"error|wrong|mistake|incorrect|label")  # the number of one step


def examples_of_steps(prompt: Prompt, answers: Sequence[JudgedAnswer]) -> list[Example]:
    """One example for each answer, which is a list of steps; its `labels` are those of the
    steps."""
    return [
        Example(prompt, answer.value, suffix=f", {answer.name}", labels=answer.worth)
        for answer in answers
    ]


def columns_of_labels(
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    ids: EncodedExample,
    fitted: EncodedExample,
    separator: str,
) -> dict[str, Any]:
    """`step_ends` (offsets in the answer) and `step_labels` of the labelled steps that the length
    limit leaves: `fitted` of `ids`."""
    step_ends, step_labels = labelled_ends(tokenizer, ids.answers[0], example.labels, separator)
    # ends are in rising order
    steps_left = sum(end < len(fitted.answers[0]) for end in step_ends)
    return {"step_ends": step_ends[:steps_left], "step_labels": step_labels[:steps_left]}


def flags_for_steps(
    columns: list[str], rows: list[Row], prompts: list[str]
) -> Iterator[dict[str, Any]]:
    """Flags for the labels of steps, or the number of the first wrong one, and for the steps and
    their prompt where forms do not know them by their names."""
    labels = list[str]()
    steps = list[str]()
    for column in columns:
        values = [json_value(row[column]) for row in rows if row.get(column) is not None]
        is_list = bool(values) and all(isinstance(value, list) for value in values)
        is_number = bool(values) and all(str(value).lstrip("-").isdecimal() for value in values)
        name = column.lower()
        if (is_list and _OF_STEPS.search(name)) or (is_number and _OF_A_STEP.search(name)):
            labels.append(column)
        elif is_list and all(isinstance(one, str) for value in values for one in value):
            steps.append(column)
        elif is_list and all(isinstance(one, dict) for value in values for one in value):
            yield from _flags_for_objects(column, values, prompts)
    yield from ({"label_column": label} for label in labels)
    for step, label in product(steps, labels):
        yield {"response_column": step, "label_column": label}
        for prompt in prompts:
            yield {"prompt_column": prompt, "response_column": step, "label_column": label}


def _flags_for_objects(
    column: str, values: list[list[dict[str, Any]]], prompts: list[str]
) -> Iterator[dict[str, Any]]:
    """Flags for steps that are objects, with each key that may hold their labels."""
    keys = dict.fromkeys(key for value in values for step in value for key in step)
    for key in keys:
        flags = {"response_column": column, "label_column": f"{column}.0.{key}"}
        if key not in STEP_TEXTS:
            yield flags
            yield from ({"prompt_column": prompt, **flags} for prompt in prompts)


USES = {
    "steps": FurtherUse(
        needs=(
            "the steps of answers with a label for each (prompt/completions/labels, PRM800K,"
            " Math-Shepherd)"
        ),
        way=(
            "name them with --prompt_column, --response_column (a list of steps) and --label_column"
            " (a list of labels, or the number of the first wrong step, -1 if all are right)"
        ),
        column="steps",
        roles=("label",),
        changes=flags_for_steps,
        examples=examples_of_steps,
        to_encode=joined_steps,
        columns={"step_ends": List(Value("int32")), "step_labels": List(Value("float32"))},
        values=columns_of_labels,
        shown={"labels": "step_labels"},
    )
}
