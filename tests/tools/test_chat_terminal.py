"""The chat in a terminal, with models that answer by rule: commands, two models, interrupts, plain lines."""

import pytest

from dschat_ppo.errors import UserError
from dschat_ppo.tools.chat_model import Token
from dschat_ppo.tools.chat_terminal import COMMANDS, HELP, Terminal, printable
from dschat_ppo.tools.sampling_settings import SamplingSettings


class Echo:
    """Answers "NAME heard N messages, last TEXT" in pieces of one word; records what it was asked."""

    def __init__(self, name="A", has_template=True, stop_after=None, end="eos", dropped=0):
        self.path = f"out/{name}"
        self.name, self.has_template, self.stop_after, self.end, self.dropped = (
            name, has_template, stop_after, end, dropped
        )  # fmt: skip
        self.asked = []

    def answer(self, messages, settings, number):
        self.asked.append(([message["content"] for message in messages], settings, number))
        if "refuse" in messages[-1]["content"]:
            raise UserError(f"{self.name} refuses")
        words = f"{self.name} heard {len(messages)}: {messages[-1]['content']}".split(" ")
        for count, word in enumerate(words, 1):
            if self.stop_after == count - 1:
                raise KeyboardInterrupt
            last = count == len(words)
            yield Token(word if count == 1 else f" {word}", self.end if last else "", count, 0.1, self.dropped)


def chat(lines, *models, system="", interactive=False) -> tuple[str, Terminal]:
    """The output of a chat over these lines of input."""
    written, left = [], iter(lines)

    def read(prompt):
        written.append(prompt)
        for line in left:
            return line
        raise EOFError

    terminal = Terminal(models or [Echo()], SamplingSettings(), system, False, interactive, read, written.append)
    terminal.run()
    return "".join(written), terminal


def test_plain_lines():
    model = Echo()
    assert chat(["hello", "", "again"], model)[0] == "A heard 1: hello\nA heard 3: again\n"
    assert [asked for asked, _, _ in model.asked] == [["hello"], ["hello", "A heard 1: hello", "again"]]
    assert [number for _, _, number in model.asked] == [0, 1]


def test_two_models_keep_their_own_conversations():
    first, second = Echo("A"), Echo("B", end="length")
    output, _ = chat(["x", "y"], first, second)
    assert output.startswith("A:\nA heard 1: x\nB:\nB heard 1: x\n[cut after 4 tokens (/set max_tokens N)]\nA:\n")
    assert second.asked[1][0] == ["x", "B heard 1: x", "y"]


def test_undo_retry_and_reset():
    model = Echo()
    output, _ = chat(["a", "b", "/undo", "c", "/retry", "/reset", "d", "/undo", "/undo"], model)
    assert [(asked[-1], len(asked), number) for asked, _, number in model.asked] == [
        ("a", 1, 0), ("b", 3, 1), ("c", 3, 2), ("c", 3, 3), ("d", 1, 0),
    ]  # fmt: skip
    assert "forgotten: b\n" in output and output.endswith("forgotten: d\nthere is no message yet\n")


def test_system_message():
    model = Echo()
    output, _ = chat(["a", "/system be kind", "b", "/system", "c"], model, system="be short")
    assert [asked[0] for asked, _, _ in model.asked] == ["be short", "be kind", "a"]
    assert "system message: be kind\n" in output and "no system message\n" in output
    assert "B: its tokenizer has no chat template" in chat(["/system x"], Echo(), Echo("B", False))[0]


def test_set():
    model = Echo()
    output, _ = chat(["/set temperature 0.5", "a", "/set", "/set top_p 7", "/set top_p", "/set heat 1"], model)
    assert model.asked[0][1] == SamplingSettings(temperature=0.5)
    assert "temperature 0.5  top_p 1.0" in output and "top_p must be a number from 0.001 to 1, got 7\n" in output
    assert "/set needs a name and a value" in output and "there is no setting 'heat'" in output


def test_help_quit_and_unknown_commands():
    output, _ = chat(["/help", "/nothing", "/help me", "/quit", "not read"])
    assert output == (
        f"{HELP}\nthere is no command /nothing; /help lists them, and //nothing is a message\n/help takes no argument\n"
    )
    assert all(f"/{name}" in HELP for name in COMMANDS)


def test_a_message_of_several_lines_and_one_with_a_slash():
    model = Echo()
    chat(["one\\", "two", "//etc"], model)
    assert [asked[-1] for asked, _, _ in model.asked] == ["one\ntwo", "/etc"]


def test_a_refused_message_is_in_no_conversation():
    first, second = Echo("A"), Echo("B")
    second.answer = lambda *_: (_ for _ in ()).throw(UserError("B refuses"))
    output, terminal = chat(["x"], first, second)
    assert output.endswith("B refuses\n") and [c.turns for c in terminal.conversations] == [[], []]


def test_an_interrupt_keeps_what_was_written_or_drops_the_message():
    output, terminal = chat(["x"], Echo(stop_after=2), interactive=True)
    assert "A heard\n[stopped]\n" in output and terminal.conversations[0].turns == [("x", "A heard")]
    output, terminal = chat(["x"], Echo(stop_after=0), interactive=True)
    assert "not part of the conversation" in output and terminal.conversations[0].turns == []


def test_interactive():
    output, _ = chat(["a"], Echo("A", has_template=False, dropped=2), interactive=True)
    assert "A  out/A  (no chat template: the model continues the text)\n" in output
    assert (
        "> A heard 1: a\n[the 2 oldest exchanges were not read: the conversation exceeds the model's positions]\n> \n"
        in output
    )


@pytest.mark.parametrize(("text", "shown"), [("a\x1b[2Jb\x07", "a[2Jb"), ("é\n\tx", "é\n\tx"), ("\x9b1m\x7f\r", "1m")])
def test_answers_cannot_steer_the_terminal(text, shown):
    assert printable(text) == shown
    model = Echo()
    model.answer = lambda *_: iter([Token(text, "eos", 1, 0.1, 0)])
    for interactive in (False, True):
        assert shown in chat(["x"], model, interactive=interactive)[0]
        assert "\x1b" not in chat(["x"], model, interactive=interactive)[0]
