"""Answers of environments on the disk: a second start asks for none of them again."""

import json

import pytest

from dschat_ppo.episodes.environments import Turn
from dschat_ppo.episodes.journal import Journal, JournalledEpisodes
from dschat_ppo.rewards.worker_pool import CallError

FAILURES = {"crash": "its process ended (a crash)", "late": "took longer than 4 s"}


class Processes:
    """Episodes that answer each request with its number of requests so far; `heard` has all requests."""

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
        turn = Turn([{"role": "user", "content": str(self.counts[number])}], reward=0.1 * self.counts[number])
        self.answers.append((number, CallError(FAILURES[request]) if request in FAILURES else turn))

    def poll(self, seconds):
        found, self.answers = self.answers, []
        return found

    def end(self, number):
        self.heard.append((number, "end"))

    def end_all(self):
        pass


def episodes_of(folder, step=3, has_state=True, first=0, rollout="sampled/3"):
    processes = Processes()
    found = JournalledEpisodes(processes, Journal(folder), has_state)
    found.begin(step, rollout, first)
    return found, processes


def answers(episodes, count):
    found = []
    while len(found) < count:
        found += episodes.poll(0.0)
    return dict(found)


def live(episodes, *actions, number=0):
    """The contents and rewards of the answers to a reset and to `actions`; "finish" ends the episode."""
    episodes.start(number, {"prompt": "a"}, 7)
    found = [answers(episodes, 1)[number]]
    for action in actions:
        if action == "finish":
            episodes.finish(number)
        else:
            episodes.step(number, action)
        found.append(answers(episodes, 1)[number])
    if actions[-1] == "finish":
        episodes.end(number)
    return [str(turn) if isinstance(turn, CallError) else (turn.messages[0]["content"], turn.reward) for turn in found]


def test_a_whole_episode_has_no_process_the_second_time(tmp_path):
    first, _ = episodes_of(tmp_path)
    expected = live(first, "x", "y", "finish")
    assert expected == [("1", 0.1), ("2", 0.2), (str(3), pytest.approx(0.3)), ("4", 0.4)]
    again, processes = episodes_of(tmp_path)
    assert live(again, "x", "y", "finish") == expected and processes.heard == []


@pytest.mark.parametrize(("has_state", "heard"), [(True, ["reset", "x", "y", "z"]), (False, ["reset", "z"])])
def test_where_the_journal_ends_an_environment_hears_again_what_was_said(tmp_path, has_state, heard):
    first, _ = episodes_of(tmp_path, has_state=has_state)
    live(first, "x", "y")
    again, processes = episodes_of(tmp_path, has_state=has_state)
    found = live(again, "x", "y", "z")
    assert [request for _, request in processes.heard] == heard
    assert found == [("1", 0.1), ("2", 0.2), ("3", pytest.approx(0.3)), (str(len(heard)), 0.1 * len(heard))]
    third, processes = episodes_of(tmp_path, has_state=has_state)
    assert live(third, "x", "y", "z") == found and processes.heard == []


def test_another_action_row_rollout_number_or_step_is_another_question(tmp_path):
    first, _ = episodes_of(tmp_path)
    live(first, "x", "y")
    again, processes = episodes_of(tmp_path)
    live(again, "x", "other")
    assert [request for _, request in processes.heard] == ["reset", "x", "other"]
    again, processes = episodes_of(tmp_path, first=4)
    live(again, "x", number=-4)  # another rank asked for the same episode: its number over all ranks counts
    assert processes.heard == []
    for changes in ({"first": 1}, {"rollout": "greedy/3"}, {"step": 4}):
        again, processes = episodes_of(tmp_path, **changes)
        live(again, "x")
        assert [request for _, request in processes.heard] == ["reset", "x"], changes


@pytest.mark.parametrize(("request_", "again_"), [("late", []), ("crash", ["reset", "crash"])])
def test_failures_are_answers_too_but_for_the_end_of_a_process(tmp_path, request_, again_):
    """Who kills a whole job may end an episode before its rank, which must not take that for the environment's."""
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
        found = JournalledEpisodes(processes := Processes(), Journal(tmp_path), True, [str(file)])
        found.begin(3, "sampled/3", 0)
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
    assert [json.loads(line) for line in mine.read_text().splitlines()][0].keys(), "the cut line is gone"
    assert sorted(path.name[5:11] for path in folder.iterdir()) == ["000002", "000003", "000003"]
