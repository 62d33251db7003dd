"""Reward functions: their names, their arguments, and the score of failed calls; the shipped rules
by hand."""

import re
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from dschat_ppo.errors import UserError
from dschat_ppo.rewards import function_reward
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.rewards.function_reward import RULES, FunctionReward, FunctionSpec, parse_function
from dschat_ppo.rewards.reward_source import CallCounts, RewardRequest
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

HERE = Path(__file__).parents[1]
FILE = str(HERE / "reward_functions.py")
PROMPTS = ["a", "", "three", "of four words", "five"]
RESPONSES = ["yes", "no", "", "banana", "x"]
ROWS = [
    {"answer": 3, "extra": "e"},
    {"answer": None},
    {},
    {"extra": None, "answer": -1},
    {"extra": 0, "answer": 0},
]
REQUEST = RewardRequest.of(PROMPTS, RESPONSES, ROWS)


def ask(name, request=REQUEST, workers=2, timeout=10.0, settings=()):
    """(scores, with -9 for those that failed; number of failed calls) of a function of
    `reward_functions.py`."""
    reward = FunctionReward(FunctionSpec(FILE, name, 1.0, settings), workers, timeout)
    try:
        scores = reward(request, None)
        assert scores.dtype == torch.float32
        assert scores[reward.failed].isnan().all()
        return scores.masked_fill(reward.failed, -9.0).tolist(), reward.counts.failed
    finally:
        reward.close()


def of_responses(*responses) -> RewardRequest:
    return RewardRequest.of([""] * len(responses), list(responses), [{} for _ in responses])


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("lengths", [3, 2, 0, 6, 1]),
        # columns as lists, None where a row lacks one: len(prompt) + 10 len(response) + 100 answer
        # + 1000 without extra
        ("columns", [1 + 30 + 300, 0 + 20 + 1000, 5 + 1000, 13 + 60 - 100 + 1000, 4 + 10]),
        ("named_column", [10, -1, -1, 6, 7]),  # what it names alone, and None for what no row has
        ("per_row", [1 - 3 + 3, -2, 5, 13 - 6 - 1, 4 - 1]),
        ("per_row_bool", [1, 0, 0, 0, 0]),
        ("slow_batch", [1, 0, 5, 13, 4]),  # asynchronous
        ("slow_row", [1, 0, 5, 13, 4]),
        ("counter", [0, 0, 0, 3, 0]),  # an object with `__call__`
    ],
)
def test_what_functions_get_and_return(name, scores):
    assert ask(name) == (scores, 0)


def test_rows_are_distributed_over_the_workers():
    reward = FunctionReward(FunctionSpec(FILE, "who"), 2, 10.0)
    # a busy machine may start the second worker late
    processes, deadline = set(), time.monotonic() + 60
    while len(processes) < 2 and time.monotonic() < deadline:
        processes |= set(reward(REQUEST, None).tolist())
    reward.close()
    assert len(processes) == 2


CAUSES = {
    "raise": "ZeroDivisionError: division by zero",
    "bare": "KeyError (",
    "long": "RuntimeError: xxx",
    "lines": "OSError: one two (",
    "hang": "longer than 1 s",
    "exit": "process ended",
    "quit": "SystemExit: 3",
    "crash": "process ended",
    "surrogate": r"ValueError: \ud800",
    "nan": "nan",
    "inf": "-inf",
    "huge": "1e+39",
    "text": "not a number",
    "complex": "not a number",
    "garbage": "sent an invalid reply",
}


@pytest.mark.parametrize("form", ["faulty_row", "faulty_batch"])
def test_a_failed_call_affects_only_its_row(form, capsys, monkeypatch):
    monkeypatch.setattr(function_reward, "MOST_WARNINGS", len(CAUSES))
    scores, faults = ask(form, of_responses("four", *CAUSES, "", "a"), workers=4, timeout=1.0)
    assert scores == [4, *[-9] * len(CAUSES), 0, 1] and faults == len(CAUSES)
    warnings = capsys.readouterr().out.splitlines()
    assert all(
        line.startswith(f"warning: rank 0: reward function {form}: ") and len(line) < 1000
        for line in warnings
    )
    by_row = {
        int(line.split(": row ")[1].split(":")[0]): line for line in warnings if ": row " in line
    }
    assert [fault for row, fault in enumerate(CAUSES, 1) if CAUSES[fault] not in by_row[row]] == []
    assert len(warnings) - len(by_row) == (form == "faulty_batch")


def test_a_list_of_another_length():
    assert ask("wrong_length", of_responses("abc", "two", "a")) == ([3, -9, 1], 1)


def in_groups_of(samples, *responses) -> RewardRequest:
    """Every prompt has the same text."""
    rows = [{"groups": "a column"} for _ in responses]
    return RewardRequest.of(["same"] * len(rows), list(responses), rows, samples=samples)


@pytest.mark.parametrize(
    ("name", "request_", "scores"),
    [
        # of one group each it would be [0, 1/5, 2/5, 3/5, 4/5, 1]
        ("ranking", in_groups_of(3, "a", "bb", "ccc", "dddd", "eeeee", "f" * 6), [0, 0.5, 1] * 2),
        ("ranking", in_groups_of(3, "bb", "ccc", "a"), [0.5, 1, 0]),  # also a single group again
        # a group that fails again has no score
        ("ranking", in_groups_of(2, "a", "raise", "ccc", "bb"), [-9, -9, 1, 0]),
        ("one_short", in_groups_of(2, "a", "short", "ccc", "bb"), [-9, -9, 2, 2]),
    ],
)
def test_a_failed_call_of_a_group_function_is_repeated_group_by_group(
    name, request_, scores, capsys
):
    assert ask(name, request_, workers=1) == (scores, scores.count(-9))
    assert "it is repeated group by group" in capsys.readouterr().out


def test_a_function_of_single_responses_knows_no_groups():
    message = "ranks_one: cannot be used: .*'groups' is for .*: take the list 'responses' in its"
    with pytest.raises(UserError, match=message):
        FunctionReward(FunctionSpec(FILE, "ranks_one"), 1, 10.0)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("exact_match", (RULES["exact_match"], "exact_match", 1.0, ())),
        (f"{FILE}:lengths", (FILE, "lengths", 1.0, ())),
        (f"{FILE}:lengths:-2e-1", (FILE, "lengths", -0.2, ())),
        ("some.module:name:3", ("some.module", "name", 3.0, ())),
        (
            f"{FILE}:scaled?factor=2&word=a%26b:0.25",
            (FILE, "scaled", 0.25, (("factor", "2"), ("word", "a&b"))),
        ),
        (
            r"format_match?pattern=(?:\d+|a)%3A2:0.5",
            (RULES["format_match"], "format_match", 0.5, (("pattern", r"(?:\d+|a):2"),)),
        ),
        ("math=exact_match:0.5", (RULES["exact_match"], "exact_match", 0.5, (), ("math",))),
        (
            f"a, b/c,a={FILE}:scaled?word=x=y",
            (FILE, "scaled", 1.0, (("word", "x=y"),), ("a", "b/c")),
        ),
    ],
)
def test_valid_specs(spec, expected):
    found = parse_function(spec)
    assert (found.path, found.name, found.weight, found.settings, found.sources) == (*expected, ())[
        :5
    ]


def test_a_rule_whose_extra_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    problem = (
        r"^--eval_reward_function boxed_math needs the package math-verify: pip install -e"
        r' "\.\[math\]"$'
    )
    with pytest.raises(UserError, match=problem):
        parse_function("boxed_math", "--eval_reward_function")


def test_a_path_with_an_equals_sign_is_no_route(tmp_path, monkeypatch):
    folder = tmp_path / "lr=1"
    folder.mkdir()
    (folder / "f.py").write_text("")
    assert parse_function(f"{folder}/f.py:f:2").sources == ()
    assert str(parse_function(f"a,b={folder}/f.py:f:2")) == f"--reward_function a,b={folder}/f.py:f"


def routed(*sources) -> list[dict]:
    return [{} if source is None else {"data_source": source} for source in sources]


def test_a_function_with_a_route_is_called_only_for_its_rows(capsys):
    request = RewardRequest.of(
        [""] * 6,
        ["aa", "raise", "b", "raise", "", "none"],
        routed("math", "code", "gsm8k", None, "math", "maths"),
    )
    reward = FunctionReward(FunctionSpec(FILE, "faulty_row", sources=("math", "gsm8k")), 2, 10.0)
    scores = reward(request, None)
    nan = float("nan")
    assert (
        scores.tolist() == pytest.approx([2, nan, 1, nan, 0, nan], nan_ok=True)
        and scores.dtype == torch.float32
    )
    assert reward.counts == CallCounts(3, 0) and capsys.readouterr().out == ""
    assert reward(RewardRequest.of(["", ""], ["a", "b"], routed("code", None)), None).isnan().all()
    assert reward.counts == CallCounts(3, 0)
    reward.close()


def test_a_rule_reads_the_correct_answer_and_not_the_column_that_holds_it():
    rows = [
        {"answer": "1 + 1 = 2 #### 2", "_truth": "2"},
        {"answer": "2"},
        {"answer": "2", "_truth": "3"},
    ]
    rule = FunctionReward(parse_function("exact_match"), 1, 10.0)
    assert rule(RewardRequest.of([""] * 3, ["2"] * 3, rows), None).tolist() == [1.0, 1.0, 0.0]
    rule.close()
    own = RewardRequest.of([""], ["a"], [{"answer": 3, "_truth": "9"}])
    assert ask("per_row", own) == ([3 - 1], 0), "other functions see the columns as they are"


@pytest.mark.parametrize(
    ("spec", "score"),
    [
        ("numeric_match", 0),  # the number is in the thoughts alone
        ("numeric_match?text=spoken", 1),
        ("numeric_match?text=thoughts", 1),
        ("exact_match", 0),
        ("length", len("<think>42</think>None.")),
        ("length?text=final", len("None.")),
        ("format_match?pattern=<think>.*</think>.*", 1),
        ("format_match?pattern=<think>.*</think>.*&text=final", 0),
        (f"{FILE}:lengths", len("<think>42</think>None.")),
        (f"{FILE}:lengths?text=final", len("None.")),
    ],
)
def test_rules_of_answers_read_what_follows_the_thoughts(spec, score):
    spoken = "<think>42</think>None."
    text = ResponseText(spoken, "None.", "42", spoken, [])
    request = RewardRequest([{"answer": "42"}], [0], lambda: ([""], [text]))
    reward = FunctionReward(parse_function(spec), 1, 10.0)
    assert reward(request, None).tolist() == [score]
    reward.close()


def test_an_unknown_text_is_refused_by_name():
    message = "exact_match: cannot be used: .*text must be one of final, spoken, .* not 'last'"
    with pytest.raises(UserError, match=message):
        FunctionReward(parse_function("exact_match?text=last"), 1, 10.0)


# as GSM8K's own files name the answer; verl's hold the number
SOLUTION = "48 / 2 = 24, and 48 + 24 = 72\n#### 72"


@pytest.mark.parametrize(
    ("response", "answer", "settings", "score"),
    [
        (" Paris\n", "Paris ", {}, True),
        ("paris", "Paris", {}, False),
        ("Paris.", "Paris", {}, False),
        ("", "", {}, True),
        ("STRASSE", "straße", {"ignore_case": True}, True),
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
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("10 - 4", "4"),
        ("10-4", "4"),
        ("f(3)-2", "2"),
        ("x=-2", "-2"),
        ("(-3)", "-3"),
        ("\N{MINUS SIGN}7", "-7"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("12,345 and 1234,567", "567"),
        ("-.5", "-0.5"),
        ("1.5e-2", "0.015"),
        ("5km", "5"),
        ("3/4", "4"),
        ("first 7 then H2O", "7"),
        ("version 1.2.3", "1.2"),
        ("", None),
        ("x2", None),
        ("...", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("He pays 9 + 9 = $18.00.", "9 * 2 = <<9*2=18>>18\n#### 18", True),
        ("1000", "#### 1,000", True),
        ("18", "17 #### 3 #### 18", True),
        ("it was 18, now 19", "#### 18", False),
        ("no idea", "#### 18", False),
        ("-18", "#### 18", False),
        ("24 x 3 = 72\n#### 72 (that is 24 + 48)", "#### 72", True),
        ("#### 72\n\nQuestion: what is 2 + 3?\nAnswer: 5", "#### 5", False),
        ("so it is 42 ####", "42", True),
        ("#### 72\nno:\n#### 71\nin 1 hour", "71", True),
        ("#### **$1,072.50** in all 4 weeks", "1072.5", True),
        ("#### Step 1\nso it is 42", "42", True),
        ("42", "#### 42 of 50", True),
        ("0.1", 0.1, True),
        ("3", "3.0", True),
        *(
            (response, answer, right)
            for answer in ("72", 72, SOLUTION)
            for response, right in (
                ("She sold 48 + 24 = 72 clips.\n#### 72", True),
                ("The answer is $72.00.", True),
                ("#### 24, not 72", False),
            )
        ),
    ],
)
def test_numeric_match(response, answer, score):
    assert numeric_match(response, answer) is score


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\}", None),
        (r"\boxed{}", ""),
        (r"\boxed{1} \boxed{2", None),
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
        ("4", "4", False),
        (r"\boxed{2x+1}", "1+2x", True),
        (r"\boxed{(1,2)}", "(2,1)", False),
        (r"\boxed{3}, no: \boxed{4}", "3", False),
        (r"\boxed{4", "4", False),
        (r"\boxed{}", "4", False),
        (r"\boxed{4}", 4, True),
    ],
)
def test_boxed_math(response, answer, score):
    assert boxed_math(response, answer) is score


@pytest.mark.parametrize(
    ("rule", "words", "settings", "problem"),
    [
        *(
            (rule, ("1", None), {}, "no column 'answer'")
            for rule in (exact_match, numeric_match, boxed_math)
        ),
        (numeric_match, ("18", "eighteen"), {}, "holds no number: 'eighteen'"),
        (format_match, ("a",), {}, "'pattern'"),
        (boxed_math, (r"\boxed{4}", ""), {}, "nothing that math_verify can parse"),
        *(
            (length_penalty, ("a",), settings, "must be")
            for settings in ({"buffer": 0}, {"most": 10, "buffer": 11}, {"unit": "tokens"})
        ),
    ],
)
def test_what_a_rule_cannot_score_raises(rule, words, settings, problem):
    with pytest.raises(ValueError, match=problem):
        rule(*words, **settings)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a\nb</think>", True),
        (" <think></think>\n", True),
        ("x<think></think>", False),
        ("<think></think>x", False),
    ],
)
def test_format_match(response, score):
    assert format_match(response, "<think>.*</think>") is score


def test_length_and_its_penalty():
    assert [length("two  words", "words"), length("", "words"), length("abc d", "characters")] == [
        2,
        0,
        5,
    ]
    # most 10, buffer 4: free up to 6, then -1/4 for each
    penalties = [length_penalty("x" * n, most=10, buffer=4) for n in (0, 6, 7, 8, 9, 10, 11, 100)]
    assert penalties == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert length_penalty("a b c", most=4, buffer=2, unit="words") == -0.5


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
        ('{"a": Infinity}', False),
        ("[" * 100_000, False),
    ],
)
def test_json_valid(response, score):
    assert json_valid(response) is score


@pytest.mark.parametrize("module", ["openrlhf.utils", "verl.utils.reward_score", "nowhere"])
def test_a_file_that_imports_a_trainer_is_answered_with_the_rule_that_is_here(tmp_path, module):
    file = tmp_path / "math_reward_func.py"
    file.write_text(f"from {module} import grade_answer\n\n\ndef reward_func(queries): ...\n")
    with pytest.raises(UserError, match=f"No module named '{module.partition('.')[0]}'") as problem:
        FunctionReward(FunctionSpec(str(file), "reward_func"), 1, 10.0)
    named = re.findall(r"--reward_function (\w+)", str(problem.value).partition("; ")[2])
    assert named == ([] if module == "nowhere" else ["boxed_math", "numeric_match"])
    assert set(named) <= set(RULES)
