"""Answers with labels: ranked lists, rows that call an answer good or bad (KTO), and labelled steps."""

import math

import pytest
from form_fixtures import (  # fmt: skip
    ASK,
    FIXTURES,
    HALL,
    KTO,
    PRM800K,
    SHEPHERD,
    STEPS,
    form_of,
    read,
)

from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError


def pairs_of(row: dict) -> list[list[str]]:
    return [list(example.answers) for example in read([row], "preference")]


@pytest.mark.parametrize(
    ("row", "pairs"),
    [
        ({"answers": ["a", "b"], "ranks": [2, 1]}, [["b", "a"]]),
        ({"completions": ["a", "b"], "rankings": ["1", "2"]}, [["a", "b"]]),
        ({"responses": ["a", "b", "c"], "scores": [0, 0, 1]}, [["c", "a"], ["c", "b"]]),
        ({"responses": ["a", "b"], "scores": [1, 1]}, []),
        ({"responses": [{"text": "a", "score": -1}, {"text": "b", "score": 0.5}]}, [["b", "a"]]),
        # raw UltraFeedback; a rank comes before a score
        ({"completions": [{"response": "a", "overall_score": 3}, {"response": "b", "overall_score": 8}]}, [["b", "a"]]),
        ({"answers": [{"answer": "a", "rank": 1, "score": 0}, {"answer": "b", "rank": 2, "score": 9}]}, [["a", "b"]]),
    ],
)
def test_every_pair_of_different_rank(row, pairs):
    row = {"prompt": "Q:", **row}
    assert form_of([row]).name == "ranked"
    assert pairs_of(row) == pairs
    if pairs:
        assert read([row], "sft") == [Example("Q:", [pairs[0][0]])]


def test_answers_without_a_rank_are_no_ranked_list():
    row = {"prompt": "Q:", "responses": ["a", "b"]}
    assert form_of([row]).name == "prompt_response"
    with pytest.raises(UserError, match="have no score or rank"):
        read([row], "sft", data_format="ranked")


def test_kto_rows_give_their_good_answers_all_prompts_and_no_pairs():
    assert read(KTO, "sft") == [Example(f"Q{n}:", [f" {a}"]) for n, a in ((1, "good"), (2, "fine"), (2, "best"))]
    assert read(KTO, "prompt") == [Example(f"Q{n}:", []) for n in (1, 2, 1, 1, 2)]
    with pytest.raises(UserError, match="needs a prompt and two answers; answers with labels are for --objective kto$"):
        read(KTO, "preference")


def test_the_prompt_of_a_kto_row_is_the_same_for_all_uses_and_needs_no_answer():
    row = {"prompt": "Where?", "completion": [HALL], "label": True}
    form = form_of([row])
    [[one], [other]] = [form.read(row, use, "row") for use in ("sft", "prompt")]
    assert one.prompt == other.prompt == [{"role": "user", "content": "Where?"}]
    assert form_of(KTO).read({"prompt": "Where?"}, "prompt", "row") == [Example("Where?", [])]


def test_kto_rows_as_messages():
    row = {"prompt": [ASK], "completion": [HALL], "label": True}
    assert read([row], "unpaired") == [Example([ASK], ["In the hall."], labels=(1.0,))]
    conversation = {"messages": [ASK, HALL], "label": True, "prompt": ASK["content"], "completion": HALL["content"]}
    assert read([conversation], "unpaired") == read([row], "unpaired")


@pytest.mark.parametrize(
    ("label", "is_good"), [
        (1, True), (0, False), (1.0, True), (0.0, False), (-1, False), ("True", True), ("false", False), ("0.0", False)
    ],
)  # fmt: skip
def test_labels_may_be_numbers_or_text(label, is_good):
    assert form_of([{"prompt": "Q:", "completion": "a", "label": label}]).name == "kto"
    assert len(read([{"prompt": "Q:", "completion": "a", "label": label}], "sft")) == is_good


def test_a_label_that_is_a_text_makes_no_kto_rows():
    assert form_of([{"prompt": "Q:", "completion": "a", "label": "spam"}]).name == "prompt_response"


# Single answers


def test_kto_rows_stay_single_and_keep_bad_answers():
    assert read(KTO[:3], "unpaired") == [
        Example("Q1:", [" good"], labels=(1.0,)), Example("Q2:", [" fine"], labels=(1.0,)),
        Example("Q1:", [" bad"], labels=(0.0,)),
    ]  # fmt: skip


@pytest.mark.parametrize("name", [name for name, one in FIXTURES.items() if one.expected["preference"]])
def test_pairs_are_split_into_a_desirable_and_an_undesirable_answer(name):
    fixture = FIXTURES[name]
    if fixture.form == "ranked":
        return
    pairs = fixture.expected["preference"]
    form = form_of(fixture.rows, has_template=fixture.has_template)
    found = [example for row in fixture.rows for example in form.read(row, "unpaired", "row")]
    assert len(found) == 2 * len(pairs)
    for at, pair in enumerate(pairs):
        for side, label in ((0, 1.0), (1, 0.0)):
            one = found[2 * at + side]
            assert (one.prompt, list(one.answers), one.labels) == (pair.prompt, [pair.answers[side]], (label,))
    assert found[0].suffix.endswith(", chosen") and found[1].suffix.endswith(", rejected")


def test_of_a_ranked_list_the_best_and_the_worst_answer_are_taken():
    rows = [
        {"prompt": "Q:", "responses": ["a", "b", "c"], "scores": [2, 9, 1]},
        {"prompt": "R:", "responses": ["x", "y"], "scores": [3, 3]},
    ]
    assert [(one.answers[0], one.labels, one.suffix) for one in read(rows, "unpaired")] == [
        ("b", (1.0,), ", answer 2"), ("c", (0.0,), ", answer 3"),
    ]  # fmt: skip


# Labelled steps


@pytest.mark.parametrize("has_template", [True, False])
def test_a_first_step_that_is_glued_to_the_prompt_prints_a_warning(has_template):
    row = {"prompt": "What is 2+3?", "completions": ["2+3 = 5", "So 5"], "labels": [True, True]}
    form = form_of([row], has_template=has_template)
    start = "nothing separates prompt and answer: '...What is 2+3?2+3 = 5...'; "
    chat = "--apply_chat_template True makes user messages of the prompts, False keeps the text; "
    chat = chat if has_template else ""
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
def test_labels_of_steps_may_be_numbers_or_text(labels, found):
    [example] = read([{**STEPS, "labels": labels}], "steps")
    assert example.labels == found


def test_null_is_a_step_without_a_label():
    [example] = read([{**STEPS, "labels": [None, True]}], "steps")
    assert math.isnan(example.labels[0]) and example.labels[1] == 1.0


def test_math_shepherd():
    assert form_of([SHEPHERD]).name == "math_shepherd"
    steps = ["Step 1: Take two.", "Step 2: Add two: 5"]
    assert read([SHEPHERD], "steps", has_template=False) == [Example("Two and two?\n", steps, labels=(1.0, 0.0))]
    [chat] = read([SHEPHERD], "steps")
    assert chat.prompt == [{"role": "user", "content": "Two and two?"}]


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
