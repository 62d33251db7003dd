"""Inside a worker process: loading a function, its settings, its output, and the causes of failed calls."""

import pytest
from test_function_reward import FILE, HERE, REQUEST, ask, of_responses

from dschat_ppo.errors import UserError
from dschat_ppo.rewards.function_reward import FunctionReward, FunctionSpec, parse_function
from dschat_ppo.rewards.reward_source import CallCounts


def test_settings_are_converted_to_the_types_of_the_defaults():
    settings = (("factor", "2.5"), ("sign", "False"), ("word", "an"), ("count", "3"))
    assert ask("scaled", of_responses("banana", "an", "x"), settings=settings)[0] == [-15, -7.5, 0]


def test_a_module_on_the_search_path(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    reward = FunctionReward(parse_function("reward_functions:lengths:0.5"), 1, 10.0, 0.0)
    assert reward(REQUEST, None).tolist() == [3, 2, 0, 6, 1]
    assert (reward.name, reward.spec.weight) == ("lengths", 0.5)
    reward.close()


def test_a_module_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def half(response):\n    return len(response) / 2\n")
    monkeypatch.chdir(tmp_path)
    reward = FunctionReward(parse_function("only_here:half"), 1, 10.0, 0.0)
    assert reward(REQUEST, None).tolist() == [1.5, 1, 0, 3, 0.5]
    reward.close()


def test_a_file_may_import_its_neighbours_and_define_dataclasses(tmp_path):
    (tmp_path / "neighbour.py").write_text("SCORE = 2.5\n")
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour import SCORE\n"
    text += "@dataclass\nclass Row:\n    score: float = SCORE\ndef f(response):\n    return Row().score\n"
    (tmp_path / "with_neighbour.py").write_text(text)
    reward = FunctionReward(parse_function(f"{tmp_path}/with_neighbour.py:f"), 1, 10.0, 0.0)
    assert reward(REQUEST, None).tolist() == [2.5] * 5
    reward.close()


def test_a_module_is_imported_once_for_each_worker():
    reward = FunctionReward(FunctionSpec(FILE, "when_imported"), 1, 10.0, 0.0)
    first, second = reward(REQUEST, None), reward(REQUEST, None)
    reward.close()
    assert len(set(first.tolist() + second.tolist())) == 1


def test_prints_do_not_change_the_scores(capfd):
    assert ask("noisy", of_responses("a", "b")) == ([1, 1], 0)
    assert capfd.readouterr().err.splitlines().count("a child prints too") == 2


@pytest.mark.parametrize("fault", ["unprintable", "nameless", "unpicklable", "long", "surrogate", "subclass"])
def test_unusual_exceptions_do_not_end_the_worker(fault):
    reward = FunctionReward(FunctionSpec(FILE, "faulty_row"), 1, 10.0, -9.0)
    before = reward.pool.workers[0].process.pid
    assert reward(of_responses(fault, "ab", fault), None).tolist() == [-9, 2, -9]
    assert reward.pool.workers[0].process.pid == before
    reward.close()


def test_a_cause_names_the_innermost_line_of_the_functions_file(tmp_path):
    """No line of the library that raises or of the worker process; a shipped rule has none."""
    (tmp_path / "neighbour.py").write_text("def wrapped(function):\n    return lambda response: function(response)\n")
    (tmp_path / "mine.py").write_text(
        "import asyncio, functools, json, neighbour\n\n\ndef inner(response):\n    return json.loads(response)\n\n\n"
        "def plain(response):\n    return inner(response)\n\n\n"
        "async def waits(response):\n    await asyncio.sleep(0)\n    return inner(response)\n\n\n"
        "class Judge:\n    def __call__(self, response):\n        raise KeyError(response)\n\n\njudge = Judge()\n\n\n"
        "outer = functools.wraps(plain)(neighbour.wrapped(plain))\n"
    )
    for name, line in (("plain", 5), ("waits", 5), ("judge", 19), ("outer", 5)):
        reward = FunctionReward(parse_function(f"{tmp_path}/mine.py:{name}"), 1, 10.0, 0.0)
        reward(of_responses("{"), None)
        assert reward.take_counts().cause.endswith(f" ({tmp_path}/mine.py:{line})"), name
        reward.close()
    (tmp_path / "bad.py").write_text("\n1 / 0\n")
    with pytest.raises(UserError, match=rf"cannot be used: ZeroDivisionError: .* \({tmp_path}/bad.py:2\)"):
        FunctionReward(parse_function(f"{tmp_path}/bad.py:f"), 1, 10.0, 0.0)
    rule = FunctionReward(parse_function("numeric_match"), 1, 10.0, 0.0)
    rule(of_responses("{"), None)
    expected = "ValueError: the row has no column 'answer' (no row has a column 'answer')"
    assert rule.take_counts() == CallCounts(1, 1, expected)
    rule.close()


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("absent", (), "cannot be used: reward_functions.py has no function 'absent'; it has: "),
        ("not_callable", (), "not a function"),
        ("by_position", (), "positional only"),
        ("lengths", (("colour", "red"),), "no setting 'colour'"),
        ("lengths", (("responses", "red"),), "no setting 'responses'"),
        ("scaled", (("factor", "much"),), "factor must be a number"),
        ("scaled", (("sign", "plus"),), "sign must be true or false"),
    ],
)
def test_functions_that_cannot_be_called_are_rejected(name, settings, problem):
    with pytest.raises(UserError, match=r"^--reward_function .*cannot be used") as refused:
        FunctionReward(FunctionSpec(FILE, name, 1.0, settings), 1, 10.0, 0.0)
    assert problem in str(refused.value)
