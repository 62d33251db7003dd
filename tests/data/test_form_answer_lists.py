"""Several answers to one prompt: pairs by score or rank, and rows that call an answer good or bad."""

import json

import pytest
from form_fixtures import ASK, HALL, KTO, ROOF, TOOL, form_of, read, stored

from dschat_ppo.data.examples import Example
from dschat_ppo.data.form_labels import group_by_prompt
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


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"responses": ["a", ""], "scores": [1, 2]}, "answer 2 of 'responses' is empty"),
        ({"responses": ["a", None], "scores": [1, 2]}, "answer 2 of 'responses' is null"),
        ({"responses": ["a", "b"], "scores": [1]}, r"'scores' is list .*; expected a list of 2 numbers"),
        ({"responses": ["a", "b"], "scores": [1, None]}, "'scores' holds null"),
        ({"responses": ["a", "b"], "scores": [1, float("nan")]}, "'scores' holds nan"),
        ({"responses": ["a", "a"], "scores": [1, 2]}, "answers 2 and 1 of 'responses' are equal"),
        ({"responses": [], "scores": []}, "'responses' is list"),
        ({"responses": ["a", "b"], "scores": None}, "'scores' is null"),
    ],
)
def test_a_bad_list_is_named(row, words):
    form = form_of([{"prompt": "Q:", "responses": ["a", "b"], "scores": [1, 2]}])
    with pytest.raises(UserError, match=f"^row 9: {words}"):
        form.read({"prompt": "Q:", **row}, "preference", "row 9")


def test_answers_without_a_rank_are_no_ranked_list():
    row = {"prompt": "Q:", "responses": ["a", "b"]}
    assert form_of([row]).name == "prompt_response"
    with pytest.raises(UserError, match="have no score or rank"):
        read([row], "sft", data_format="ranked")


def grouped(rows: list[dict]) -> tuple:
    form = form_of(rows)
    return form, [{**row, "_origin": f"row {origin + 1}"} for row, origin in form.regroup(stored(rows))]


def test_kto_rows_are_grouped_by_prompt_before_anything_else():
    form, rows = grouped(KTO)
    assert [row["_origin"] for row in rows] == ["row 1", "row 2"]
    examples = {
        use: [example for row in rows for example in form.read(row, use, "row")]
        for use in ("sft", "preference", "prompt")
    }
    assert examples["sft"] == [
        Example("Q1:", [" good"], suffix=", answer 1"),
        Example("Q2:", [" fine"], suffix=", answer 1"), Example("Q2:", [" best"], suffix=", answer 2"),
    ]  # fmt: skip
    assert examples["preference"] == [
        Example("Q1:", [" good", " bad"], suffix=", answers 1 and 2"),
        Example("Q1:", [" good", " worse"], suffix=", answers 1 and 3"),
    ]
    assert examples["prompt"] == [Example("Q1:", []), Example("Q2:", [])]


def test_rows_are_grouped_by_their_prompts_in_order():
    rows = stored({"prompt": f"{n % 7}:", "completion": f"{n}", "label": n % 2 == 0} for n in range(40))
    found = list(group_by_prompt(rows, "prompt", "completion", "label"))
    assert [origin for _, origin in found] == list(range(7)) and [row["prompt"] for row, _ in found][3] == "3:"
    assert found[3][0]["_answers"] == [str(n) for n in range(40) if n % 7 == 3]
    assert found[3][0]["_labels"] == [n % 2 == 0 for n in range(40) if n % 7 == 3]


def test_kto_rows_alone_give_good_answers_but_no_pairs():
    assert read(KTO, "sft") == [Example(f"Q{n}:", [f" {a}"]) for n, a in ((1, "good"), (2, "fine"), (2, "best"))]
    with pytest.raises(UserError, match="pairs of KTO rows need all rows of a prompt"):
        read(KTO, "preference")


def test_kto_rows_as_messages():
    rows = [
        {"prompt": [ASK], "completion": [HALL], "label": True},
        {"prompt": [ASK], "completion": [ROOF], "label": False},
    ]
    form, table = grouped(rows)
    [example] = [example for row in table for example in form.read(row, "preference", "row")]
    assert (form.rendering, example.prompt, example.answers) == ("chat", [ASK], ["In the hall.", "On the roof."])


@pytest.mark.parametrize(
    ("label", "is_good"), [
        (1, True), (0, False), (1.0, True), (0.0, False), (-1, False), ("True", True), ("false", False), ("0.0", False)
    ],
)  # fmt: skip
def test_labels_may_be_numbers_or_text(label, is_good):
    assert form_of([{"prompt": "Q:", "completion": "a", "label": label}]).name == "kto"
    assert len(read([{"prompt": "Q:", "completion": "a", "label": label}], "sft")) == is_good


def test_a_label_that_is_neither_is_named():
    with pytest.raises(UserError, match="^row 1: 'label' is null; expected true or false"):
        form_of(KTO).read({"prompt": "Q:", "completion": "a", "label": None}, "sft", "row 1")


def test_a_label_that_is_a_text_makes_no_kto_rows():
    assert form_of([{"prompt": "Q:", "completion": "a", "label": "spam"}]).name == "prompt_response"


@pytest.mark.parametrize(
    ("columns", "flags"),
    [
        (({"system": "Be kind."}, {"system": "Be brief."}), {}),
        (({"persona": "Be kind."}, {"persona": "Be brief."}), {"system_column": "persona"}),
        (({"tools": json.dumps([TOOL])}, {"tools": ""}), {}),
    ],
)
def test_answers_under_another_system_message_or_with_other_tools_are_no_pair(columns, flags):
    first, second = (
        [{"prompt": [ASK], "completion": [answer], "label": label, **column} for answer, label in answers]
        for column, answers in zip(columns, ([(HALL, True), (ROOF, False)], [(ROOF, True), (HALL, False)]), strict=True)
    )
    form = form_of([*first, *second], **flags)
    rows = [row for row, _ in form.regroup(stored([*first, *second]))]
    examples = [example for row in rows for example in form.read(row, "preference", "row")]
    assert [list(example.answers) for example in examples] == [
        [HALL["content"], ROOF["content"]],
        [ROOF["content"], HALL["content"]],
    ]
    assert (examples[0].prompt, examples[0].tools) != (examples[1].prompt, examples[1].tools)
