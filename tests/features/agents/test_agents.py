"""Agents that ask a scripted model: what they get, what their rows hold, and how they fail."""

import json
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from random_agents import SHAPES_OF_AGENTS, context_of
from scripted_engine import ScriptedEngine

from dschat_ppo.data.encode import decoded
from dschat_ppo.features.agents.forms import AgentResult, agent_result
from dschat_ppo.features.agents.front import CHAT
from dschat_ppo.features.agents.front_link import Front, FrontEvent
from dschat_ppo.features.agents.record import EpisodeLimits
from dschat_ppo.features.agents.turns import AgentTurns
from dschat_ppo.features.environments.episode_processes import Episodes
from dschat_ppo.rewards.worker_pool import CallError

pytest.importorskip("openai")
HERE = Path(__file__).parent
FORM = "dschat_ppo.features.agents.forms:form_of_agent"
TOKENIZER, _ = SHAPES_OF_AGENTS["tools"]
LIMITS = EpisodeLimits(
    calls=8, contexts=4, context_length=1500, prompt_length=1000, response_length=1400
)


class SlowModel:
    """Says what it is asked to; "slow" takes some seconds, and "never" never ends."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.began = {}

    def __call__(self, text):
        *_, asked, _ = text.split("<|im_start|>")
        asked = asked.removeprefix("user\n").removesuffix("<|im_end|>\n")
        if "never" in asked:
            return None
        if "slow" in asked:
            began = self.began.setdefault(text, time.monotonic())
            return "at last" if time.monotonic() > began + self.seconds else None
        if asked.startswith("Where?"):
            return '<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call>' * 2
        if "nothing" in asked:
            return "<think>\nHm.\n</think>\n\nI see nothing."
        return asked.replace("say", "said")


def plain(reply):
    """The model for prompts without a template too."""
    return lambda text: reply(text) if "<|im_start|>" in text else " words"


def played(names, rows, seconds=30.0, slow=1.5):
    """The turns of agents that have played these rows, and the engine; `seconds`: own ones of an
    agent."""
    agents = Episodes(names, seconds, 32, AgentResult, FORM)
    front = Front()
    with closing(agents), closing(front):
        agents.watch(front.socket)
        turns = AgentTurns(agents, front, TOKENIZER, LIMITS, {"temperature": 0.7})
        seeds = list(range(len(rows)))
        turns.start(rows, seeds, seeds)
        engine = ScriptedEngine(TOKENIZER, plain(SlowModel(slow)))
        engine.run(turns)
        assert not turns.front.poll() and turns.all_wait and not turns.live
        agents.end_all()
    return turns, engine


CASES = (
    "loop concurrent streams stops ids untrained limits settings hostile loses abandons variables"
    " raises silent unscored wrong"
).split()


@pytest.fixture(scope="module")
def cases():
    """case -> its episode, all of one rollout."""
    names = {"function": f"{HERE / 'agents_of_tests.py'}:play"}
    turns, engine = played(names, [{"case": case} for case in CASES], seconds=120.0)
    return dict(zip(CASES, turns.episodes, strict=True)), turns, engine


def rows_of(episode):
    """The rows of an episode's contexts, which the engine has too."""
    return episode.tree.rows()


def test_all_rows_are_what_the_engine_holds(cases):
    episodes, turns, engine = cases
    for episode in episodes.values():
        for row in rows_of(episode):
            context = context_of(episode.tree, row)
            sequence = episode.index * turns.sequences_of_episode + context.index
            ids = row.prompt_ids + row.response_ids
            assert engine.ids[sequence][: len(ids)] == ids
            assert engine.prompts[sequence] == row.prompt_ids


def test_a_loop_with_tools_is_one_context(cases):
    episode = cases[0]["loop"]
    assert episode.problem == ""
    assert episode.result == AgentResult(0.5, [0.25, 1.0], {"length": 5.0})
    [row] = rows_of(episode)
    assert len(row.call_ends) == 2
    text = decoded(TOKENIZER, row.prompt_ids + row.response_ids)
    calls = '<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call>' * 2
    results = "\n<tool_response>\nAt a: nothing.\n</tool_response>" * 2
    assert text.endswith(
        f"<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n{calls}<|im_end|>\n"
        f"<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\nHm.\n</think>\n\nI see nothing.<|im_end|>"
    )
    assert episode.tree.seed == context_of(episode.tree, row).seed == episode.index


@pytest.mark.parametrize(
    ("case", "reward", "calls", "contexts"),
    [
        ("concurrent", 1, 3, 3),
        ("streams", 1, 1, 1),
        ("stops", 1, 2, 2),
        ("ids", 1, 2, 1),
        ("untrained", 1, 1, 1),
        ("limits", 2, 1, 1),
        ("settings", 1, 1, 1),
        ("hostile", 1, 1, 1),
        ("loses", 1, 1, 1),
        ("abandons", 1, 1, 1),
        ("variables", 6, 1, 1),
        ("unscored", None, 1, 1),
    ],
)
def test_agents_that_play_to_their_end(cases, case, reward, calls, contexts):
    episode = cases[0][case]
    assert episode.problem == ""
    assert episode.result.reward == reward
    assert len(episode.trained_calls) == calls
    rows = rows_of(episode)
    assert len(rows) == contexts and sum(len(row.call_ends) for row in rows) == calls


def test_rewards_of_concurrent_calls_land_on_the_calls_that_their_ids_name(cases):
    episode = cases[0]["concurrent"].played()
    tokens = sum(len(context.response_ids) for context in episode.contexts)
    prompts = sum(len(context.prompt_ids) for context in episode.contexts[1:])
    rewards = torch.zeros(tokens + prompts)
    episode.place_rewards(rewards)
    numbers = [decoded(TOKENIZER, each.response_ids)[len("said ")] for each in episode.contexts]
    expected = [float(number) for number in numbers]
    expected[-1] += 1  # the last call that came has the reward of the episode, too
    assert sorted(numbers) == ["2", "4", "6"]
    assert rewards[rewards.nonzero()].flatten().tolist() == expected


def test_what_is_counted(cases):
    episodes, turns, _ = cases
    assert episodes["untrained"].counts["untrained_calls"] == 4
    assert episodes["limits"].counts["refused_calls"] == 2
    assert episodes["hostile"].counts["refused_calls"] == 3
    assert episodes["settings"].counts["replaced_settings"] == 2
    assert turns.replaced == {"temperature": (0.1, 0.7), "seed": (4, None)}
    assert episodes["loses"].counts["retries"] == 1
    assert len(episodes["loses"].tree.calls) == 1, "the model has written once"
    assert episodes["loses"].result.metrics == {"said": len("at last")}
    assert len(episodes["abandons"].tree.calls) == 2


def test_a_stop_text_is_kept_in_the_row_and_not_sent(cases):
    first, second = rows_of(cases[0]["stops"])
    assert decoded(TOKENIZER, first.response_ids) == "sa"
    assert decoded(TOKENIZER, second.response_ids) == "sai"


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("raises", "ValueError: no luck"),
        ("silent", "it took no reply of the model that is trained"),
        ("wrong", "returned str; expected a number"),
    ],
)
def test_agents_that_fail(cases, case, problem):
    assert problem in cases[0][case].problem


def test_the_clock_of_an_agent_stands_while_the_model_writes():
    names = {"function": f"{HERE / 'agents_of_tests.py'}:patient"}
    turns, _ = played(names, [{}], seconds=5.0, slow=6.0)
    [episode] = turns.episodes
    assert (episode.problem, episode.result) == ("", AgentResult(1.0))
    assert episode.own_seconds < 5


def test_an_agent_that_takes_longer_than_its_own_time_is_killed():
    names = {"function": f"{HERE / 'agents_of_tests.py'}:sleeps"}
    turns, _ = played(names, [{}], seconds=1.0)
    assert turns.episodes[0].problem == "took longer than 1 s (--environment_timeout)"


def test_a_request_of_an_earlier_rollout_reaches_no_episode():
    class Front:
        admitted = 3
        replied = ()

        def reply(self, call, status, body):
            self.replied = (call, status, json.loads(body)["error"]["code"])

    front = Front()
    turns = AgentTurns(None, front, TOKENIZER, LIMITS, {})
    turns._hear(FrontEvent("call", 5, episode=2, path=CHAT, body=b"{}"))
    turns._hear(FrontEvent("dismissed", -1, episode=2))
    assert front.replied == (5, 401, "invalid_api_key")


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
message = {"role": "user", "content": "say " + row["word"]}
body = {"model": os.environ["OPENAI_MODEL"], "messages": [message]}
if row["word"] == "twice":
    body["n"] = 2
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
if row["word"] == "bad":
    print("this is wrong")
    sys.exit(3)
if row["word"] != "none":
    with open(os.environ["DSCHAT_RESULT"], "w") as file:
        json.dump({"reward": len(reply), "seed": int(os.environ["DSCHAT_SEED"])}, file)
"""


def test_a_program_plays_episodes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = f"{sys.executable} '{program}'"
    rows = [{"word": "é"}, {"word": "bad"}, {"word": "none"}, {"word": "twice"}]
    turns, _ = played({"command": command}, rows)
    good, bad, none, twice = turns.episodes
    assert good.result == AgentResult(len("said é"), None, {"seed": 0.0})
    assert "exit code 3: this is wrong" in bad.problem
    assert (none.result, none.problem) == (AgentResult(), "")
    cause = "HTTPError: HTTP Error 400: Bad Request; the last request that was refused: n 2 is not"
    assert cause in twice.problem
    assert [len(episode.trained_calls) for episode in turns.episodes] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "value", ["a", [1], {"reward": "a"}, float("nan"), {"call_rewards": [None]}]
)
def test_results_that_are_no_rewards(value):
    with pytest.raises((TypeError, ValueError)):
        agent_result(value)


def test_a_file_that_cannot_be_used(tmp_path):
    (tmp_path / "own.py").write_text("import missing_module")
    with pytest.raises(CallError, match="missing_module"):
        Episodes({"function": f"{tmp_path / 'own.py'}:play"}, 5.0, 2, AgentResult, FORM)
