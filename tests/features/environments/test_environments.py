"""Environments and tools as users of other projects write them, each behind the one contract."""

import json
import sys
import types
from importlib.util import find_spec

import pytest

from dschat_ppo.features.environments.environment_forms import environment_form
from dschat_ppo.features.environments.environments import Turn

TOOLS = '''
import asyncio

def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: one factor.
        b: the other factor.
    """
    return a * b

async def wait(seconds: float) -> dict:
    """Wait.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return {"waited": seconds}
'''

GYM = '''
class Guess:
    """A number between 1 and 100 (Gymnasium)."""
    def reset(self, *, seed=None, options=None):
        self.secret, self.low = options["secret"], seed
        return "Guess.", {}
    def step(self, action):
        right = int(action) == self.secret
        verdict = "right" if right else "wrong"
        return verdict, float(right), right, self.low > 5, {"tried": 1, "note": "text"}
    def close(self):
        pass
'''

AGENT = '''
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Number:
    """Stands for a tensor."""
    def __init__(self, value): self.value = value
    def item(self): return self.value

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        self.steps = 0
        return {"observation": states["observation"]}
    async def step(self, states, **kwargs):
        self.steps += 1
        right = states["label"] in states["action_text"]
        seen = states["observation_text"]
        return {"rewards": Number(float(right)), "scores": Number(1.0), "done": right,
                "environment_feedback": "" if right else f"\\nHuman: {seen}|</s>\\nAssistant: ",
                "sampling_params": None, "extra_logs": {"steps": self.steps}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
'''


def say(content="", *calls):
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"function": call} for call in calls],
    }


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def written(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return written


def test_functions_of_trl(write):
    path = write("trl_tools.py", TOOLS)
    form = environment_form(tools=[f"{path}:multiply", f"{path}:wait"])
    assert [tool["function"]["name"] for tool in form.tools] == ["multiply", "wait"]
    assert form.tools[0]["function"]["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "one factor.",
    }
    episode = form.make()
    assert episode.reset({"question": "?"}, 0) == Turn()
    turn = episode.step(
        say("", call("multiply", a=6, b=7), call("wait", seconds=0.0), call("divide", a=1))
    )
    assert [message["content"] for message in turn.messages[:2]] == ["42", '{"waited": 0.0}']
    assert (
        turn.messages[2]["content"] == "error: there is no tool 'divide'; there are: multiply, wait"
    )
    assert turn.messages[2] | {"content": ""} == {"role": "tool", "name": "divide", "content": ""}
    assert (turn.failed_calls, turn.done) == (1, False)
    named = episode.step(
        {"role": "assistant", "tool_calls": [{"id": "c9", "function": call("multiply", a=1, b=2)}]}
    )
    assert named.messages == [
        {"role": "tool", "name": "multiply", "content": "2", "tool_call_id": "c9"}
    ]
    wrong = episode.step(say("", call("multiply", a=6)))
    assert (
        wrong.failed_calls == 1
        and "TypeError: multiply() missing 1 required" in wrong.messages[0]["content"]
    )
    assert episode.step(say("It is 42.")) == Turn(done=True)
    assert episode.finish() == Turn()


def test_gymnasium(write):
    form = environment_form(f"{write('gym_like.py', GYM)}:Guess")
    episode = form.make()
    assert episode.reset({"secret": 7}, 3) == Turn([{"role": "user", "content": "Guess."}])
    expected = Turn([{"role": "user", "content": "wrong"}], None, 0.0, False, {"tried": 1.0})
    assert episode.step(say("5")) == expected
    assert episode.step(say("7")) == Turn(
        [{"role": "user", "content": "right"}], None, 1.0, True, {"tried": 1.0}
    )
    late = form.make()
    late.reset({"secret": 7}, 9)
    assert late.step(say("1")).done, "truncated episodes end, too"
    with pytest.raises(ValueError, match="invalid literal"):
        late.step(say("seven"))


def begun(monkeypatch, found, **methods):
    """An episode, begun, whose environment has these methods and whose `step` returns `found`."""
    methods = methods or {"reset": lambda self: None}
    made = type("Own", (), {"step": lambda self, action: found, **methods})
    monkeypatch.setitem(sys.modules, "own_environment", types.SimpleNamespace(Own=made))
    episode = environment_form("own_environment:Own").make()
    assert episode.reset({}, 0) == Turn()
    return episode


def test_numbers_of_skyrl_gym(monkeypatch):
    """docs/environments.md plays a game of it."""
    found = {
        "observations": [],
        "reward": 1,
        "done": True,
        "metadata": {"length": 4, "note": "text"},
    }
    episode = begun(monkeypatch, found, init=lambda self, prompt: (prompt, {}))
    assert episode.step(say("x")) == Turn([], None, 1.0, True, {"length": 4.0})


@pytest.mark.skipif(find_spec("openrlhf") is not None, reason="openrlhf is installed")
def test_an_agent_of_openrlhf(write):
    episode = environment_form(agent=write("agent_like.py", AGENT)).make()
    assert episode.reset({"label": "4"}, 0, "2+2?") == Turn(text=None)
    first = episode.step(say("5"))
    assert first == Turn([], "\nHuman: 2+2?|</s>\nAssistant: ", 0.0, False, {"steps": 1.0})
    second = episode.step(say("6"))
    assert second.text == "\nHuman: 2+2?5\nHuman: 2+2?|</s>\nAssistant: |</s>\nAssistant: "
    assert episode.step(say("4")) == Turn([], "", 1.0, True, {"steps": 3.0})


@pytest.mark.parametrize(
    ("reward", "problem"),
    [("high", "its reward is str, not a number"), (float("nan"), "its reward is nan")],
)
def test_a_reward_that_is_no_number(reward, problem, monkeypatch):
    episode = begun(monkeypatch, (None, reward, True, False, {}))
    with pytest.raises((TypeError, ValueError), match=problem):
        episode.step(say("x"))


@pytest.mark.parametrize("found", ["only text", ("text", 1.0), 3])
def test_a_step_of_another_form_says_so(found, monkeypatch):
    with pytest.raises(
        TypeError, match=f"step returned {type(found).__name__}, not observation, reward and"
    ):
        begun(monkeypatch, found).step(say("x"))


@pytest.mark.parametrize("text", ["tools: {a: 1}", "nothing: 1", "", "tools: [{config: {}}]"])
def test_a_file_of_verl_without_classes_says_so(write, text):
    with pytest.raises(
        ValueError, match="expected an entry `tools`, a list whose entries have a `class_name`"
    ):
        environment_form(tool_config=write("tools.yaml", text))


def test_the_classes_of_a_file_of_verl_lie_in_its_folder_or_in_the_working_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    tool = "class Says:\n    def __init__(self, config, schema): ...\n"
    schema = {"type": "function", "function": {"name": "says", "parameters": {}}}
    for place in ("of_file", "elsewhere"):
        (tmp_path / place).mkdir()
    for place, module in (("of_file", "tool_beside_file"), ("elsewhere", "tool_in_working_folder")):
        (tmp_path / place / f"{module}.py").write_text(tool)
        entry = {"class_name": f"{module}.Says", "tool_schema": schema}
        config = tmp_path / "of_file" / f"{module}.yaml"
        config.write_text(json.dumps({"tools": [entry]}))
        monkeypatch.chdir(tmp_path / "elsewhere")
        sys.path.append(str(tmp_path / "elsewhere"))  # as in the processes of episodes
        assert environment_form(tool_config=str(config)).tools == [schema]


def test_a_name_without_a_function_says_so():
    with pytest.raises(ValueError, match=r"expected FILE.py:NAME or MODULE:NAME, not 'tools.py'"):
        environment_form(tools=["tools.py"])
