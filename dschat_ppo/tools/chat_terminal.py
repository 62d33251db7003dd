"""The chat in a terminal: messages, answers as they are generated, and commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from dschat_ppo.errors import UserError
from dschat_ppo.tools.chat_model import ChatModel, Conversation
from dschat_ppo.tools.sampling_settings import SamplingSettings

HELP = """\
/help              show these commands
/reset             forget the conversation, and draw the same random numbers again
/undo              forget the last message and its answers
/retry             answer the last message again, with other random numbers
/system [TEXT]     set the system message of the whole conversation; without TEXT, remove it
/set [NAME VALUE]  change a sampling setting; without NAME, show all of them
/quit              end the chat (or Ctrl-D); Ctrl-C stops an answer
A line that ends with \\ continues on the next one. To send a message that starts with /, start it with //."""
COMMANDS = ("help", "reset", "undo", "retry", "system", "set", "quit")
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def printable(text: str) -> str:
    """`text` without control characters, with which a model could control the terminal; line breaks and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


class Terminal:
    """One chat.

    Args:
        models: each answers every message and has its own conversation.
        settings: sampling, which /set changes.
        system: system message; "" for none.
        coloured: whether names and notes are highlighted.
        interactive: write a prompt, and answers as they are generated; otherwise answers are written whole.
        read: a prompt -> the next line of the user; raises EOFError at the end.
        write: prints a text, without a line break after it.
    """

    def __init__(
        self, models: Sequence[ChatModel], settings: SamplingSettings, system: str, coloured: bool, interactive: bool,
        read: Callable[[str], str] = input, write: Callable[[str], object] | None = None,
    ):  # fmt: skip
        self.models = models
        self.settings = settings
        self.coloured = coloured
        self.interactive = interactive
        self.read = read
        self.write = write or partial(print, end="", flush=True)
        self.conversations = [Conversation(system, []) for _ in models]
        self.number = 0  # of the next answer, for its seed

    def run(self) -> None:
        """Read messages and commands until the end of the input or /quit."""
        if self.interactive:
            for model in self.models:
                path = f"  {model.path}" if model.path != model.name else ""
                how = "" if model.has_template else "  (no chat template: the model continues the text)"
                self.note(f"{model.name}{path}{how}")
            self.note("/help lists the commands, Ctrl-D ends the chat")
        while True:
            try:
                line = self._next_message()
            except (EOFError, KeyboardInterrupt):
                self.write("\n" if self.interactive else "")
                return
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if not self._command(*line[1:].partition(" ")[::2]):
                        return
                elif line.strip():
                    self._ask(line[1:] if line.startswith("//") else line)
            except UserError as problem:
                self.note(str(problem))

    def note(self, text: str) -> None:
        """A line that is no part of the conversation."""
        self.write(f"{_DIM}{printable(text)}{_PLAIN}\n" if self.coloured else f"{printable(text)}\n")

    def _next_message(self) -> str:
        prompt, parts = "> " if self.interactive else "", list[str]()
        while True:
            part = self.read(prompt)
            parts.append(part.removesuffix("\\"))
            if not part.endswith("\\"):
                return "\n".join(parts)
            prompt = ". " if self.interactive else ""

    def _command(self, name: str, rest: str) -> bool:
        """Carry out a command; returns False for the last one.

        Raises:
            UserError: there is no such command, or it cannot be carried out.
        """
        rest = rest.strip()
        if name not in COMMANDS:
            raise UserError(f"there is no command /{name}; /help lists them, and //{name} is a message")
        if rest and name not in ("system", "set"):
            raise UserError(f"/{name} takes no argument")
        if name == "help":
            self.write(f"{HELP}\n")
        elif name == "reset":
            for conversation in self.conversations:
                conversation.turns.clear()
            self.number = 0
            self.note("a new conversation")
        elif name == "undo":
            self.note(f"forgotten: {self._drop_last()}")
        elif name == "retry":
            self._ask(self._drop_last())
        elif name == "system":
            self._set_system(rest)
        elif name == "set":
            self._set(rest)
        return name != "quit"

    def _drop_last(self) -> str:
        """Forget the last message and its answers; returns the message.

        Raises:
            UserError: there is none.
        """
        if not self.conversations[0].turns:
            raise UserError("there is no message yet")
        return [conversation.turns.pop()[0] for conversation in self.conversations][0]

    def _set_system(self, text: str) -> None:
        """Raises `UserError` if a model has no chat template to render it with."""
        lacking = [model.name for model in self.models if not model.has_template]
        if text and lacking:
            raise UserError(f"{lacking[0]}: its tokenizer has no chat template, so it takes no system message")
        for conversation in self.conversations:
            conversation.system = text
        self.note(f"system message: {text}" if text else "no system message")

    def _set(self, text: str) -> None:
        """Raises `UserError` if there is no such setting or it does not accept the value."""
        name, _, value = text.partition(" ")
        if name and not value:
            raise UserError("/set needs a name and a value, such as: /set temperature 0.7")
        if name:
            self.settings = self.settings.with_values({name: value.strip()})
        self.note("  ".join(f"{name} {value}" for name, value in asdict(self.settings).items()))

    def _ask(self, question: str) -> None:
        """Let every model answer; all or none of the conversations get the message.

        Raises:
            UserError: a model cannot read it.
        """
        answers = []
        try:
            for model, conversation in zip(self.models, self.conversations, strict=True):
                answers.append(self._answer(model, conversation, question))
        except KeyboardInterrupt:  # before the first token of an answer
            self.write("\n")
            self.note("stopped; the message is not part of the conversation")
            return
        self.number += 1
        for conversation, answer in zip(self.conversations, answers, strict=True):
            conversation.turns.append((question, answer))

    def _answer(self, model: ChatModel, conversation: Conversation, question: str) -> str:
        """Write an answer while it is generated; Ctrl-C stops it."""
        if len(self.models) > 1:
            name = printable(model.name)
            self.write(f"{_BOLD}{name}{_PLAIN}\n" if self.coloured else f"{name}:\n")
        parts, note = list[str](), ""
        tokens = model.answer(conversation.messages(question), self.settings, self.number)
        try:
            for token in tokens:
                parts.append(token.text)
                if token.tokens == 1 and token.dropped:
                    reason = "the conversation exceeds the model's positions"
                    note = f"the {token.dropped} oldest exchanges were not read: {reason}"
                if self.interactive:
                    self.write(printable(token.text))
                if token.end == "length":
                    note = f"{note + '; ' if note else ''}cut after {token.tokens} tokens (/set max_tokens N)"
        except KeyboardInterrupt:
            if not parts:
                raise
            note = "stopped"
        answer = "".join(parts)
        self.write("\n" if self.interactive else f"{printable(answer)}\n")
        if note:
            self.note(f"[{note}]")
        return answer
