"""Worker processes of reward functions: what they load, time limits, crashes, signals and their
end."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from test_function_reward import FILE, HERE, REQUEST, ask, of_responses

from dschat_ppo.rewards import worker_pool
from dschat_ppo.rewards.function_reward import FunctionReward, FunctionSpec, parse_function
from dschat_ppo.rewards.reward_source import RewardRequest
from dschat_ppo.rewards.worker_pool import CallError, WorkerPool

FORK = multiprocessing.get_context("fork")


def ask_for_ever(files: list[str]) -> None:
    reward = FunctionReward(FunctionSpec(FILE, "never_releases_the_lock"), 2, 60.0)
    reward(RewardRequest.of(["", ""], files, [{}, {}]), None)


def test_a_module_that_raises_exits_or_hangs_on_import(tmp_path, monkeypatch):
    for text, cause in (
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os._exit(0)", "ended"),
        ("import time; time.sleep(60)", "not imported within 0.5 s"),
    ):
        if "sleep" in text:
            monkeypatch.setattr(worker_pool, "START_SECONDS", 0.5)
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(CallError, match=cause):
            WorkerPool((str(tmp_path / "bad.py"), "f", "{}"), 1, 1.0)


def test_an_exception_that_quotes_a_credential_does_not_show_it(tmp_path, capsys):
    """Nor the start of one where its text is cut."""
    (tmp_path / "judge.py").write_text(
        "def score(response, api_key='', n=1):\n"
        "    raise ValueError(f'{response}key {api_key}, n {n}')\n"
    )
    spec = parse_function(f"{tmp_path}/judge.py:score?api_key=s3cret&n=12345")
    function = FunctionReward(spec, 1, 10.0)
    function(RewardRequest.of(["", ""], ["", "x" * 490 + " "], [{}, {}]), None)
    function.close()
    shown = capsys.readouterr().out
    assert "key ***, n 12345" in shown and "xxx" in shown
    assert "s3" not in shown


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds: float):
    """What `condition` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
    return found


def numbers_in(path: Path) -> list[int]:
    text = wait_for(
        lambda: path.exists() and len(path.read_text().split()) == 2 and path.read_text(), 60
    )
    return [int(word) for word in text.split()]


def wait_until_gone(pids: list[int]) -> None:
    try:
        wait_for(lambda: not any(map(alive, pids)), 5)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_a_call_that_is_killed_leaves_no_process(tmp_path):
    ask("leaves_a_process", of_responses(str(tmp_path / "numbers")), workers=1, timeout=1.0)
    wait_until_gone(numbers_in(tmp_path / "numbers"))


@pytest.mark.parametrize(
    ("name", "responses", "scores"),
    [
        (
            "ends_its_processes",
            [""],
            [30],
        ),  # survives the launcher's SIGTERM; two that it started are ended by signal 15
        ("lengths", ["a" * 3_000_000, "b"], [3_000_000, 1]),  # large rows go through the pipe
        (
            "forks",
            ["", "a"],
            [0, 1],
        ),  # the fork does not reply: each later response would get the score of the one before
        ("noisy", ["a", "b"], [1, 1]),  # prints do not change the scores
    ],
)
def test_what_a_function_does_in_its_process_changes_no_other_score(name, responses, scores, capfd):
    assert ask(name, of_responses(*responses), workers=1) == (scores, 0)
    assert capfd.readouterr().err.splitlines().count("a child prints too") == 2 * (name == "noisy")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_trainer(tmp_path, how):
    files = [tmp_path / "one", tmp_path / "two"]
    trainer = FORK.Process(target=ask_for_ever, args=([*map(str, files)],))
    trainer.start()
    pids = [numbers_in(file)[0] for file in files]
    assert all(map(alive, pids))
    os.kill(trainer.pid, how)
    trainer.join()
    wait_until_gone(pids)


KEPT = """
import os, signal
calls = []
def keeps(response):
    calls.append(response)
    if response == "end" and len(calls) > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(calls)
"""


def test_a_call_whose_process_ends_is_repeated_once_in_a_new_one(tmp_path):
    (tmp_path / "mine.py").write_text(KEPT)
    pool = WorkerPool((str(tmp_path / "mine.py"), "keeps", "{}"), 1, 20.0)
    try:
        replies = [pool.map([{"response": text}])[0][0][0] for text in ("a", "a", "end", "a")]
        assert replies == [1, 2, 1, 2]
    finally:
        pool.close()


def test_a_worker_killed_between_calls_costs_no_row():
    """As the kernel does when memory runs out: its process is not the one to blame."""
    reward = FunctionReward(FunctionSpec(FILE, "who"), 1, 20.0)
    try:
        before = reward.pool.workers[0].process.pid
        assert reward(of_responses(""), None).tolist() == [before]
        os.kill(before, signal.SIGKILL)
        assert (
            reward(of_responses(""), None).tolist()
            == [reward.pool.workers[0].process.pid]
            != [before]
        )
        assert reward.counts.failed == 0
    finally:
        reward.close()


def test_heartbeats_are_sent_while_a_call_runs(monkeypatch):
    beats = []
    monkeypatch.setattr(worker_pool, "_HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(worker_pool, "heartbeat", lambda: beats.append(1))
    assert ask("waits", of_responses("late"), workers=1) == ([1.0], 0)
    assert len(beats) > 2


def test_close_after_an_interrupt_waits_only_for_calls_in_progress():
    rows = of_responses(*["late"] * 40)
    started = FunctionReward(FunctionSpec(FILE, "waits"), 2, 10.0)
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        started(rows, None)
    begun = time.monotonic()
    started.close()
    assert time.monotonic() - begun < 3


def test_settings_are_converted_to_the_types_of_the_defaults():
    settings = (("factor", "2.5"), ("sign", "False"), ("word", "an"), ("count", "3"))
    assert ask("scaled", of_responses("banana", "an", "x"), settings=settings)[0] == [-15, -7.5, 0]


def test_where_a_function_may_be(tmp_path, monkeypatch):
    """In a module of the search path or of the current folder, or in a file that imports its
    neighbours and defines dataclasses."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only_here.py").write_text("def half(response):\n    return len(response) / 2\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/neighbour.py").write_text("SCORE = 2.5\n")
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour"
        " import SCORE\n"
    )
    text += (
        "@dataclass\nclass Row:\n    score: float = SCORE\ndef f(response):\n    return"
        " Row().score\n"
    )
    (tmp_path / "mine/with_neighbour.py").write_text(text)
    for name, scores in (
        ("reward_functions:lengths:0.5", [3, 2, 0, 6, 1]),
        ("only_here:half", [1.5, 1, 0, 3, 0.5]),
        ("mine/with_neighbour.py:f", [2.5] * 5),
    ):
        reward = FunctionReward(parse_function(name), 1, 10.0)
        assert reward(REQUEST, None).tolist() == scores
        reward.close()


def test_a_cause_names_the_innermost_line_of_the_functions_file(tmp_path, monkeypatch):
    """No line of the library that raises or of the worker process; a shipped rule has none."""
    (tmp_path / "mine.py").write_text(
        "import asyncio, json\n\n\ndef inner(response):\n    return json.loads(response)\n\n\nasync"
        " def waits(response):\n    await asyncio.sleep(0)\n    return inner(response)\n\n\nclass"
        " Judge:\n    def __call__(self, response):\n        raise KeyError(response)\n\n\njudge ="
        " Judge()\n"
    )
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    mine, missing = (
        f"{tmp_path}/mine.py",
        "ValueError: the row has no column 'answer' (no row has a column 'answer')",
    )
    for name, ending in (
        ("../mine.py:waits", f" ({mine}:5)"),
        (f"{mine}:judge", f" ({mine}:15)"),
        ("numeric_match", missing),
    ):
        reward = FunctionReward(parse_function(name), 1, 10.0)
        reward(of_responses("{"), None)
        assert reward.counts.cause.endswith(ending), name
        reward.close()
