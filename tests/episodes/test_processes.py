"""Processes of episodes: what they answer, and what a call that goes wrong costs."""

import os
import time

import pytest

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
