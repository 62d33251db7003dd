"""The chat in a terminal: its flags, a whole chat through pipes, models that answer by rule."""

import io

import pytest

from dschat_ppo.errors import UserError
from dschat_ppo.tools.chat import main
from dschat_ppo.tools.chat_model import StreamedToken, Terminal
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


@pytest.mark.parametrize("names", [("A", "B"), (None, "B"), ("B", "A")])
def test_of_several_features_the_first_that_loads_the_models_does(
    assets, monkeypatch, capsys, names
):
    """All of them are asked, since one may refuse the flags of another."""
    asked = []

    def loader_named(name):
        def loader_of(features, checked, at_end):
            asked.append(name)
            if name is None:
                return None
            return lambda model, dtype: Echo(name)

        return loader_of

    offered = {"chat.loader_of": [loader_named(name) for name in names]}
    monkeypatch.setattr("dschat_ppo.tools.chat.hooks", lambda hook: offered.get(hook, ()))
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is\n"))
    assert main(["--model", str(assets / "lm"), "--dtype", "fp32"]) == 0
    first = next(name for name in names if name is not None)
    assert capsys.readouterr().out.splitlines()[-1] == f"{first} heard 1: Where is"
    assert asked == list(names)


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
    assert output.endswith("B refuses\n") and terminal.exchanges == [[], []]


def test_an_interrupt_keeps_what_was_written_or_drops_the_message(chat):
    output, terminal = chat(["x"], Echo(stop_after=2), interactive=True)
    assert "A heard\n[stopped]\n" in output and terminal.exchanges[0] == [("x", "A heard")]
    output, terminal = chat(["x"], Echo(stop_after=0), interactive=True)
    assert "not part of the conversation" in output and terminal.exchanges[0] == []


@pytest.mark.parametrize(
    ("text", "shown"), [("a\x1b[2Jb", r"a\x1b[2Jb"), ("é\n\tx", "é\n\tx"), ("\x9b1m", r"\x9b1m")]
)
def test_answers_cannot_steer_the_terminal(chat, text, shown):
    model = Echo()
    model.respond = lambda *_: iter([StreamedToken(text, "")])
    for interactive in (False, True):
        assert shown in chat(["x"], model, interactive=interactive)[0]
        assert "\x1b" not in chat(["x"], model, interactive=interactive)[0]
