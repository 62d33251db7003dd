"""Forms of data sets with labelled steps: rows of real shape, bad rows, the sections of
docs/data.md, and ways out where no form reads the rows."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from data_page import SECTIONS, STEP_FORMS, check_section, check_that_no_content_is_lost
from form_fixtures import ASK, form_of, read, user
from step_rows import PRM800K, SHEPHERD, STEPS, option
from ways_out import read_by_ways

from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError
from dschat_ppo.features.process_rewards.flags import NOTES
from dschat_ppo.features.process_rewards.form_kinds import KINDS

Q, POST = "Where is the lamp?", "A long post about the lamp in the hall, and about its colour."
BY_COLUMNS = {"problem": Q, "steps": ["a", "b"]}
OTHERS = {"question": Q, "solution_steps": ["a", "b"]}


def test_the_page_and_the_flag_have_every_form():
    assert {kind.name for kind in KINDS} == STEP_FORMS == set(NOTES.choices["data_format"])


@pytest.mark.parametrize(
    "section", [one for one in SECTIONS if one.name in STEP_FORMS], ids=lambda section: section.name
)
def test_an_example_is_read_as_the_page_shows_and_no_column_is_lost(section):
    check_section(section)
    check_that_no_content_is_lost(section)


def test_a_first_step_that_is_glued_to_the_prompt_prints_a_warning():
    row = {"prompt": "What is 2+3?", "completions": ["2+3 = 5", "So 5"], "labels": [True, True]}
    form = form_of([row])
    assert form.rendering == "text" and form_of([STEPS]).warning == ""
    assert form.warning.startswith(
        "nothing separates prompt and answer: '...What is 2+3?2+3 = 5...'; the text is used as"
    )


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ([True, False], (1.0, 0.0)),
        ([1, 0], (1.0, 0.0)),
        (["+", "-"], (1.0, 0.0)),
        (["True", "0.5"], (1.0, 0.5)),
        ([None, 0.25], (None, 0.25)),
    ],
)
def test_stepwise_rows_give_their_steps_and_labels(labels, found):
    form = form_of([STEPS])
    assert (form.name, form.rendering, form.uses) == ("stepwise", "text", ("steps", "prompt"))
    [example] = read([{**STEPS, "labels": labels}], "steps")
    assert (example.prompt, example.answers) == ("1+2+3=", ["1+2=3", "3+3=7"])
    assert tuple(None if math.isnan(label) else label for label in example.labels) == found
    equal = {"prompt": [ASK], "completions": ["go", "go"], "labels": [1, 0.25]}  # is no pair
    assert read([equal], "steps") == [Example([ASK], ["go", "go"], labels=(1.0, 0.25))]


def test_math_shepherd():
    assert form_of([SHEPHERD]).name == "math_shepherd"
    steps = ["Step 1: Take two.", "Step 2: Add two: 5"]
    assert read([SHEPHERD], "steps", has_template=False) == [
        Example("Two and two?\n", steps, labels=(1.0, 0.0))
    ]
    assert read([SHEPHERD], "prompt") == [Example([user("Two and two?")], [])]


def test_prm800k_follows_the_chosen_steps_and_labels_the_others_where_they_end():
    assert form_of([PRM800K]).name == "prm800k"
    found = read([PRM800K], "steps")
    answers = [
        (list(example.answers), [None if math.isnan(x) else x for x in example.labels])
        for example in found
    ]
    assert answers == [
        (["a", "h"], [1.0, 1.0]),
        (["b"], [0.0]),
        (["a", "d"], [None, 0.0]),
        (["a", "h", "e"], [None, None, 1.0]),
        (["a", "h", "f"], [None, None, 0.0]),
    ]
    assert found[2].suffix == ", step 2, completion 1"
    assert all(example.prompt == "2x = 4?" for example in found)


def steps(**change: Any) -> dict:
    return {**STEPS, **change}


def prm(step: Any) -> dict:
    return {**PRM800K, "label": {"steps": [PRM800K["label"]["steps"][0], step]}}


@pytest.mark.parametrize(
    ("row", "words", "first"),
    [
        (steps(labels=[True]), "'completions' has 2 steps, but 'labels' 1", STEPS),
        (
            {**SHEPHERD, "label": SHEPHERD["label"][:-1]},
            r"'label' has 1 \+ or -, but 'input' 2 steps",
            SHEPHERD,
        ),
        (
            prm({"completions": [option("a", 2)]}),
            "no step of PRM800K .2.; .*-1, 0, 1",
            PRM800K,
        ),
    ],
)
def test_bad_rows_are_named_with_what_is_wrong(row, words, first):
    form = form_of([first])
    with pytest.raises(UserError, match=words):
        form.read(row, "steps")


@pytest.mark.parametrize(
    ("row", "use", "words"),
    [
        (STEPS, "sft", "read as form stepwise; this step needs"),
        (
            {"prompt": "Q:", "chosen": "a", "rejected": "b"},
            "steps",
            "needs the steps of answers with a label for each",
        ),
    ],
)
def test_a_use_that_the_form_does_not_serve_is_refused(row, use, words):
    with pytest.raises(UserError, match=words):
        form_of([row]).read(row, use)


def test_lists_that_are_stored_as_json_text_are_read():
    """As in CSV files."""
    row = {"prompt": "Q:", "completions": '["a", "b"]', "labels": "[true, null]"}
    assert [list(one.answers) for one in read([row], "steps")] == [["a", "b"]]


def test_an_answer_beside_steps_is_for_rewards():
    row = {"question": "1+2=", "steps": ["1+2=3"], "labels": [1], "answer": "42"}
    assert form_of([row]).name == "stepwise"


def test_the_shape_of_processbench_is_read():
    lines = Path(__file__).with_name("processbench.jsonl").read_text().splitlines()
    example = read([json.loads(line) for line in lines], "steps", apply_chat_template=True)[0]
    assert example.prompt == [ASK]
    assert example.answers == ["I look in the hall.", "It is there.", "So it is far away."]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({**BY_COLUMNS, "first_error_step": 1, "level": 1}, Q),
        ({**BY_COLUMNS, "ratings": [1, -1]}, Q),
        ({**OTHERS, "step_labels": [True, False]}, Q),
        ({"task": POST, "thoughts": [{"text": "a", "valid": 1}, {"text": "b", "valid": 0}]}, POST),
    ],
)
def test_each_way_out_reads_the_rows(row, prompt):
    assert read_by_ways([row], "steps") == [[(prompt, ["a", "b"])]]
