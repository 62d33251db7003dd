"""Single labelled answers (KTO) from rows of each form."""

import pytest
from form_fixtures import FIXTURES, form_of, read, stored

from dschat_ppo.data.examples import Example
from dschat_ppo.errors import UserError

KTO = [
    {"prompt": "Q1:", "completion": " good", "label": True}, {"prompt": "Q2:", "completion": " fine", "label": True},
    {"prompt": "Q1:", "completion": " bad", "label": False},
]  # fmt: skip


def test_kto_rows_stay_single_and_keep_bad_answers():
    assert read(KTO, "unpaired") == [
        Example("Q1:", [" good"], labels=(1.0,)), Example("Q2:", [" fine"], labels=(1.0,)),
        Example("Q1:", [" bad"], labels=(0.0,)),
    ]  # fmt: skip


def test_grouped_kto_rows_give_all_answers_in_the_order_of_the_rows():
    form = form_of(KTO)
    rows = [KTO[2], *KTO]
    table = [row for row, _ in form.regroup(stored(rows))]
    found = [example for row in table for example in form.read(row, "unpaired", "row")]
    assert [(one.prompt, one.answers[0], one.labels, one.suffix) for one in found] == [
        ("Q1:", " bad", (0.0,), ", answer 1"), ("Q1:", " good", (1.0,), ", answer 2"),
        ("Q1:", " bad", (0.0,), ", answer 3"), ("Q2:", " fine", (1.0,), ", answer 1"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", [name for name, one in FIXTURES.items() if one.expected["preference"]])
def test_pairs_are_split_into_a_desirable_and_an_undesirable_answer(name):
    fixture = FIXTURES[name]
    if fixture.form in ("kto", "ranked"):
        return
    pairs = fixture.expected["preference"]
    form = form_of(fixture.rows, has_template=fixture.has_template)
    found = [example for row in fixture.rows for example in form.read(row, "unpaired", "row")]
    assert len(found) == 2 * len(pairs)
    for at, pair in enumerate(pairs):
        for side, label in ((0, 1.0), (1, 0.0)):
            one = found[2 * at + side]
            assert (one.prompt, list(one.answers), one.labels) == (pair.prompt, [pair.answers[side]], (label,))
    assert found[0].suffix.endswith(", chosen answer") and found[1].suffix.endswith(", rejected answer")


def test_of_a_ranked_list_the_best_and_the_worst_answer_are_taken():
    rows = [
        {"prompt": "Q:", "responses": ["a", "b", "c"], "scores": [2, 9, 1]},
        {"prompt": "R:", "responses": ["x", "y"], "scores": [3, 3]},
    ]
    assert [(one.answers[0], one.labels, one.suffix) for one in read(rows, "unpaired")] == [
        ("b", (1.0,), ", answer 2"), ("c", (0.0,), ", answer 3"),
    ]  # fmt: skip


def test_equal_answers_are_refused():
    rows = [{"prompt": "Q:", "chosen": "same", "rejected": "same"}] * 2
    with pytest.raises(UserError, match="chosen and rejected are equal"):
        read(rows, "unpaired", data_format="preference")


def test_answers_without_labels_are_refused():
    with pytest.raises(UserError, match="needs answers with labels .*or pairs of answers"):
        form_of([{"prompt": "Q:", "response": "a"}]).require("unpaired")
