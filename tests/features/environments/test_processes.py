"""Processes of episodes: what they answer, what a call that goes wrong costs, and their answers on
the disk: a second start asks for none of them again."""

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

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.checkpoint.store import CheckpointFolder
from dschat_ppo.features.environments.checkpoint_folders import JOURNAL
from dschat_ppo.features.environments.environments import Turn
from dschat_ppo.features.environments.episode_processes import Episodes
from dschat_ppo.features.environments.journal import JournalledEpisodes, RolloutKey
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
from dschat_ppo.features.environments.episode_processes import Episodes
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
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
    }


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
        (
            "raise",
            Turn(
                [{"role": "tool", "name": "fail", "content": "error: ValueError: no"}],
                failed_calls=1,
            ),
        ),
        ("print", Turn([{"role": "tool", "name": "fail", "content": "<|im_end|>"}])),
        (
            "tell",
            Turn([{"role": "tool", "name": "fail", "content": "[]"}]),
        ),  # a fork copies no large library
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


def test_an_episode_that_has_ended_kills_no_group_but_what_it_has_started(tmp_path, monkeypatch):
    """Its number may be another process's by now. What it has started ends all the same, and an
    episode that hangs is killed."""
    (tmp_path / "mine.py").write_text(
        "import os, subprocess, time\n"
        "class Env:\n"
        "    def reset(self):\n"
        "        self.child = subprocess.Popen(['sleep', '600'])\n"
        "        return str(self.child.pid), {}\n"
        "    def step(self, text):\n"
        "        time.sleep(600) if text == 'hang' else os._exit(1)\n"
    )
    killed, kill = [], os.killpg
    episodes = Episodes({"environment": f"{tmp_path}/mine.py:Env"}, 5.0, 4)
    monkeypatch.setattr(os, "killpg", lambda *group: killed.append(group[0]) or kill(*group))
    for action, kills in (("die", 0), ("hang", 1)):
        episodes.start(0, {}, 7)
        child = int(answers_of(episodes, 1)[0].messages[0]["content"])
        episodes.seconds = 1.0
        episodes.step(0, {"role": "assistant", "content": action})
        assert isinstance(answers_of(episodes, 1)[0], CallError)
        wait_until(lambda child=child: not psutil.pid_exists(child), 10)
        assert len(killed) == kills
    monkeypatch.undo()
    episodes.close()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("'', 1e300, True, False, {}", "its reward is 1e+300, which is not a finite fp32 number"),
        ("'', float('nan'), True, False, {}", "its reward is nan"),
        ("'', 'much', True, False, {}", "its reward is str, not a number"),
        ("[{'role': 3, 'content': 'a'}], 0, False, False, {}", "not with one whose 'role'"),
        ("[{'role': 'user', 'content': 'a', 'name': 3}], 0, False, {}", "not with one whose"),
        ("3, 4", "step returned tuple, not observation, reward and whether it is done"),
        ("None", "step returned NoneType"),
    ],
)
def test_a_reply_of_another_type_fails_the_episode_in_one_line(tmp_path, returned, message):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Env:\n"
        "    def reset(self): return '', {}\n"
        f"    def step(self, text): return {returned}\n"
    )
    episodes = Episodes({"environment": f"{file}:Env"}, 20.0, 4)
    episodes.start(0, {}, 7)
    assert answers_of(episodes, 1)[0] == Turn()
    episodes.step(0, {"role": "assistant", "content": "x"})
    failure = answers_of(episodes, 1)[0]
    episodes.close()
    assert isinstance(failure, CallError) and message in str(failure)
    assert len(str(failure).splitlines()) == 1


def test_content_that_is_no_text_becomes_one_that_can_be_encoded(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Env:\n"
        "    def reset(self): return [{'role': 'user', 'content': None}, "
        "{'role': 'user', 'content': 7}, {'role': 'user', 'content': 'a\\ud800'}], {}\n"
        "    def step(self, text): return '', 0, True, False, {'huge': 1e300, 'small': 1}\n"
    )
    episodes = Episodes({"environment": f"{tmp_path}/mine.py:Env"}, 20.0, 4)
    episodes.start(0, {}, 7)
    messages = answers_of(episodes, 1)[0].messages
    assert [message["content"] for message in messages] == ["", "7", "a?"]
    episodes.step(0, {"role": "assistant", "content": "x"})
    assert answers_of(episodes, 1)[0].metrics == {"small": 1}
    episodes.close()


def test_a_failure_names_the_line_of_the_file(episodes):
    episodes.start(0, {"start": "three"}, 0)
    answers(episodes, 1)
    episodes.finish(0)
    problem = str(answers(episodes, 1)[0])
    line = FILE.splitlines().index("        return self.count / 2") + 1
    assert problem.startswith("TypeError: unsupported operand") and problem.endswith(
        f"mine.py:{line})"
    )


def test_a_file_that_cannot_be_used(tmp_path):
    (tmp_path / "mine.py").write_text("import nothing_like_this\n")
    with pytest.raises(CallError, match="ModuleNotFoundError: No module named 'nothing_like_this'"):
        Episodes({"environment": f"{tmp_path / 'mine.py'}:Counter"}, 2.0, 4)


def test_the_end_of_the_server_is_no_failure_of_its_episodes(tmp_path):
    """It ends the run, which resumes: the episodes die with the server, and must not count as
    answered."""
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
    """A trainer that is killed leaves nothing; SIGTERM to all processes, as of Slurm, leaves the
    call alone."""
    (tmp_path / "starts.py").write_text(STARTS)
    place = json.dumps([str(tmp_path), str(ROOT)])
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER.format(place)], stdout=subprocess.PIPE, text=True
    )
    program, episode, server = map(int, trainer.stdout.readline().split())
    for process in (episode, server):
        os.kill(process, signal.SIGTERM)
    assert trainer.stdout.readline() == "done\n"
    assert runs(program) and runs(episode)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not any(map(runs, (program, episode, server))), 20)


FAILURES = {"crash": "its process ended (a crash)", "late": "took longer than 4 s"}


class Processes:
    """Episodes that answer each request with its number of requests so far; `heard` has all
    requests."""

    def __init__(self):
        self.heard, self.counts, self.answers = [], {}, []

    def start(self, number, row, seed):
        self.counts[number] = 0
        self._answer(number, "reset")

    def step(self, number, action):
        self._answer(number, action)

    def finish(self, number):
        self._answer(number, "finish")

    def _answer(self, number, request):
        self.heard.append((number, request))
        self.counts[number] += 1
        turn = Turn(
            [{"role": "user", "content": str(self.counts[number])}],
            reward=0.1 * self.counts[number],
        )
        self.answers.append((number, CallError(FAILURES[request]) if request in FAILURES else turn))

    def poll(self, seconds):
        found, self.answers = self.answers, []
        return found

    def end(self, number):
        self.heard.append((number, "end"))

    def end_all(self):
        pass


def environment_journal(output):
    return Journal(output, JOURNAL, "environments")


def episodes_of(folder, step=3, has_state=True, first=0, rollout="sampled/3"):
    processes = Processes()
    found = JournalledEpisodes(processes, environment_journal(folder), has_state)
    found.begin(RolloutKey(step, rollout, first))
    return found, processes


def answers_of(episodes, count):
    found = []
    while len(found) < count:
        found += episodes.poll(0.0)
    return dict(found)


def live(episodes, *actions, number=0):
    """The contents and rewards of the answers_of to a reset and to `actions`; "finish" ends the
    episode."""
    episodes.start(number, {"prompt": "a"}, 7)
    found = [answers_of(episodes, 1)[number]]
    for action in actions:
        if action == "finish":
            episodes.finish(number)
        else:
            episodes.step(number, action)
        found.append(answers_of(episodes, 1)[number])
    if actions[-1] == "finish":
        episodes.end(number)
    return [
        str(turn)
        if isinstance(turn, CallError)
        else ("".join(message["content"] for message in turn.messages), turn.reward)
        for turn in found
    ]


def test_a_whole_episode_has_no_process_the_second_time(tmp_path):
    first, _ = episodes_of(tmp_path)
    expected = live(first, "x", "y", "finish")
    assert expected == [("1", 0.1), ("2", 0.2), (str(3), pytest.approx(0.3)), ("4", 0.4)]
    again, processes = episodes_of(tmp_path)
    assert live(again, "x", "y", "finish") == expected and processes.heard == []


@pytest.mark.parametrize(
    ("has_state", "heard"), [(True, ["reset", "x", "y", "z"]), (False, ["reset", "z"])]
)
def test_where_the_journal_ends_an_environment_hears_again_what_was_said(
    tmp_path, has_state, heard
):
    first, processes = episodes_of(tmp_path, has_state=has_state)
    live(first, "x", "y")
    assert [request for _, request in processes.heard] == ["reset", "x", "y"]
    again, processes = episodes_of(tmp_path, has_state=has_state)
    found = live(again, "x", "y", "z")
    assert [request for _, request in processes.heard] == heard
    begun = ("1", 0.1) if has_state else ("", 0.0)
    assert found == [
        begun,
        ("2", 0.2),
        ("3", pytest.approx(0.3)),
        (str(len(heard)), 0.1 * len(heard)),
    ]
    third, processes = episodes_of(tmp_path, has_state=has_state)
    assert live(third, "x", "y", "z") == found and processes.heard == []


def test_functions_have_a_process_from_the_first_message_on(tmp_path):
    episodes, processes = episodes_of(tmp_path, has_state=False)
    assert live(episodes, "finish") == [("", 0.0), ("", 0.0)] and processes.heard == []
    assert live(episodes, "x", "finish", number=1) == [("", 0.0), ("2", 0.2), ("", 0.0)]
    assert processes.heard == [(1, "reset"), (1, "x"), (1, "end")]


def test_another_action_row_rollout_number_or_step_is_another_question(tmp_path):
    first, _ = episodes_of(tmp_path)
    live(first, "x", "y")
    again, processes = episodes_of(tmp_path)
    live(again, "x", "other")
    assert [request for _, request in processes.heard] == ["reset", "x", "other"]
    again, processes = episodes_of(tmp_path, first=4)
    # another rank asked for the same episode: its number over all ranks counts
    live(again, "x", number=-4)
    assert processes.heard == []
    for changes in ({"first": 1}, {"rollout": "greedy/3"}, {"step": 4}):
        again, processes = episodes_of(tmp_path, **changes)
        live(again, "x")
        assert [request for _, request in processes.heard] == ["reset", "x"], changes


@pytest.mark.parametrize(("request_", "again_"), [("late", []), ("crash", ["reset", "crash"])])
def test_failures_are_answers_too_but_for_the_end_of_a_process(tmp_path, request_, again_):
    """Who kills a whole job may end an episode before its rank, which must not take that for the
    environment's."""
    first, _ = episodes_of(tmp_path)
    expected = live(first, request_)
    assert expected == [("1", 0.1), FAILURES[request_]]
    again, processes = episodes_of(tmp_path)
    assert live(again, request_) == expected
    assert [request for _, request in processes.heard] == again_


def test_another_file_of_the_environment_asks_other_questions(tmp_path):
    file = tmp_path / "game.py"
    for content, heard in (("one", 2), ("one", 0), ("two", 2)):
        file.write_text(content)
        processes = Processes()
        found = JournalledEpisodes(processes, environment_journal(tmp_path), True, [str(file)])
        found.begin(RolloutKey(3, "sampled/3", 0))
        live(found, "x")
        assert len(processes.heard) == heard


def test_answers_that_ended_the_run_are_forgotten(tmp_path):
    first, _ = episodes_of(tmp_path)
    live(first, "late")
    first.end_all()
    first.journal.forget()
    again, processes = episodes_of(tmp_path)
    live(again, "late")
    assert len(processes.heard) == 2


def test_files_a_cut_line_other_ranks_and_steps_that_never_run_again(tmp_path):
    folder = tmp_path / "checkpoints" / "environment"
    first, _ = episodes_of(tmp_path)
    live(first, "x")
    [mine] = folder.iterdir()
    whole = mine.read_bytes()
    mine.rename(folder / "step_000003_rank_1.jsonl")
    mine.write_bytes(b'{"cut": ')
    (folder / "step_000001_rank_0.jsonl").write_bytes(whole)
    (folder / "step_000002_rank_0.jsonl").write_bytes(whole)
    (tmp_path / "checkpoints" / "step_000002").mkdir()
    again, processes = episodes_of(tmp_path)
    live(again, "x", "y")
    assert [request for _, request in processes.heard] == ["reset", "x", "y"]
    assert [json.loads(line) for line in mine.read_text().splitlines()][0].keys(), (
        "the cut line is gone"
    )
    assert sorted(path.name[5:11] for path in folder.iterdir()) == ["000002", "000003", "000003"]


def test_the_answers_go_with_the_checkpoints(tmp_path):
    first, _ = episodes_of(tmp_path)
    live(first, "x")
    first.end_all()
    CheckpointFolder(tmp_path).remove_all()
    assert not (tmp_path / "checkpoints").exists()
