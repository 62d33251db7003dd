"""The shipped rules against values computed by hand."""

from decimal import Decimal

import pytest

from dschat_ppo.rewards.rules import (
    boxed_math,
    exact_match,
    format_match,
    json_valid,
    last_boxed,
    last_number,
    length,
    length_penalty,
    numeric_match,
)

SOLUTION = "48 / 2 = 24, and 48 + 24 = 72\n#### 72"  # as GSM8K's own files name the answer; verl's hold the number


@pytest.mark.parametrize(("response", "answer", "settings", "score"), [
    (" Paris\n", "Paris ", {}, True), ("paris", "Paris", {}, False), ("Paris.", "Paris", {}, False), ("", "", {}, True),
    ("STRASSE", "straße", {"ignore_case": True}, True), ("42", 42, {}, True), ("b", ["a", "b"], {}, True),
    ("B", ["a", "b"], {"ignore_case": True}, True), ("c", ["a", "b"], {}, False), ("a", [], {}, False),
])  # fmt: skip
def test_exact_match(response, answer, settings, score):
    assert exact_match(response, answer, **settings) is score


@pytest.mark.parametrize(("text", "number"), [
    ("the answer is 18.", "18"), ("$1,234.50.", "1234.50"), ("-$5", "-5"), ("$-5", "-5"), ("10 - 4", "4"),
    ("10-4", "4"), ("f(3)-2", "2"), ("x=-2", "-2"), ("(-3)", "-3"),
    ("\N{MINUS SIGN}7", "-7"), ("1,2,3", "3"), ("1,2345", "2345"), ("12,345 and 1234,567", "567"), ("-.5", "-0.5"),
    ("1.5e-2", "0.015"), ("5km", "5"), ("3/4", "4"), ("first 7 then H2O", "7"), ("version 1.2.3", "1.2"), ("", None),
    ("x2", None), ("...", None),
])  # fmt: skip
def test_last_number(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(("response", "answer", "score"), [
    ("He pays 9 + 9 = $18.00.", "9 * 2 = <<9*2=18>>18\n#### 18", True), ("1000", "#### 1,000", True),
    ("18", "17 #### 3 #### 18", True), ("it was 18, now 19", "#### 18", False), ("no idea", "#### 18", False),
    ("-18", "#### 18", False), ("24 x 3 = 72\n#### 72 (that is 24 + 48)", "#### 72", True),
    ("#### 72\n\nQuestion: what is 2 + 3?\nAnswer: 5", "#### 5", False), ("so it is 42 ####", "42", True),
    ("#### 72\nno:\n#### 71\nin 1 hour", "71", True), ("#### **$1,072.50** in all 4 weeks", "1072.5", True),
    ("#### Step 1\nso it is 42", "42", True), ("42", "#### 42 of 50", True), ("0.1", 0.1, True), ("3", "3.0", True),
    *((response, answer, right) for answer in ("72", 72, SOLUTION) for response, right in (
        ("She sold 48 + 24 = 72 clips.\n#### 72", True), ("The answer is $72.00.", True), ("#### 24, not 72", False))),
])  # fmt: skip
def test_numeric_match(response, answer, score):
    assert numeric_match(response, answer) is score


@pytest.mark.parametrize(("text", "inside"), [
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed{1} or \boxed{2}", "2"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{a\}", None), (r"\boxed{}", ""), (r"\boxed{1} \boxed{2", None), ("{1}", None), ("", None),
])  # fmt: skip
def test_last_boxed(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(("response", "answer", "score"), [
    (r"\boxed{\frac{1}{2}}", "0.5", True), (r"\boxed{\frac12}", r"\boxed{\frac{2}{4}}", True), ("4", "4", False),
    (r"\boxed{2x+1}", "1+2x", True), (r"\boxed{(1,2)}", "(2,1)", False), (r"\boxed{3}, no: \boxed{4}", "3", False),
    (r"\boxed{4", "4", False), (r"\boxed{}", "4", False), (r"\boxed{4}", 4, True),
])  # fmt: skip
def test_boxed_math(response, answer, score):
    assert boxed_math(response, answer) is score


@pytest.mark.parametrize(("rule", "words", "settings", "problem"), [
    *((rule, ("1", None), {}, "no column 'answer'") for rule in (exact_match, numeric_match, boxed_math)),
    (numeric_match, ("18", "eighteen"), {}, "holds no number: 'eighteen'"), (format_match, ("a",), {}, "'pattern'"),
    (boxed_math, (r"\boxed{4}", ""), {}, "nothing that math_verify can parse"),
    *((length_penalty, ("a",), settings, "must be") for settings in ({"buffer": 0}, {"most": 10, "buffer": 11},
                                                                    {"unit": "tokens"})),
])  # fmt: skip
def test_what_a_rule_cannot_score_raises(rule, words, settings, problem):
    with pytest.raises(ValueError, match=problem):
        rule(*words, **settings)


@pytest.mark.parametrize(("response", "score"), [
    ("<think>a\nb</think>", True), (" <think></think>\n", True), ("x<think></think>", False),
    ("<think></think>x", False),
])  # fmt: skip
def test_format_match(response, score):
    assert format_match(response, "<think>.*</think>") is score


def test_length_and_its_penalty():
    assert [length("two  words", "words"), length("", "words"), length("abc d", "characters")] == [2, 0, 5]
    # most 10, buffer 4: free up to 6, then -1/4 for each
    penalties = [length_penalty("x" * n, most=10, buffer=4) for n in (0, 6, 7, 8, 9, 10, 11, 100)]
    assert penalties == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert length_penalty("a b c", most=4, buffer=2, unit="words") == -0.5


@pytest.mark.parametrize(("response", "score"), [
    ('{"a": [1, null]}', True), (" 3\n", True), ('```json\n{"a": 1}\n```', True), ('```\n{"a": 1}\n```', True),
    ('look: ```json\n{"a": 1}\n```', False), ("{'a': 1}", False), ('{"a": 1} and more', False), ("", False),
    ('{"a": Infinity}', False), ("[" * 100_000, False),
])  # fmt: skip
def test_json_valid(response, score):
    assert json_valid(response) is score
