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


@pytest.mark.parametrize(
    ("response", "answer", "settings", "score"),
    [
        ("Paris", "Paris", {}, True),
        (" Paris\n", "Paris ", {}, True),
        ("paris", "Paris", {}, False),
        ("STRASSE", "straße", {"ignore_case": True}, True),
        ("Paris.", "Paris", {}, False),
        ("", "", {}, True),
        ("42", 42, {}, True),
        ("b", ["a", "b"], {}, True),
        ("B", ["a", "b"], {"ignore_case": True}, True),
        ("c", ["a", "b"], {}, False),
        ("a", [], {}, False),
    ],
)
def test_exact_match(response, answer, settings, score):
    assert exact_match(response, answer, **settings) is score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 18.", "18"),
        ("$1,234.50.", "1234.50"),
        ("it costs $1,000,000!", "1000000"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("10 - 4", "4"),
        ("10-4", "4"),
        ("f(3)-2", "2"),
        ("it is -2", "-2"),
        ("x=-2", "-2"),
        ("(-3)", "-3"),
        ("\N{MINUS SIGN}7", "-7"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("12,345 and 1234,567", "567"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("2.50", "2.5"),
        ("1e3", "1000"),
        ("1.5e-2", "0.015"),
        ("5 each", "5"),
        ("5km", "5"),
        ("20%", "20"),
        ("3/4", "4"),
        ("**42**", "42"),
        (r"\$18", "18"),
        ("first 7 then H2O", "7"),
        ("version 1.2.3", "1.2"),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "H2O", "x2", "...", "$", "-"])
def test_no_number(text):
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("He pays 9 + 9 = $18.00.", "9 * 2 = <<9*2=18>>18\n#### 18", True),
        ("1,000", "so\n#### 1000", True),
        ("1000", "#### 1,000", True),
        ("18", "17 #### 3 #### 18", True),
        ("it was 18, now 19", "#### 18", False),
        ("no idea", "#### 18", False),
        ("-18", "#### 18", False),
        ("24 x 3 = 72\n#### 72 (that is 24 + 48)", "#### 72", True),
        ("#### 72\n\nQuestion: what is 2 + 3?\nAnswer: 5", "#### 72", True),
        ("#### 72\n\nQuestion: what is 2 + 3?\nAnswer: 5", "#### 5", False),
        ("#### 72\nno:\n#### 71\nin 1 hour", "71", True),
        ("#### **$1,072.50** in all 4 weeks", "1072.5", True),
        ("7\n####-7 and 2", "-7", True),
        ("#### Step 1\nso it is 42", "42", True),
        ("so it is 42 ####", "42", True),
        ("42", "#### 42 of 50", True),
        ("0.1", 0.1, True),
        ("3.0", 3, True),
        ("3", "3.0", True),
        ("7", "the answer is 7", True),
    ],
)
def test_numeric_match(response, answer, score):
    assert numeric_match(response, answer) is score


@pytest.mark.parametrize("rule", [exact_match, numeric_match, boxed_math])
def test_a_row_without_an_answer_raises(rule):
    with pytest.raises(ValueError, match="no column 'answer'"):
        rule("1", None)


def test_an_answer_without_a_number_raises():
    with pytest.raises(ValueError, match="holds no number: 'eighteen'"):
        numeric_match("18", "eighteen")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\}", None),
        (r"\boxed{}", ""),
        (r"\boxed{1} \boxed{2", None),
        ("1", None),
        ("{1}", None),
        ("", None),
    ],
)
def test_last_boxed(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{\frac12}", r"\boxed{\frac{2}{4}}", True),
        (r"\boxed{2x+1}", "1+2x", True),
        (r"\boxed{(1,2)}", "(2,1)", False),
        (r"first \boxed{3}, no: \boxed{4}", "4", True),
        (r"first \boxed{3}, no: \boxed{4}", "3", False),
        ("4", "4", False),
        (r"\boxed{4", "4", False),
        (r"\boxed{}", "4", False),
        (r"\boxed{4}", 4, True),
    ],
)
def test_boxed_math(response, answer, score):
    assert boxed_math(response, answer) is score


def test_an_unreadable_answer_raises():
    with pytest.raises(ValueError, match="nothing that math_verify can parse"):
        boxed_math(r"\boxed{4}", "")


@pytest.mark.parametrize(
    ("response", "pattern", "score"),
    [
        ("<think>a\nb</think>c", "<think>.*</think>.*", True),
        ("  <think></think>\n", "<think>.*</think>", True),
        ("x<think></think>", "<think>.*</think>", False),
        ("<think></think>x", "<think>.*</think>", False),
        ("", "", True),
        ("12", r"\d+", True),
    ],
)
def test_format_match(response, pattern, score):
    assert format_match(response, pattern) is score


def test_format_match_needs_a_pattern():
    with pytest.raises(ValueError, match="'pattern'"):
        format_match("a")


@pytest.mark.parametrize(("response", "unit", "expected"), [("two  words", "words", 2), ("", "words", 0),
                                                            ("abc d", "characters", 5)])  # fmt: skip
def test_length(response, unit, expected):
    assert length(response, unit) == expected


def test_length_penalty():
    # most 10, buffer 4: free up to 6, then -1/4 for each
    penalties = [length_penalty("x" * n, most=10, buffer=4) for n in (0, 6, 7, 8, 9, 10, 11, 100)]
    assert penalties == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert length_penalty("a b c", most=4, buffer=2, unit="words") == -0.5


@pytest.mark.parametrize("settings", [{"buffer": 0}, {"most": 10, "buffer": 11}, {"unit": "tokens"}])
def test_invalid_settings_of_the_length_rules_raise(settings):
    with pytest.raises(ValueError):
        length_penalty("a", **settings)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ('{"a": [1, null]}', True),
        (" 3\n", True),
        ('```json\n{"a": 1}\n```', True),
        ('```\n{"a": 1}\n```', True),
        ('look: ```json\n{"a": 1}\n```', False),
        ("{'a': 1}", False),
        ('{"a": 1} and more', False),
        ("", False),
        ("NaN", False),
        ('{"a": Infinity}', False),
        ("[" * 100_000, False),
    ],
)
def test_json_valid(response, score):
    assert json_valid(response) is score


def test_gsm8k_as_verl_and_as_its_own_files_name_the_answer():
    """`answer` is the extracted number, or the whole solution with `####`."""
    for answer in ("72", 72, "48 / 2 = 24, and 48 + 24 = 72\n#### 72"):
        assert numeric_match("She sold 48 + 24 = 72 clips.\n#### 72", answer)
        assert numeric_match("The answer is $72.00.", answer)
        assert not numeric_match("#### 24, not 72", answer)
