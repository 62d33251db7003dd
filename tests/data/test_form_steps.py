"""Answers with labelled steps: TRL's columns, PRM800K and Math-Shepherd."""

import math

import pytest
from form_fixtures import ASK, form_of, read

from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError

NAN = math.nan
STEPS = {"prompt": "1+2+3=", "completions": ["1+2=3", "3+3=7"], "labels": [True, False]}
SHEPHERD = {
    "input": "Two and two? Step 1: Take two. ки\nStep 2: Add two: 5 ки",
    "label": "Two and two? Step 1: Take two. +\nStep 2: Add two: 5 -",
    "task": "GSM8K",
}


def option(text: str, rating: int | None) -> dict:
    return {"text": text, "rating": rating, "flagged": None}


PRM800K = {
    "question": {"problem": "2x = 4?", "ground_truth_answer": "2"},
    "label": {
        "steps": [
            {"completions": [option("a", 1), option("b", -1), option("c", None)], "human_completion": None,
             "chosen_completion": 0},
            {"completions": [option("d", -1)], "human_completion": {"text": "h", "rating": None},
             "chosen_completion": None},
            {"completions": [option("e", 0), option("f", -1)], "human_completion": None, "chosen_completion": None},
        ],
        "finish_reason": "found_error",
    },
}  # fmt: skip


@pytest.mark.parametrize("has_template", [True, False])
def test_a_first_step_that_is_glued_to_the_prompt_prints_a_warning(has_template):
    row = {"prompt": "What is 2+3?", "completions": ["2+3 = 5", "So 5"], "labels": [True, True]}
    form = form_of([row], has_template=has_template)
    start = "nothing separates prompt and answer: '...What is 2+3?2+3 = 5...'; "
    chat = "--apply_chat_template True makes user messages of the prompts, and " if has_template else ""
    assert form.rendering == "text"
    assert form.warning == f"{start}{chat}--input_template puts text around a prompt"
    assert form_of([STEPS], has_template=has_template).warning == ""


def test_stepwise_rows_give_their_steps_and_labels():
    form = form_of([STEPS])
    assert (form.name, form.rendering, form.uses) == ("stepwise", "text", ("steps", "prompt"))
    assert read([STEPS], "steps") == [Example("1+2+3=", ["1+2=3", "3+3=7"], labels=(1.0, 0.0))]
    assert read([STEPS], "prompt") == [Example("1+2+3=", [])]


def test_equal_steps_are_no_pair_and_a_chat_prompt_is_chat():
    row = {"prompt": [ASK], "completions": ["go", "go"], "labels": [1, 0.25]}
    assert form_of([row]).rendering == "chat"
    assert read([row], "steps") == [Example([ASK], ["go", "go"], labels=(1.0, 0.25))]


@pytest.mark.parametrize(
    ("labels", "found"),
    [([1, 0], (1.0, 0.0)), (["+", "-"], (1.0, 0.0)), (["True", "0.5"], (1.0, 0.5)), ([0.0, 1.0], (0.0, 1.0))],
)
def test_labels_may_be_numbers_or_text(labels, found):
    [example] = read([{**STEPS, "labels": labels}], "steps")
    assert example.labels == found


def test_null_is_a_step_without_a_label():
    [example] = read([{**STEPS, "labels": [None, True]}], "steps")
    assert math.isnan(example.labels[0]) and example.labels[1] == 1.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"labels": [True]}, "'completions' has 2 steps, but 'labels' 1"),
        ({"labels": [True, 1.5]}, "'labels' holds '1.5'; expected true, false, or a number from 0 to 1"),
        ({"labels": [True, -1]}, "'labels' holds '-1'"),
        ({"labels": [True, "good"]}, "'labels' holds 'good'"),
        ({"completions": ["a", 3]}, "step 2 of 'completions' is int"),
        ({"completions": "a b"}, "'completions' is str .*; expected a list with an entry for each step"),
    ],
)
def test_a_bad_row_is_named_with_its_problem(change, problem):
    with pytest.raises(UserError, match=f"^row 3: {problem}"):
        form_of([STEPS]).read({**STEPS, **change}, "steps", "row 3")


@pytest.mark.parametrize("use", ["sft", "preference", "unpaired"])
def test_steps_serve_no_other_step(use):
    with pytest.raises(UserError, match="read as form stepwise; this step needs"):
        form_of([STEPS]).require(use)


def test_pairs_have_no_steps():
    with pytest.raises(UserError, match="needs the steps of answers with a label for each"):
        form_of([{"prompt": "Q:", "chosen": "a", "rejected": "b"}]).require("steps")


def test_math_shepherd():
    assert form_of([SHEPHERD]).name == "math_shepherd"
    steps = ["Step 1: Take two.", "Step 2: Add two: 5"]
    assert read([SHEPHERD], "steps", has_template=False) == [Example("Two and two?\n", steps, labels=(1.0, 0.0))]
    [chat] = read([SHEPHERD], "steps")
    assert chat.prompt == [{"role": "user", "content": "Two and two?"}]


def test_math_shepherd_without_a_label_for_a_step():
    form = form_of([SHEPHERD])
    with pytest.raises(UserError, match="^row 1: 'label' has no \\+ or - after step 2 of 'input'"):
        form.read({**SHEPHERD, "label": SHEPHERD["label"][:-1]}, "steps", "row 1")


def test_prm800k_follows_the_chosen_steps_and_labels_the_others_where_they_end():
    assert form_of([PRM800K]).name == "prm800k"
    found = read([PRM800K], "steps")
    answers = [(list(example.answers), [None if math.isnan(x) else x for x in example.labels]) for example in found]
    assert answers == [
        (["a", "h"], [1.0, 1.0]),
        (["b"], [0.0]),
        (["a", "d"], [None, 0.0]),
        (["a", "h", "e"], [None, None, 1.0]),
        (["a", "h", "f"], [None, None, 0.0]),
    ]
    assert found[2].suffix == ", step 2, completion 1"
    assert all(example.prompt == "2x = 4?" for example in found)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ("a", "is str"),
        ({"completions": [3]}, "has a completion without 'text'"),
        ({"completions": [{"rating": 1}]}, "has a completion without 'text'"),
        ({"completions": [option("a", 2)]}, "has the rating 2; expected -1, 0 or 1"),
        ({"completions": [option("a", [1])]}, r"has the rating \[1\]"),
        ({"completions": [option("a", 1)], "chosen_completion": 1}, "has 1 completions, but 'chosen_completion' is 1"),
        ({"completions": [], "human_completion": {"rating": 1}}, "has a 'human_completion' without 'text'"),
    ],
)
def test_a_bad_step_of_prm800k_is_named(step, problem):
    row = {**PRM800K, "label": {"steps": [PRM800K["label"]["steps"][0], step]}}
    with pytest.raises(UserError, match=f"^row 3: step 2 of 'label.steps' {problem}"):
        form_of([PRM800K]).read(row, "steps", "row 3")
