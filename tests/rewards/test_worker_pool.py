"""Worker processes of reward functions: time limits, crashes, signals and their end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from test_function_reward import FILE, HERE, ask, of_responses

from dschat_ppo.rewards import worker_pool
from dschat_ppo.rewards.function_reward import FunctionReward, FunctionSpec
from dschat_ppo.rewards.reward_source import CallCounts, RewardRequest
from dschat_ppo.rewards.worker_pool import CallError, Target, WorkerPool

PARENT = """
import sys
from dschat_ppo.rewards.function_reward import FunctionReward, FunctionSpec
from dschat_ppo.rewards.reward_source import RewardRequest
reward = FunctionReward(FunctionSpec(sys.argv[1], "leaves_a_process"), 2, 60.0, 0.0)
reward(RewardRequest(["", ""], sys.argv[2:], [{}, {}]), None)
"""


def test_a_module_that_raises_exits_or_hangs_on_import(tmp_path, monkeypatch):
    for text, cause in (("1 / 0", "ZeroDivisionError"), ("import os; os._exit(0)", "ended"),
                        ("import time; time.sleep(60)", "not imported within 0.5 s")):  # fmt: skip
        if "sleep" in text:
            monkeypatch.setattr(worker_pool, "START_SECONDS", 0.5)
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(CallError, match=cause):
            WorkerPool(Target(str(tmp_path / "bad.py"), "f"), 1, 1.0)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
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


def test_a_function_survives_the_signals_of_the_launcher(tmp_path):
    """The launcher sends SIGTERM to all its descendants while the trainer still needs the rewards of its last step."""
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


KILLED = """
import os, pathlib, signal
def killed(response):
    mark = pathlib.Path(__file__).with_name(response)
    if response == "during" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    mark.write_text(str(os.getpid()))
    return len(response)
"""


def test_a_worker_killed_before_or_during_a_call_costs_no_row(tmp_path):
    """As the kernel does when memory runs out: its process is not the one to blame."""
    (tmp_path / "mine.py").write_text(KILLED)
    reward = FunctionReward(FunctionSpec(str(tmp_path / "mine.py"), "killed"), 1, 20.0, -1.0)
    try:
        assert reward(of_responses("during"), None).tolist() == [6]
        os.kill(int((tmp_path / "during").read_text()), signal.SIGKILL)
        assert reward(of_responses("before"), None).tolist() == [6]
        assert reward.take_counts().failed == 0
    finally:
        reward.close()


SLOW = """
from threading import Thread
from dschat_ppo.rewards.sandbox import Limits, run_tests
from dschat_ppo.rewards.worker_pool import Target, WorkerPool
pool = WorkerPool(Target({file!r}, "slow"), 1, 4.0)
call = Thread(target=lambda: print(pool.map([dict(response="")])))
program = Thread(target=lambda: print(run_tests("import time; time.sleep(2)", ["1"], Limits(wall_seconds=4.0))))
print("ready", flush=True)
for thread in (call, program): thread.start()
for thread in (call, program): thread.join()
pool.close()
"""


def test_a_limit_waits_while_all_processes_are_stopped(tmp_path):
    """For longer than the limits of a call and of a program."""
    (tmp_path / "slow.py").write_text("import time\ndef slow(response):\n    time.sleep(2)\n    return 7.0\n")
    script = SLOW.format(file=str(tmp_path / "slow.py"))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    time.sleep(1.0)
    every = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]
    assert len(every) >= 5  # both halves of the worker and of the sandbox
    for process in every:
        process.suspend()
    time.sleep(6.0)
    for process in every:
        process.resume()
    printed, _ = parent.communicate(timeout=30)
    assert "[[[7.0, {}]]]" in printed and "[True]" in printed, printed


def test_large_rows_go_through_the_pipe():
    assert ask("lengths", of_responses("a" * 3_000_000, "b"))[0] == [3_000_000, 1]


def test_heartbeats_are_sent_while_a_call_runs(monkeypatch):
    beats = []
    monkeypatch.setattr(worker_pool, "_HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(worker_pool, "heartbeat", lambda: beats.append(1))
    assert ask("waits", of_responses("late"), workers=1) == ([1.0], 0)
    assert len(beats) > 2


def test_rows_that_cannot_be_sent(capsys):
    request = RewardRequest(["", ""], ["a", "b"], [{"answer": lambda: 0}, {"answer": 1}])
    assert ask("per_row", request)[0] == [-9, 0]
    assert "cannot be sent" in capsys.readouterr().out


def test_a_worker_that_hung_is_replaced():
    reward = FunctionReward(FunctionSpec(FILE, "faulty_row"), 1, 1.0, -9.0)
    assert reward(of_responses("hang", "ab"), None).tolist() == [-9, 2]
    old = reward.pool.workers[0].process.pid
    assert reward(of_responses("abc", "exit"), None).tolist() == [3, -9]
    assert reward(of_responses("abcd"), None).tolist() == [4]
    assert reward.pool.workers[0].process.pid != old
    assert reward.take_counts() == CallCounts(5, 2, "took longer than 1 s (--reward_timeout) and was killed")
    assert reward.take_counts() == CallCounts()
    reward.close()


def test_hung_rows_time_out_in_parallel():
    reward = FunctionReward(FunctionSpec(FILE, "faulty_row"), 4, 1.0, 0.0)
    started = time.monotonic()
    assert reward(of_responses(*["hang"] * 4), None).tolist() == [0, 0, 0, 0]
    assert 1.0 <= time.monotonic() - started < 4.0, "four times the limit: one after another"
    reward.close()


def test_close_after_an_interrupt_waits_only_for_calls_in_progress():
    rows = of_responses(*["late"] * 20)
    started = FunctionReward(FunctionSpec(FILE, "waits"), 2, 10.0, 0.0)
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        started(rows, None)
    begun = time.monotonic()
    started.close()
    assert time.monotonic() - begun < 1.5
