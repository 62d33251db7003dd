"""The chat in a terminal: its flags, a whole chat through pipes, models that answer by rule, tools
and environments."""

import io
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from chat_tokenizers import WITH_TOOLS, shaped

from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.environment_flags import EnvironmentFlags
from dschat_ppo.data.encode import encode_after
from dschat_ppo.data.templates import render
from dschat_ppo.episodes.rollouts import EpisodeRollouts
from dschat_ppo.errors import UserError
from dschat_ppo.tools.chat import main
from dschat_ppo.tools.chat_episodes import EpisodeModel
from dschat_ppo.tools.chat_model import StreamedToken, Terminal, checked_models
from dschat_ppo.tools.sampling_settings import SamplingSettings


def test_a_chat_through_pipes(assets, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is\n/undo\n"))
    words = [
        "--model",
        str(assets / "lm"),
        "--compare",
        str(assets / "uniform_lm"),
        "--max_tokens",
        "4",
    ]
    assert main([*words, "--top_k", "1", "--dtype", "fp32"]) == 0
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if not line.startswith("rollout: ")]  # a log line
    assert lines[0] == "lm:" and "uniform_lm:" in lines and lines[-1] == "forgotten: Where is"
    assert output.count("[cut after 4 tokens]") == 2


class Echo:
    """Answers "NAME heard N: TEXT" word by word; records what it was asked."""

    def __init__(self, name="A", has_template=True, stop_after=None, note=""):
        self.name, self.path, self.has_template, self.asked = name, f"out/{name}", has_template, []
        self.stop_after, self.note = stop_after, note

    def respond(self, messages, settings, response_index):
        contents = [message["content"] for message in messages]
        self.asked.append((contents, settings, response_index))
        words = f"{self.name} heard {len(messages)}: {messages[-1]['content']}".split(" ")
        for count, word in enumerate(words, 1):
            if self.stop_after == count - 1:
                raise KeyboardInterrupt
            yield StreamedToken(
                word if count == 1 else f" {word}", self.note if count == len(words) else ""
            )


@pytest.fixture
def chat(monkeypatch, capsys):
    """A function: lines of input -> the output of a chat over them, and the chat."""

    def run(lines, *models, system="", interactive=False) -> tuple[str, Terminal]:
        left = iter(lines)

        def read(prompt):
            print(prompt, end="")
            for line in left:
                return line
            raise EOFError

        monkeypatch.setattr("builtins.input", read)
        terminal = Terminal(models or [Echo()], SamplingSettings(), system, interactive)
        terminal.run()
        return capsys.readouterr().out, terminal

    return run


def test_two_models_keep_their_own_conversations(chat):
    first, second = Echo("A"), Echo("B", note="cut after 4 tokens")
    output, _ = chat(["x", "y"], first, second)
    assert output.startswith("A:\nA heard 1: x\nB:\nB heard 1: x\n[cut after 4 tokens]\nA:\n")
    assert second.asked[1][0] == ["x", "B heard 1: x", "y"]


def test_undo_retry_and_reset(chat):
    model = Echo()
    output, _ = chat(["a", "b", "/undo", "c", "/retry", "/reset", "d", "/undo", "/undo"], model)
    assert [(asked[-1], len(asked), index) for asked, _, index in model.asked] == [
        ("a", 1, 0),
        ("b", 3, 1),
        ("c", 3, 2),
        ("c", 3, 3),
        ("d", 1, 0),
    ]
    assert "forgotten: b\n" in output and output.endswith("forgotten: d\nthere is no message yet\n")


def test_system_message_and_settings(chat):
    model = Echo()
    output, _ = chat(["a", "/system be kind", "b", "/system", "c"], model, system="be short")
    assert [asked[0] for asked, _, _ in model.asked] == ["be short", "be kind", "a"]
    assert "system message: be kind\n" in output and "no system message\n" in output
    assert "a model has no chat template here" in chat(["/system x"], Echo(), Echo("B", False))[0]
    model = Echo()
    output, _ = chat(
        ["/set temperature 0.5", "a", "/set", "/set top_p 7", "/set top_p", "/set heat 1"], model
    )
    assert model.asked[0][1] == SamplingSettings(temperature=0.5)
    assert (
        "temperature 0.5  top_p 1.0" in output
        and "top_p must be a number from 0.001 to 1, got 7\n" in output
    )
    assert "/set needs a name and a value" in output and "there is no setting 'heat'" in output


def test_a_message_of_several_lines_and_one_with_a_slash(chat):
    model = Echo()
    chat(["one\\", "two", "//etc"], model)
    assert [asked[-1] for asked, _, _ in model.asked] == ["one\ntwo", "/etc"]


def test_a_refused_message_is_in_no_conversation(chat):
    first, second = Echo("A"), Echo("B")
    second.respond = lambda *_: (_ for _ in ()).throw(UserError("B refuses"))
    output, terminal = chat(["x"], first, second)
    assert output.endswith("B refuses\n") and terminal.turns == [[], []]


def test_an_interrupt_keeps_what_was_written_or_drops_the_message(chat):
    output, terminal = chat(["x"], Echo(stop_after=2), interactive=True)
    assert "A heard\n[stopped]\n" in output and terminal.turns[0] == [("x", "A heard")]
    output, terminal = chat(["x"], Echo(stop_after=0), interactive=True)
    assert "not part of the conversation" in output and terminal.turns[0] == []


@pytest.mark.parametrize(
    ("text", "shown"), [("a\x1b[2Jb", r"a\x1b[2Jb"), ("é\n\tx", "é\n\tx"), ("\x9b1m", r"\x9b1m")]
)
def test_answers_cannot_steer_the_terminal(chat, text, shown):
    model = Echo()
    model.respond = lambda *_: iter([StreamedToken(text, "")])
    for interactive in (False, True):
        assert shown in chat(["x"], model, interactive=interactive)[0]
        assert "\x1b" not in chat(["x"], model, interactive=interactive)[0]


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
