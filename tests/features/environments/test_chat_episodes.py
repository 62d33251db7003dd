"""Chats with tools and environments, by a model that answers by rule."""

from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from chat_tokenizers import WITH_TOOLS, shaped

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.encode import encode_after
from dschat_ppo.data.templates import render
from dschat_ppo.features.environments.chat import EpisodeModel
from dschat_ppo.features.environments.episode_rollouts import EpisodeRollouts
from dschat_ppo.features.environments.flags import EnvironmentFlags
from dschat_ppo.tools.chat_model import StreamedToken, Terminal, checked_models
from dschat_ppo.tools.sampling_settings import SamplingSettings

OWN = '''
import time

def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one number.
        b: the other one.
    """
    if a > 100:
        time.sleep(60)
    return a + b

class Counter:
    """Of TRL."""
    def reset(self, **row):
        self.count = 0
        return "You count."
    def more(self) -> str:
        """Count on."""
        self.count += 1
        return f"now <|im_end|>{self.count}"

class Guess:
    """Of Gymnasium."""
    def reset(self, seed=None, options=None):
        self.secret = options.get("secret", 7)
        return "Guess."
    def step(self, text):
        right = text == str(self.secret)
        return ("right" if right else "wrong"), float(right) - 0.25, right, False, {}
'''


def call(name, arguments="{}"):
    return (
        f'I call.\n<tool_call>\n{{"name": "{name}", "arguments":'
        f" {arguments}}}\n</tool_call><|im_end|>"
    )


class Scripted(EpisodeModel):
    """Says the next of its texts; records the prompts."""

    def draw_tokens(self, ids, settings, max_tokens, *seed_path):
        self.prompts.append(self.tokenizer.decode(ids))
        drawn = encode_after(self.tokenizer, "", self.script.pop(0))
        for count, token_id in enumerate(drawn[:max_tokens], 1):
            text = self.tokenizer.decode(token_id, skip_special_tokens=True)
            note = ""
            if count == max_tokens < len(drawn):
                note = f"cut after {max_tokens} tokens"
            yield StreamedToken(text, note, token_id)


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    """Flags and processes of `add` with `Counter`, and of `Guess`."""
    own, tokenizer = tmp_path_factory.mktemp("own") / "own.py", shaped("Hermes", WITH_TOOLS)[0]
    own.write_text(OWN)
    counter = EnvironmentFlags(
        environment=f"{own}:Counter", tools=[f"{own}:add"], environment_timeout=4
    )
    flags = {"Counter": counter, "Guess": EnvironmentFlags(environment=f"{own}:Guess")}
    with ExitStack() as at_end:
        yield {
            name: (given, at_end.enter_context(closing(EpisodeRollouts(given, tokenizer, 10**6))))
            for name, given in flags.items()
        }


@pytest.fixture
def played(assets, environments, monkeypatch, capsys):
    """A function: environment, lines, what the model says -> (the output, the model)."""

    def play(environment, lines, script, most=256, max_turns=8):
        flags, rollouts = environments[environment]
        [checked] = checked_models([("--model", str(assets / "lm"))], DataFlags(["unused"]))
        checked, left = replace(checked, tokenizer=rollouts.tokenizer), iter(lines)

        def read(_):
            for line in left:
                return line
            raise EOFError

        monkeypatch.setattr("builtins.input", read)
        model = Scripted(checked, "fp32", replace(flags, max_turns=max_turns), rollouts)
        model.positions, model.prompts, model.script = None, [], list(script)
        capsys.readouterr()
        Terminal([model], SamplingSettings(max_tokens=most), "", False).run()
        return capsys.readouterr().out, model

    return play


def test_a_call_is_shown_and_run_and_its_result_is_read(played):
    script = [
        call("add", '{"a": 2, "b": 3}'),
        "Five.<|im_end|>",
        "<tool_call>add</tool_call><|im_end|>",
        "Bye.<|im_end|>",
    ]
    output, model = played("Counter", ["What is 2 + 3?", "Thanks."], script)
    assert output.splitlines()[4:] == [
        "</tool_call>",
        '[call] add {"a": 2, "b": 3}',
        "[environment] 5",
        "Five.",
        "<tool_call>add</tool_call>",
        (
            "[environment] error: the tool call is not valid JSON (Expecting value: line 1 column 1"
            " (char 0))"
        ),
        "Bye.",
    ]
    made = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    talk = [
        {"role": "user", "content": "What is 2 + 3?\n\nYou count."},
        {"role": "assistant", "content": "I call.", "tool_calls": [made]},
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "assistant", "content": "Five."},
        {"role": "user", "content": "Thanks."},
    ]
    expected = [
        render(model.tokenizer, talk[:end], open_answer=True, tools=model.tools)
        for end in (1, 3, 5)
    ]
    assert model.prompts[:3] == expected and len(model.prompts) == 4


def test_an_environment_with_tools_lasts_as_long_as_the_conversation(played):
    said = [call("more"), "So.<|im_end|>"]
    output, model = played(
        "Counter", ["Count.", "Go on.", "/undo", "Go on!", "/reset", "Anew."], said * 4
    )
    shown = [line for line in output.splitlines() if line.startswith("[environment]")]
    counts = [f"[environment] now <|im_end|>{count}" for count in (1, 2, 3, 1)]
    opening = "[environment] You count."
    assert shown == [opening, *counts[:3], opening, counts[3]]
    assert "Count.\n\nYou count.<|im_end|>" in model.prompts[0] and "Go on." not in model.prompts[4]
    assert model.prompts[5].startswith(model.prompts[4]) and "Go on!" in model.prompts[4]
    end_of_turn = model.tokenizer.convert_tokens_to_ids("<|im_end|>")
    [ids] = [ids for contents, ids in model.conversation_ids.items() if contents[0] == "Anew."]
    assert ids.count(end_of_turn) == 5, "what a tool says is text"


def test_an_environment_without_tools_is_the_user(played):
    lines = ['{"prompt": "Play.", "secret": 3}', "Play again."]
    output, model = played("Guess", lines, ["5<|im_end|>", "3<|im_end|>", "7<|im_end|>"])
    assert output.splitlines() == [
        "[environment] Guess.",
        "5",
        "[environment] wrong",
        "3",
        "[environment] right",
        "[reward] 0.5",
        "[environment] Guess.",
        "7",
        "[environment] right",
        "[reward] 0.75",
    ]
    opened = "<|im_start|>user\nPlay.\n\nGuess.<|im_end|>\n<|im_start|>assistant\n"
    assert model.prompts[0] == opened
    assert (
        model.prompts[1]
        == f"{opened}5<|im_end|>\n<|im_start|>user\nwrong<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Play.\n" not in model.prompts[2], "each line begins an episode"


def test_what_ends_an_episode_early(played):
    wrong = ["1<|im_end|>"] * 2
    output, _ = played("Guess", ["x"], wrong, max_turns=2)
    assert output.endswith(
        "[reward] -0.5\n[ended after 2 turns: no turn (--max_turns) or token is left]\n"
    )
    output, _ = played("Guess", ["x"], wrong, most=12)
    assert output.endswith(
        "[reward] -0.25\n[ended after 1 turns: no turn (--max_turns) or token is left]\n"
    )
    output, _ = played("Guess", ["x"], ["what<|im_end|>"], most=3)
    assert output.endswith("[reward] 0\n[cut after 3 tokens]\n"), "the environment is not asked"
    output, model = played(
        "Counter", ["x", "y"], [call("add", '{"a": 101, "b": 3}'), "Hm.<|im_end|>"]
    )
    assert (
        "[the environment took longer than 4 s (--environment_timeout)]\n" in output
        and output.endswith("Hm.\n")
    )
    assert model.prompts[1].endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"
    )
