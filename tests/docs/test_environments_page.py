"""The game of docs/environments.md in each form, as it stands there and with the flags of the page."""

import json
import re
from importlib.util import find_spec

import pytest
from bash_blocks import FLAGS_OF_STEP_3, ROOT, blocks_of, files_of

from dschat_ppo.common.own_functions import load
from dschat_ppo.config.cli import parse
from dschat_ppo.episodes.environments import Turn, form_of

PAGE = ROOT / "docs/environments.md"
NEEDED = ["--actor_model_name_or_path", "model", "--data_path", "rows.jsonl", "--output_dir", "out"]
FLAGS = [line.split() for b in blocks_of(PAGE) if FLAGS_OF_STEP_3 in b.text for line in b.commands]
ROW, OF_VERL = map(json.loads, re.findall(r"```json\n(.*?)\n```", PAGE.read_text(encoding="utf-8")))
SAID = ["higher", "lower", "right"]
INSTALLED = [f"{name}_game" for name in ("openrlhf", "verl") if find_spec(name)]
EXPECTED = {  # what the guesses 5, 8 and 7 are answered; rewards of the three and of the end
    "trl_tools": (SAID, [0, 0, 0, 0]),
    "trl_game": (SAID, [0, 0, 0, 1]),
    "gymnasium_game": (SAID, [0, 0, 1, 0]),
    "skyrl_game": (["higher", "lower", ""], [0, 0, 1, 0]),
    "openrlhf_game": (["<|user|>higher<|assistant|>", "<|user|>lower<|assistant|>", ""], [0, 0, 1, 0]),
    "verl_game": (SAID, [-0.01, -0.01, -0.01, 1]),
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The files of the page, in the current folder."""
    for name, text in files_of(PAGE).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("words", FLAGS, ids=lambda words: re.search(r"\w+(?=\.\w+)", " ".join(words))[0])
def test_a_game(words, request):
    name = request.node.callspec.id
    if name in INSTALLED:
        pytest.skip("it is installed: its own classes take the place of the stand-ins")
    form = form_of(**parse("ppo", [*NEEDED, *words]).environment.names)
    episode, said, rewards = form.make(), [], []
    episode.reset(ROW | OF_VERL | {"ground_truth": ROW["secret"]}, 0)
    for number in (5, 8, 7):
        action = {"role": "assistant", "content": str(number)}
        for tool in (tool["function"] for tool in form.tools):
            given = {
                key: value
                for key, value in (("number", number), ("other", 7))
                if key in tool["parameters"]["properties"]
            }
            action["tool_calls"] = [{"type": "function", "function": {"name": tool["name"], "arguments": given}}]
        turn = episode.step(action)
        assert not turn.failed_calls
        said.append("".join(message["content"] for message in turn.messages) or turn.text or "")
        rewards.append(turn.reward)
    assert turn.done is not bool(form.tools), "a game of tools ends with a message that calls none"
    assert turn.done or episode.step({"role": "assistant", "content": "It is 7."}).done
    assert (said, [*rewards, episode.finish().reward]) == EXPECTED[name]


@pytest.mark.skipif("verl_game" in INSTALLED, reason="verl is installed")
def test_episodes_of_verl_have_instances_and_numbers_of_their_own(tmp_path):
    """Of the game of the page, whose instances have other names here and whose calls are traced and counted."""
    changes = {
        '["game"]': "[str(secret)]", 'return "game"': "return str(secret)", "-0.01, {}": '-0.01, {"calls": 1}',
        "    async def execute": "    @rollout_trace_op\n    async def execute",
        "from verl.tools.schemas": "from verl.utils.rollout_trace import rollout_trace_op\nfrom verl.tools.schemas",
    }  # fmt: skip
    for name in ("verl_game.py", "verl_game.yaml"):
        text = (tmp_path / name).read_text()
        for before, after in changes.items():
            text = text.replace(before, after)
        (tmp_path / name.replace("_game", "_traced")).write_text(text.replace("verl_game", "verl_traced"))
    form = form_of(tool_config="verl_traced.yaml")
    episodes = [form.make(), form.make()]
    for episode, secret in zip(episodes, (5, 6), strict=True):
        row = {"extra_info": {"tools_kwargs": {"guess": {"create_kwargs": {"secret": secret}}}}}
        assert episode.reset(row, 0) == Turn()
    guess = {"role": "assistant", "tool_calls": [{"function": {"name": "guess", "arguments": {"number": 5}}}]}
    for episode, said, reward in zip(episodes, ("right", "higher"), (1.0, 0.0), strict=True):
        message = {"role": "tool", "name": "guess", "content": said}
        assert episode.step(guess) == Turn([message], None, -0.01, False, {"calls": 1.0})
        assert episode.step({"role": "assistant", "content": "done"}) == Turn(done=True)
        assert episode.finish() == Turn(reward=reward)


def test_every_form_of_the_page_is_played():
    assert len(FLAGS) == len(EXPECTED) and len(files_of(PAGE)) == len(EXPECTED) + 1


def test_the_reward_function_of_the_tools():
    score = load("trl_tools.py", "names_it")
    assert score("Is it 8? lower It is 7.", 7) == 1.0 and score("right", 7) == 0.0
