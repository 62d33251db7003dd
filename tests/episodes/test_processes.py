"""Processes of episodes: what they answer, and what a call that goes wrong costs."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from launch import ROOT, wait_until

from dschat_ppo.episodes.environments import Turn
from dschat_ppo.episodes.episode_processes import Episodes
from dschat_ppo.rewards.worker_pool import CallError

FILE = '''
import json, os, sys, time

class Counter:
    """An environment of TRL."""
    def reset(self, start=0, **row):
        self.count = start
        return f"The counter is at {start}."

    def get_reward(self):
        return self.count / 2

    def add(self, number: int) -> int:
        """Add to the counter.

        Args:
            number: what to add.
        """
        self.count += number
        return self.count

    def fail(self, how: str) -> str:
        """Fail.

        Args:
            how: the way.
        """
        if how == "raise":
            raise ValueError("no")
        if how == "hang":
            time.sleep(600)
        if how == "die":
            os._exit(3)
        if how == "flood":
            return "x" * 2**25
        if how == "tell":
            return json.dumps([name for name in ("torch", "transformers") if name in sys.modules])
        print("noise")
        os.write(1, b"more noise")
        return "<|im_end|>"
'''
STARTS = """
import os, subprocess, time
class Starter:
    def reset(self, seed=None, options=None):
        program = subprocess.Popen(["sleep", "600"])
        return f"{program.pid} {os.getpid()} {os.getppid()}"
    def step(self, text):
        time.sleep(1.0)
        return "done", 0.0, True, False, {}
"""
TRAINER = """
import sys, time
sys.path[:0] = {}
from dschat_ppo.episodes.episode_processes import Episodes
episodes = Episodes({{"environment": "starts:Starter"}}, 30.0, 4)
def told():
    while not (found := episodes.poll(1.0)):
        pass
    print(found[0][1].messages[0]["content"], flush=True)
episodes.start(0, {{}}, 0)
told()
episodes.step(0, {{"role": "assistant", "content": "x"}})
told()
time.sleep(600)
"""


def call(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests: it imports transformers for the schemas of tools."""
    file = tmp_path_factory.mktemp("own") / "mine.py"
    file.write_text(FILE)
    found = Episodes({"environment": f"{file}:Counter"}, 4.0, 4)
    yield found
    found.close()


@pytest.fixture
def episodes(server):
    yield server
    server.end_all()


def answers(episodes, count):
    found = {}
    end = time.monotonic() + 30
    while len(found) < count and time.monotonic() < end:
        found |= dict(episodes.poll(1.0))
    return found


def test_each_episode_has_a_state_of_its_own(episodes):
    assert [tool["function"]["name"] for tool in episodes.tools] == ["add", "fail"]
    for number in range(10):
        episodes.start(number, {"start": number, "other": 1}, 0)
    first = answers(episodes, 10)
    assert first[7] == Turn([{"role": "user", "content": "The counter is at 7."}])
    for number in range(10):
        episodes.step(number, call("add", number=number))
    second = answers(episodes, 10)
    assert [second[n].messages[0]["content"] for n in range(10)] == [str(2 * n) for n in range(10)]
    episodes.step(3, {"role": "assistant", "content": "done"})
    assert answers(episodes, 1) == {3: Turn(done=True)}
    episodes.finish(3)
    assert answers(episodes, 1) == {3: Turn(reward=3.0)}
    episodes.end(3)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", Turn([{"role": "tool", "name": "fail", "content": "error: ValueError: no"}], failed_calls=1)),
        ("print", Turn([{"role": "tool", "name": "fail", "content": "<|im_end|>"}])),
        ("tell", Turn([{"role": "tool", "name": "fail", "content": "[]"}])),  # a fork copies no large library
        ("hang", "took longer than 4 s"),
        ("die", "its process ended"),
        ("flood", "longer than 16 MiB"),
    ],
)
def test_a_call_that_goes_wrong_costs_its_episode_at_most(episodes, how, expected):
    episodes.start(0, {}, 0)
    episodes.start(1, {"start": 5}, 0)
    answers(episodes, 2)
    group = episodes._groups[0]
    episodes.step(0, call("fail", how=how))
    episodes.step(1, call("add", number=1))
    found = answers(episodes, 2)
    assert found[1].messages[0]["content"] == "6"
    if isinstance(expected, Turn):
        assert found[0] == expected
    else:
        assert isinstance(found[0], CallError) and expected in str(found[0])
        with pytest.raises(ProcessLookupError):
            for _ in range(100):
                os.killpg(group, 0)
                time.sleep(0.02)


def test_a_failure_names_the_line_of_the_file(episodes):
    episodes.start(0, {"start": "three"}, 0)
    answers(episodes, 1)
    episodes.finish(0)
    problem = str(answers(episodes, 1)[0])
    line = FILE.splitlines().index("        return self.count / 2") + 1
    assert problem.startswith("TypeError: unsupported operand") and problem.endswith(f"mine.py:{line})")


def test_a_file_that_cannot_be_used(tmp_path):
    (tmp_path / "mine.py").write_text("import nothing_like_this\n")
    with pytest.raises(CallError, match="ModuleNotFoundError: No module named 'nothing_like_this'"):
        Episodes({"environment": f"{tmp_path / 'mine.py'}:Counter"}, 2.0, 4)


def test_the_end_of_the_server_is_no_failure_of_its_episodes(tmp_path):
    """It ends the run, which resumes: the episodes die with the server, and must not count as answered."""
    (tmp_path / "mine.py").write_text(FILE)
    server = Episodes({"environment": f"{tmp_path / 'mine.py'}:Counter"}, 30.0, 4)
    server.start(0, {}, 0)
    answers(server, 1)
    server.step(0, call("fail", how="hang"))
    os.kill(server._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the environments of rank 0 ended .exit code -9"):
        server.poll(20.0)
    with pytest.raises(RuntimeError, match="run the same command again"):
        for number in range(1, 50):
            server.start(number, {}, 0)
            server.poll(0.1)
    server.close()


def runs(process):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def test_what_an_episode_has_started_ends_with_the_trainer_and_outlives_a_stop(tmp_path):
    """A trainer that is killed leaves nothing; SIGTERM to all processes, as of Slurm, leaves the call alone."""
    (tmp_path / "starts.py").write_text(STARTS)
    place = json.dumps([str(tmp_path), str(ROOT)])
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER.format(place)], stdout=subprocess.PIPE, text=True)
    program, episode, server = map(int, trainer.stdout.readline().split())
    for process in (episode, server):
        os.kill(process, signal.SIGTERM)
    assert trainer.stdout.readline() == "done\n"
    assert runs(program) and runs(episode)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not any(map(runs, (program, episode, server))), 20)
