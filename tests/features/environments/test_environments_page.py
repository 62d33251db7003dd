"""The game of docs/environments.md in each form, as it stands there and with the flags of the
page."""

import json
import re
from importlib.util import find_spec

import pytest
from bash_blocks import FLAGS_OF_STEP_3, ROOT, blocks_of, files_of

from dschat_ppo.common.own_functions import load_callable
from dschat_ppo.config.cli import parse
from dschat_ppo.features.environments.environment_forms import environment_form
from dschat_ppo.features.environments.flags import EnvironmentFlags

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
    "openrlhf_game": (
        ["<|user|>higher<|assistant|>", "<|user|>lower<|assistant|>", ""],
        [0, 0, 1, 0],
    ),
    "verl_game": (SAID, [-0.01, -0.01, -0.01, 1]),
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The files of the page, in the current folder."""
    for name, text in files_of(PAGE).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    "words", FLAGS, ids=lambda words: re.search(r"\w+(?=\.\w+)", " ".join(words))[0]
)
def test_a_game(words, request):
    name = request.node.callspec.id
    if name in INSTALLED:
        pytest.skip("it is installed: its own classes take the place of the stand-ins")
    form = environment_form(**parse("ppo", [*NEEDED, *words]).of(EnvironmentFlags).names)
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
            action["tool_calls"] = [
                {"type": "function", "function": {"name": tool["name"], "arguments": given}}
            ]
        turn = episode.step(action)
        assert not turn.failed_calls
        said.append("".join(message["content"] for message in turn.messages) or turn.text or "")
        rewards.append(turn.reward)
    assert turn.done is not bool(form.tools), "a game of tools ends with a message that calls none"
    assert turn.done or episode.step({"role": "assistant", "content": "It is 7."}).done
    assert (said, [*rewards, episode.finish().reward]) == EXPECTED[name]


def test_every_form_of_the_page_is_played():
    assert len(FLAGS) == len(EXPECTED) and len(files_of(PAGE)) == len(EXPECTED) + 1


def test_the_reward_function_of_the_tools():
    score = load_callable("trl_tools.py", "names_it")
    assert score("Is it 8? lower It is 7.", 7) == 1.0 and score("right", 7) == 0.0
