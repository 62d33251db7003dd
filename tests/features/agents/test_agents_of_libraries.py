"""Unmodified agents of other projects play episodes with a scripted model."""

import json
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import ROOT
from random_agents import SHAPES_OF_AGENTS
from scripted_engine import ScriptedEngine

from dschat_ppo.data.encode import decoded
from dschat_ppo.features.agents.forms import AgentResult
from dschat_ppo.features.agents.front_link import Front
from dschat_ppo.features.agents.record import EpisodeLimits
from dschat_ppo.features.agents.turns import AgentTurns
from dschat_ppo.features.environments.episode_processes import Episodes

pytestmark = [pytest.mark.release, pytest.mark.slow]
AGENTS = Path(__file__).parent / "agents_of_libraries.py"
OF_VERIFIERS = ROOT / "training_scripts/examples/agents/verifiers_agent.py"
FORM = "dschat_ppo.features.agents.forms:form_of_agent"
TOKENIZER, _ = SHAPES_OF_AGENTS["tools"]
LIMITS = EpisodeLimits(  # a token is a byte here
    calls=8, contexts=4, context_length=60000, prompt_length=50000, response_length=200000
)


def call_of(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


REPLIES = {  # of the first call of the model, and of the second
    "smolagents": (
        'Thought: I look.\n<code>\nseen = look("a")\nprint(seen)\n</code>',
        'Thought: Done.\n<code>\nfinal_answer("nothing")\n</code>',
    ),
    "smolagents_tools": (call_of("unknown"), call_of("final_answer", answer="nothing")),
    "langchain_openai": (call_of("look", at="a"), "I see nothing."),
    "minisweagent": (
        "I say it." + call_of("bash", command="echo hi > said; cat said"),
        call_of("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat said"),
    ),
    "verifiers": (call_of("calculate", expression="1+2"), "The sum is 3."),
}


def episode_of(case, file, row):
    """The episode of a row that the agent in a file has played."""
    replies = iter(REPLIES[case])
    agents = Episodes({"function": f"{file}:play"}, 100.0, 2, AgentResult, FORM)
    front = Front()
    with closing(agents), closing(front):
        agents.watch(front.socket)
        turns = AgentTurns(agents, front, TOKENIZER, LIMITS, {"temperature": 1.0})
        turns.start([row], [0], [0])
        ScriptedEngine(TOKENIZER, lambda text: next(replies)).run(turns)
        agents.end_all()
    [episode] = turns.episodes
    return episode


@pytest.mark.parametrize(
    ("case", "library", "contexts"),
    [
        ("smolagents", "smolagents", 1),  # it puts the stop text behind the reply that it ended
        ("smolagents_tools", "smolagents", 2),  # it writes calls of tools as text
        ("langchain_openai", "langchain_openai", 1),
        ("minisweagent", "minisweagent", 1),
    ],
)
def test_an_unmodified_agent_plays_an_episode(tmp_path, monkeypatch, case, library, contexts):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    episode = episode_of(case, AGENTS, {"case": case})
    assert (episode.problem, episode.result) == ("", AgentResult(1.0))
    assert episode.counts["refused_calls"] == episode.counts["malformed_calls"] == 0
    assert episode.counts["replaced_settings"] == 2 * (case == "smolagents_tools")
    assert len(episode.trained_calls) == 2
    rows = episode.tree.rows()
    assert len(rows) == contexts
    texts = [decoded(TOKENIZER, row.prompt_ids + row.response_ids) for row in rows]
    for reply in REPLIES[case]:
        assert any(reply in text for text in texts)


def test_a_task_of_verifiers_is_an_episode():
    """The example, whose harness runs in the process of the agent."""
    pytest.importorskip("verifiers")
    row = {"prompt": [{"role": "user", "content": "What is 1+2?"}], "answer": "3"}
    episode = episode_of("verifiers", OF_VERIFIERS, row)
    assert episode.problem == ""
    assert episode.result == AgentResult(1.0, None, {"model_calls": 2.0})
    [context] = episode.tree.rows()
    text = decoded(TOKENIZER, context.prompt_ids + context.response_ids)
    assert "What is 1+2?" in text and "\n3\n" in text and text.endswith("The sum is 3.<|im_end|>")
