"""Answers with labels: ranked lists, rows that call an answer good or bad (KTO), and labelled steps."""

import math

import pytest
from form_fixtures import ASK, HALL, KTO, PRM800K, SHEPHERD, STEPS, form_of, read, user

from dschat_ppo.data.examples import Example


@pytest.mark.parametrize(("row", "pairs"), [
    ({"answers": ["a", "b"], "ranks": [2, 1]}, [["b", "a"]]),
    ({"responses": ["a", "b", "c"], "scores": [0, 0, 1]}, [["c", "a"], ["c", "b"]]),
    ({"responses": ["a", "b"], "scores": [1, 1]}, []),
    ({"responses": [{"text": "a", "score": -1}, {"text": "b", "score": 0.5}]}, [["b", "a"]]),
    # raw UltraFeedback; a rank comes before a score
    ({"completions": [{"response": "a", "overall_score": 3}, {"response": "b", "overall_score": 8}]}, [["b", "a"]]),
    ({"answers": [{"answer": "a", "rank": 1, "score": 0}, {"answer": "b", "rank": 2, "score": 9}]}, [["a", "b"]]),
])  # fmt: skip
def test_every_pair_of_different_rank(row, pairs):
    row = {"prompt": "Q:", **row}
    assert form_of([row]).name == "ranked"
    assert [list(example.answers) for example in read([row], "preference")] == pairs
    if pairs:
        assert read([row], "sft") == [Example("Q:", [pairs[0][0]])]


def test_kto_rows_give_their_good_answers_all_prompts_and_all_single_answers():
    assert read(KTO, "sft") == [Example(f"Q{n}:", [f" {a}"]) for n, a in ((1, "good"), (2, "fine"), (2, "best"))]
    assert read(KTO, "prompt") == [Example(f"Q{n}:", []) for n in (1, 2, 1, 1, 2)]
    assert [(one.prompt, *one.answers, *one.labels) for one in read(KTO[:3], "unpaired")] == [
        ("Q1:", " good", 1.0), ("Q2:", " fine", 1.0), ("Q1:", " bad", 0.0)
    ]  # fmt: skip


def test_kto_rows_as_messages():
    row = {"prompt": "Where is the lamp?", "completion": [HALL], "label": True}
    assert read([row], "unpaired") == [Example([ASK], ["In the hall."], labels=(1.0,))]
    assert read([row], "prompt") == [Example([ASK], [])], "for all uses, and it needs no answer"
    assert form_of(KTO).read({"prompt": "Where?"}, "prompt") == [Example("Where?", [])]
    conversation = {"messages": [ASK, HALL], "label": True, "prompt": ASK["content"], "completion": HALL["content"]}
    assert read([conversation], "unpaired") == read([row], "unpaired")


@pytest.mark.parametrize(("label", "is_good"), [(1, True), (0.0, False), (-1, False), ("True", True), ("0.0", False)])
def test_labels_may_be_numbers_or_text(label, is_good):
    assert form_of([{"prompt": "Q:", "completion": "a", "label": label}]).name == "kto"
    assert len(read([{"prompt": "Q:", "completion": "a", "label": label}], "sft")) == is_good
    assert form_of([{"prompt": "Q:", "completion": "a", "label": "spam"}]).name == "prompt_response"


def test_of_a_ranked_list_the_best_and_the_worst_answer_are_taken():
    rows = [
        {"prompt": "Q:", "responses": ["a", "b", "c"], "scores": [2, 9, 1]},
        {"prompt": "R:", "responses": ["x", "y"], "scores": [3, 3]},
    ]
    assert [(one.answers[0], one.labels, one.suffix) for one in read(rows, "unpaired")] == [
        ("b", (1.0,), ", answer 2"), ("c", (0.0,), ", answer 3"),
    ]  # fmt: skip


# Labelled steps


def test_a_first_step_that_is_glued_to_the_prompt_prints_a_warning():
    row = {"prompt": "What is 2+3?", "completions": ["2+3 = 5", "So 5"], "labels": [True, True]}
    form = form_of([row])
    assert form.rendering == "text" and form_of([STEPS]).warning == ""
    assert form.warning.startswith("nothing separates prompt and answer: '...What is 2+3?2+3 = 5...'; --apply_chat")


@pytest.mark.parametrize(
    ("labels", "found"),
    [([True, False], (1.0, 0.0)), ([1, 0], (1.0, 0.0)), (["+", "-"], (1.0, 0.0)), (["True", "0.5"], (1.0, 0.5)),
     ([None, 0.25], (None, 0.25))],
)  # fmt: skip
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
    assert read([SHEPHERD], "steps", has_template=False) == [Example("Two and two?\n", steps, labels=(1.0, 0.0))]
    assert read([SHEPHERD], "prompt") == [Example([user("Two and two?")], [])]


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
