"""What reward functions may return."""

import math

import numpy as np
import pytest
import torch

from dschat_ppo.rewards.call_forms import NO_NUMBER, CallLog, Returned, clean_name, returned_rows

TEXT = Returned(NO_NUMBER, {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, Returned(2.0, {})),
        (True, Returned(1.0, {})),
        (np.float32(0.5), Returned(0.5, {})),
        (torch.tensor(3), Returned(3.0, {})),
        (None, Returned(None, {})),
        ("2", TEXT),
        ((1.0, {"acc": 1}), TEXT),
        ([1.0], TEXT),
        (torch.ones(2), TEXT),
        ({"score": 1.5}, Returned(1.5, {})),
        ({"score": None, "seen": True}, Returned(None, {"seen": 1.0})),
        ({"score": "high", "a": 1}, Returned(NO_NUMBER, {"a": 1.0})),
        ({"score": 1, "acc": True, "n": 3, "x": np.float64(0.25), "pred": "7", "no": None, "many": [1]},
         Returned(1.0, {"acc": 1.0, "n": 3.0, "x": 0.25})),
        ({"score": 1, "nan": math.nan, "inf": -math.inf, "large": 10**400}, Returned(1.0, {})),
        ({"acc": 1.0, "a b": 2}, Returned("returned a dict without 'score' (its keys: acc, a_b)", {})),
        ({}, Returned("returned a dict without 'score' (its keys: none)", {})),
    ],
)  # fmt: skip
def test_a_returned_value(value, expected):
    assert returned_rows(value, per_row=True) == [expected]
    assert returned_rows([value, 0], per_row=False) == [expected, Returned(0.0, {})]


def test_a_batch_may_return_any_sequence_but_no_dict():
    assert returned_rows(torch.tensor([1.0, 2.0]), per_row=False) == [Returned(1.0, {}), Returned(2.0, {})]
    assert returned_rows((value for value in (1, None)), per_row=False) == [Returned(1.0, {}), Returned(None, {})]
    for value in ({"score": [1.0]}, "12", 3.0, None):
        with pytest.raises(TypeError, match=f"returned {type(value).__name__}, not a list of numbers"):
            returned_rows(value, per_row=False)


def test_names_of_numbers_are_cleaned():
    assert clean_name("pass@1") == "pass@1" and clean_name("a/b c\nd\ud800") == "a_b_c_d_"
    assert clean_name("x" * 999) == "x" * 64 and clean_name("") == "_" and clean_name(3) == "3"


def test_a_log_adds_numbers_to_the_rows_of_a_call():
    log = CallLog()
    metric, extra = log.log_metric, log.log_extra
    metric("loss", 1), metric("loss", torch.tensor(2.0)), metric("text", "a"), metric("nan", math.nan)
    extra("n", [1, None]), extra("own", (5, 6)), extra("short", [1])
    rows = [Returned(1.0, {"own": 7.0}), Returned(None, {})]
    assert log.added_to(rows) == [
        Returned(1.0, {"loss": 1.5, "n": 1.0, "own": 7.0}), Returned(None, {"loss": 1.5, "own": 6.0})
    ]  # fmt: skip
    assert CallLog().added_to(rows) == rows


def test_a_log_named_scores_is_kept_unless_the_reply_has_scores_of_its_own():
    reply = {"rewards": [1.0, 2.0], "extra_logs": {"scores": [3.0, 4.0]}}
    assert [row.numbers for row in returned_rows(reply, per_row=False)] == [{"scores": 3.0}, {"scores": 4.0}]
    own = returned_rows({**reply, "scores": [5.0, 6.0]}, per_row=False)
    assert [row.numbers for row in own] == [{"scores": 5.0}, {"scores": 6.0}]
