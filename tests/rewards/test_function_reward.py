"""Reward functions: their names, their arguments, and the score of failed calls."""

from pathlib import Path

import pytest
import torch

from dschat_ppo.errors import UserError
from dschat_ppo.rewards import function_reward
from dschat_ppo.rewards.function_reward import FunctionReward, FunctionSpec, parse_function
from dschat_ppo.rewards.returned_values import Returned
from dschat_ppo.rewards.reward_source import RewardRequest
from dschat_ppo.rewards.worker_pool import CallError, Target, Worker

HERE = Path(__file__).parents[1]
FILE = str(HERE / "reward_functions.py")
PROMPTS = ["a", "", "three", "of four words", "five"]
RESPONSES = ["yes", "no", "", "banana", "x"]
ROWS = [{"answer": 3, "extra": "e"}, {"answer": None}, {}, {"extra": None, "answer": -1}, {"extra": 0, "answer": 0}]
REQUEST = RewardRequest(PROMPTS, RESPONSES, ROWS)


def ask(name, request=REQUEST, workers=2, timeout=10.0, default=-9.0, settings=()):
    """(scores, number of failed calls) of a function of `reward_functions.py`."""
    reward = FunctionReward(FunctionSpec(FILE, name, 1.0, settings), workers, timeout, default)
    try:
        scores = reward(request, None)
        assert scores.dtype == torch.float32
        return scores.tolist(), reward.take_counts().failed
    finally:
        reward.close()


def of_responses(*responses) -> RewardRequest:
    return RewardRequest([""] * len(responses), list(responses), [{} for _ in responses])


def test_a_batch_function_gets_all_texts():
    assert ask("lengths") == ([3, 2, 0, 6, 1], 0)


def test_columns_come_as_lists_with_none_where_a_row_lacks_one():
    # len(prompt) + 10 len(response) + 100 answer + 1000 without extra, by hand
    assert ask("columns") == ([1 + 30 + 300, 0 + 20 + 1000, 5 + 1000, 13 + 60 - 100 + 1000, 4 + 10], 0)


def test_a_function_gets_only_what_it_names_and_none_for_what_no_row_has():
    assert ask("named_column") == ([10, -1, -1, 6, 7], 0)


def test_a_column_that_no_row_has_is_reported_once(capsys):
    reward = FunctionReward(FunctionSpec(FILE, "named_column"), 1, 10.0, 0.0)
    try:
        for _ in range(2):
            reward(REQUEST, None)
    finally:
        reward.close()
    warning = "warning: rank 0: reward function named_column: no row has a column 'missing': its argument is None\n"
    assert capsys.readouterr().out == warning
    assert ask("per_row", settings=())[1] == 0  # its column `answer` is in some rows
    assert capsys.readouterr().out == ""


def test_a_per_row_function():
    assert ask("per_row") == ([1 - 3 + 3, -2, 5, 13 - 6 - 1, 4 - 1], 0)
    assert ask("per_row_bool") == ([1, 0, 0, 0, 0], 0)


@pytest.mark.parametrize("name", ["slow_batch", "slow_row"])
def test_async_functions(name):
    assert ask(name) == ([1, 0, 5, 13, 4], 0)


def test_a_callable_object():
    assert ask("counter") == ([0, 0, 0, 3, 0], 0)


def test_a_setting_takes_precedence_over_a_column():
    request = RewardRequest([""], ["xx"], [{"factor": 7.0, "count": 5}])
    assert ask("scaled", request, settings=(("factor", "3"),))[0] == [3 * 5 * 2]


def test_a_worker_that_failed_to_start_is_started_again_by_the_next_call(tmp_path):
    file = tmp_path / "mended.py"
    file.write_text("1 / 0")
    worker = Worker(Target(str(file), "f"))
    with pytest.raises(CallError, match="ZeroDivisionError"):
        worker.call({}, 5.0)
    file.write_text("def f():\n    return [4]\n")
    assert worker.call({}, 5.0) == [Returned(4.0, {})]
    worker.stop()


def test_rows_are_distributed_over_the_workers():
    reward = FunctionReward(FunctionSpec(FILE, "who"), 2, 10.0, 0.0)
    processes = {pid for _ in range(20) for pid in reward(REQUEST, None).tolist()}
    reward.close()
    assert len(processes) == 2


def test_no_rows():
    assert ask("lengths", of_responses()) == ([], 0)


CAUSES = {
    "raise": "ZeroDivisionError: division by zero", "unprintable": "UnprintableError: its text cannot be printed",
    "nameless": "an exception: its text cannot be printed", "unpicklable": "UnpicklableError: a lock",
    "bare": "KeyError (", "long": "RuntimeError: xxx", "lines": "OSError: one two (",
    "subclass": "OfTextsError: harmless", "hang": "longer than 1 s", "exit": "process ended", "quit": "SystemExit: 3",
    "crash": "process ended", "surrogate": r"ValueError: \ud800", "nan": "nan", "inf": "-inf", "huge": "1e+39",
    "text": "not a number", "complex": "not a number",
}  # fmt: skip


@pytest.mark.parametrize("form", ["faulty_row", "faulty_batch"])
@pytest.mark.parametrize("fault", CAUSES)
def test_a_failed_call_affects_only_its_row(form, fault, capsys):
    scores, faults = ask(form, of_responses("four", fault, "", "a"), timeout=1.0)
    assert scores == [4, -9, 0, 1]
    assert faults == 1
    printed = capsys.readouterr().out
    assert f"reward function {form}: row 1: " in printed
    assert CAUSES[fault] in printed.split("row 1: ")[1]
    assert len(printed) < 2000
    assert all(line.startswith("warning: rank 0: reward function") for line in printed.splitlines())


@pytest.mark.parametrize("form", ["faulty_row", "faulty_batch"])
def test_two_failed_rows_of_eight(form):
    rows = of_responses("a", "hang", "abc", "", "exit", "ab", "abcd", "z")
    assert ask(form, rows, timeout=1.0) == ([1, -9, 3, 0, -9, 2, 4, 1], 2)


def test_a_list_of_another_length():
    assert ask("wrong_length", of_responses("abc", "two", "a")) == ([3, -9, 1], 1)


def test_a_single_failed_row_is_not_repeated(capsys):
    assert ask("wrong_length", of_responses("two")) == ([-9], 1)
    assert "row by row" not in capsys.readouterr().out


@pytest.mark.parametrize("response", ["dictionary", "number"])
def test_a_batch_function_must_return_a_list(response):
    assert ask("no_list", of_responses(response, "a"), default=0.5) == ([0.5, 0.5], 2)


def test_few_warnings_then_a_count(capsys):
    assert ask("faulty_row", of_responses(*["raise"] * 6, "ok"))[1] == 6
    printed = capsys.readouterr().out
    assert [f"row {row}:" in printed for row in range(7)] == [True] * 3 + [False] * 4
    assert "3 more of 7 rows" in printed


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("exact_match", (function_reward.RULES["exact_match"], "exact_match", 1.0, ())),
        ("exact_match:0.5", (function_reward.RULES["exact_match"], "exact_match", 0.5, ())),
        (f"{FILE}:lengths", (FILE, "lengths", 1.0, ())),
        (f"{FILE}:lengths:-2e-1", (FILE, "lengths", -0.2, ())),
        ("some.module:name:3", ("some.module", "name", 3.0, ())),
        (f"{FILE}:scaled?factor=2&word=a%26b:0.25", (FILE, "scaled", 0.25, (("factor", "2"), ("word", "a&b")))),
        (
            r"format_match?pattern=(?:\d+|a)%3A2:0.5",
            (function_reward.RULES["format_match"], "format_match", 0.5, (("pattern", r"(?:\d+|a):2"),)),
        ),
        ("length?unit=words", (function_reward.RULES["length"], "length", 1.0, (("unit", "words"),))),
    ],
)  # fmt: skip
def test_valid_specs(spec, expected):
    found = parse_function(spec)
    assert (found.path, found.name, found.weight, found.settings) == expected


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("no_such_rule", "no rule 'no_such_rule'"),
        ("no/such/file.py:name", "no file no/such/file.py"),
        (f"{FILE}:", "expected path.py:name"),
        (f"{FILE}:a:b:c", "expected path.py:name"),
        (f"{FILE}:two words", "expected path.py:name"),
        (f"{FILE}:lengths:nan", "must be finite"),
        ("exact_match:inf", "must be finite"),
        ("not a module:name", "neither a file"),
        ("exact_match?ignore_case", "key=value"),
        ("format_match?pattern=a&pattern=b", "given twice"),
        ("format_match?pattern=(", "setting pattern"),
    ],
)
def test_invalid_specs_are_rejected(spec, problem):
    with pytest.raises(UserError, match=r"^--reward_function ") as refused:
        parse_function(spec)
    assert problem in str(refused.value)
    assert spec in str(refused.value)


@pytest.mark.parametrize(
    "spec", ["no_such_rule", "no/such/file.py:name", "exact_match:nan", "exact_match?a", f"{FILE}:absent"]
)
def test_messages_name_the_flag_that_named_the_function(spec):
    with pytest.raises(UserError, match=rf"^--eval_reward_function {spec.partition('?')[0]}"):
        FunctionReward(parse_function(spec, "--eval_reward_function"), 1, 10.0, 0.0)


def test_a_rule_whose_extra_is_missing(monkeypatch):
    monkeypatch.setattr(function_reward.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"boxed_math: needs math_verify.*dschat_ppo\[math\]"):
        parse_function("boxed_math")
    assert parse_function("exact_match").rule == "exact_match"
