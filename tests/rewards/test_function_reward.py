"""Reward functions: how they are named, what they are given, and what their faults cost."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from dschat_ppo.errors import UserError
from dschat_ppo.rewards import function_reward, worker_pool
from dschat_ppo.rewards.function_reward import FunctionReward, FunctionSpec, parse_function
from dschat_ppo.rewards.reward_source import CallCounts, RewardRequest
from dschat_ppo.rewards.worker_pool import CallError, Target, Worker, WorkerPool

HERE = Path(__file__).parents[1]
FILE = str(HERE / "reward_functions.py")
PROMPTS = ["a", "", "three", "of four words", "five"]
RESPONSES = ["yes", "no", "", "banana", "x"]
ROWS = [{"answer": 3, "extra": "e"}, {"answer": None}, {}, {"extra": None, "answer": -1}, {"extra": 0, "answer": 0}]
REQUEST = RewardRequest(PROMPTS, RESPONSES, ROWS)


def ask(name, request=REQUEST, workers=2, timeout=10.0, default=-9.0, settings=()):
    """(scores, faults) of a function of `reward_functions.py`."""
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


def test_a_column_that_no_row_has_is_said_once(capsys):
    reward = FunctionReward(FunctionSpec(FILE, "named_column"), 1, 10.0, 0.0)
    try:
        for _ in range(2):
            reward(REQUEST, None)
    finally:
        reward.close()
    said = "warning: rank 0: reward function named_column: no row has a column 'missing': its argument is None\n"
    assert capsys.readouterr().out == said
    assert ask("per_row", settings=())[1] == 0  # its column `answer` is in some rows
    assert capsys.readouterr().out == ""


def test_a_function_of_one_row():
    assert ask("per_row") == ([1 - 3 + 3, -2, 5, 13 - 6 - 1, 4 - 1], 0)
    assert ask("per_row_bool") == ([1, 0, 0, 0, 0], 0)


@pytest.mark.parametrize("name", ["slow_batch", "slow_row"])
def test_async_functions(name):
    assert ask(name) == ([1, 0, 5, 13, 4], 0)


def test_a_callable_object():
    assert ask("counter") == ([0, 0, 0, 3, 0], 0)


def test_a_module_of_the_search_path(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    reward = FunctionReward(parse_function("reward_functions:lengths:0.5"), 1, 10.0, 0.0)
    assert reward(REQUEST, None).tolist() == [3, 2, 0, 6, 1]
    assert (reward.name, reward.spec.weight) == ("lengths", 0.5)
    reward.close()


def test_settings_have_the_types_of_the_defaults():
    settings = (("factor", "2.5"), ("sign", "False"), ("word", "an"), ("count", "3"))
    assert ask("scaled", of_responses("banana", "an", "x"), settings=settings)[0] == [-15, -7.5, 0]


def test_a_module_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def half(response):\n    return len(response) / 2\n")
    monkeypatch.chdir(tmp_path)
    reward = FunctionReward(parse_function("only_here:half"), 1, 10.0, 0.0)
    assert reward(REQUEST, None).tolist() == [1.5, 1, 0, 3, 0.5]
    reward.close()


def test_a_file_may_import_its_neighbours_and_hold_dataclasses(tmp_path):
    (tmp_path / "neighbour.py").write_text("SCORE = 2.5\n")
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour import SCORE\n"
    text += "@dataclass\nclass Row:\n    score: float = SCORE\ndef f(response):\n    return Row().score\n"
    (tmp_path / "with_neighbour.py").write_text(text)
    reward = FunctionReward(parse_function(f"{tmp_path}/with_neighbour.py:f"), 1, 10.0, 0.0)
    assert reward(REQUEST, None).tolist() == [2.5] * 5
    reward.close()


def test_a_setting_goes_before_a_column():
    request = RewardRequest([""], ["xx"], [{"factor": 7.0, "count": 5}])
    assert ask("scaled", request, settings=(("factor", "3"),))[0] == [3 * 5 * 2]


def test_a_worker_that_could_not_be_started_is_started_by_the_next_call(tmp_path):
    file = tmp_path / "mended.py"
    file.write_text("1 / 0")
    worker = Worker(Target(str(file), "f"))
    with pytest.raises(CallError, match="ZeroDivisionError"):
        worker.call({}, 5.0)
    file.write_text("def f():\n    return [4]\n")
    assert worker.call({}, 5.0) == [4]
    worker.stop()


def test_a_module_is_imported_once_for_each_worker():
    reward = FunctionReward(FunctionSpec(FILE, "when_imported"), 1, 10.0, 0.0)
    first, second = reward(REQUEST, None), reward(REQUEST, None)
    reward.close()
    assert len(set(first.tolist() + second.tolist())) == 1


def test_rows_are_shared_by_the_workers():
    reward = FunctionReward(FunctionSpec(FILE, "who"), 2, 10.0, 0.0)
    processes = {pid for _ in range(20) for pid in reward(REQUEST, None).tolist()}
    reward.close()
    assert len(processes) == 2


def test_no_rows():
    assert ask("lengths", of_responses()) == ([], 0)


def test_prints_leave_the_scores_alone(capfd):
    assert ask("noisy", of_responses("a", "b")) == ([1, 1], 0)
    assert capfd.readouterr().err.count("a child prints too") == 2


CAUSES = {
    "raise": "ZeroDivisionError: division by zero", "unprintable": "UnprintableError: its text cannot be printed",
    "nameless": "an exception: its text cannot be printed", "unpicklable": "UnpicklableError: a lock",
    "bare": "KeyError (", "long": "RuntimeError: xxx", "lines": "OSError: one two (",
    "subclass": "OfTextsError: harmless", "hang": "longer than 1 s", "exit": "process ended", "quit": "SystemExit: 3",
    "crash": "process ended", "surrogate": r"ValueError: \ud800", "nan": "nan", "inf": "-inf", "huge": "1e+39",
    "text": "not a number", "none": "not a number", "complex": "not a number",
}  # fmt: skip


@pytest.mark.parametrize("form", ["faulty_row", "faulty_batch"])
@pytest.mark.parametrize("fault", CAUSES)
def test_a_fault_costs_its_row_and_no_other(form, fault, capsys):
    scores, faults = ask(form, of_responses("four", fault, "", "a"), timeout=1.0)
    assert scores == [4, -9, 0, 1]
    assert faults == 1
    printed = capsys.readouterr().out
    assert f"reward function {form}: row 1: " in printed
    assert CAUSES[fault] in printed.split("row 1: ")[1]
    assert len(printed) < 2000
    assert all(line.startswith("warning: rank 0: reward function") for line in printed.splitlines())


@pytest.mark.parametrize("fault", ["unprintable", "nameless", "unpicklable", "long", "surrogate", "subclass"])
def test_an_exception_however_odd_leaves_its_worker_alive(fault):
    reward = FunctionReward(FunctionSpec(FILE, "faulty_row"), 1, 10.0, -9.0)
    before = reward.pool.workers[0].process.pid
    assert reward(of_responses(fault, "ab", fault), None).tolist() == [-9, 2, -9]
    assert reward.pool.workers[0].process.pid == before
    reward.close()


def test_a_cause_names_the_deepest_line_of_the_functions_own_file(tmp_path):
    """Not one of the library that raises, nor of the worker; of a shipped rule there is none."""
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


@pytest.mark.parametrize("form", ["faulty_row", "faulty_batch"])
def test_two_bad_rows_of_eight(form):
    rows = of_responses("a", "hang", "abc", "", "exit", "ab", "abcd", "z")
    assert ask(form, rows, timeout=1.0) == ([1, -9, 3, 0, -9, 2, 4, 1], 2)


def test_a_worker_that_hung_is_replaced_for_the_next_step():
    reward = FunctionReward(FunctionSpec(FILE, "faulty_row"), 1, 1.0, -9.0)
    assert reward(of_responses("hang", "ab"), None).tolist() == [-9, 2]
    old = reward.pool.workers[0].process.pid
    assert reward(of_responses("abc", "exit"), None).tolist() == [3, -9]
    assert reward(of_responses("abcd"), None).tolist() == [4]
    assert reward.pool.workers[0].process.pid != old
    assert reward.take_counts() == CallCounts(5, 2, "took longer than 1 s (--reward_timeout) and was killed")
    assert reward.take_counts() == CallCounts()
    reward.close()


def test_hung_rows_wait_beside_each_other_and_the_bound_holds():
    reward = FunctionReward(FunctionSpec(FILE, "faulty_row"), 4, 1.0, 0.0)
    started = time.monotonic()
    assert reward(of_responses(*["hang"] * 4), None).tolist() == [0, 0, 0, 0]
    assert 1.0 <= time.monotonic() - started < 4.0, "four times the limit: one after another"
    reward.close()


def test_who_interrupts_waits_for_the_calls_at_work_alone():
    rows = of_responses(*["late"] * 20)
    started = FunctionReward(FunctionSpec(FILE, "waits"), 2, 10.0, 0.0)
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        started(rows, None)
    begun = time.monotonic()
    started.close()
    assert time.monotonic() - begun < 1.5


def test_a_call_within_its_limit_is_no_hang(monkeypatch):
    beats = []
    monkeypatch.setattr(worker_pool, "_HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(worker_pool, "heartbeat", lambda: beats.append(1))
    assert ask("waits", of_responses("late"), workers=1) == ([1.0], 0)
    assert len(beats) > 2


def test_a_list_of_another_length():
    assert ask("wrong_length", of_responses("abc", "two", "a")) == ([3, -9, 1], 1)


def test_one_row_that_fails_is_not_tried_again(capsys):
    assert ask("wrong_length", of_responses("two")) == ([-9], 1)
    assert "row by row" not in capsys.readouterr().out


@pytest.mark.parametrize("response", ["dictionary", "number"])
def test_what_is_no_list(response):
    assert ask("no_list", of_responses(response, "a"), default=0.5) == ([0.5, 0.5], 2)


def test_few_warnings_then_a_count(capsys):
    assert ask("faulty_row", of_responses(*["raise"] * 6, "ok"))[1] == 6
    printed = capsys.readouterr().out
    assert [f"row {row}:" in printed for row in range(7)] == [True] * 3 + [False] * 4
    assert "3 more of 7 rows" in printed


def test_rows_that_cannot_be_sent(capsys):
    request = RewardRequest(["", ""], ["a", "b"], [{"answer": lambda: 0}, {"answer": 1}])
    assert ask("per_row", request)[0] == [-9, 0]
    assert "cannot be sent" in capsys.readouterr().out


def test_large_rows_go_through_the_pipe():
    assert ask("lengths", of_responses("a" * 3_000_000, "b"))[0] == [3_000_000, 1]


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
def test_specs(spec, expected):
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
def test_specs_that_are_refused(spec, problem):
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


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("absent", (), "has no attribute 'absent'"),
        ("not_callable", (), "not a function"),
        ("by_position", (), "positional only"),
        ("lengths", (("colour", "red"),), "no setting 'colour'"),
        ("lengths", (("responses", "red"),), "no setting 'responses'"),
        ("scaled", (("factor", "much"),), "factor must be a number"),
        ("scaled", (("sign", "plus"),), "sign must be true or false"),
    ],
)
def test_functions_that_cannot_be_used(name, settings, problem):
    with pytest.raises(UserError, match=r"^--reward_function .*cannot be used") as refused:
        FunctionReward(FunctionSpec(FILE, name, 1.0, settings), 1, 10.0, 0.0)
    assert problem in str(refused.value)


def test_a_module_that_raises_ends_or_hangs_when_imported(tmp_path, monkeypatch):
    for text, cause in (("1 / 0", "ZeroDivisionError"), ("import os; os._exit(0)", "ended"),
                        ("import time; time.sleep(60)", "not imported within 0.5 s")):  # fmt: skip
        if "sleep" in text:
            monkeypatch.setattr(worker_pool, "START_SECONDS", 0.5)
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(CallError, match=cause):
            WorkerPool(Target(str(tmp_path / "bad.py"), "f"), 1, 1.0)


def alive(pid: int) -> bool:
    """Whether a process runs (one that ended and was not waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def numbers_in(path: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if path.exists() and len(path.read_text().split()) == 3:
            return [int(word) for word in path.read_text().split()]
        time.sleep(0.02)
    raise AssertionError("the function was not called")


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_call_that_is_killed_leaves_no_process(tmp_path):
    ask("leaves_a_process", of_responses(str(tmp_path / "numbers")), workers=1, timeout=2.0)
    wait_until_gone(numbers_in(tmp_path / "numbers"))


def test_signals_of_the_launcher_do_not_reach_a_function(tmp_path):
    """It sends SIGTERM to all below it while the trainer wants the rewards of its last step."""
    file = tmp_path / "numbers"

    def signal_both_halves():
        for pid in numbers_in(file)[:2]:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)

    thread = threading.Thread(target=signal_both_halves)
    thread.start()
    try:
        assert ask("ends_its_processes", of_responses(str(file)), workers=1) == ([30.0], 0)  # two ended by signal 15
    finally:
        thread.join()


PARENT = """
import sys
from dschat_ppo.rewards.function_reward import FunctionReward, FunctionSpec
from dschat_ppo.rewards.reward_source import RewardRequest
reward = FunctionReward(FunctionSpec(sys.argv[1], "leaves_a_process"), 2, 60.0, 0.0)
reward(RewardRequest(["", ""], sys.argv[2:], [{}, {}]), None)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_trainer(tmp_path, how):
    files = [tmp_path / "one", tmp_path / "two"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, FILE, *map(str, files)], env=environment)
    pids = [pid for file in files for pid in numbers_in(file)]
    assert all(map(alive, pids))
    parent.send_signal(how)
    parent.wait()
    wait_until_gone(pids)
