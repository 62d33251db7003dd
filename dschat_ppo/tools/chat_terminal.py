"""The chat in a terminal: messages, answers as they are generated, and commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from dschat_ppo.data.templates import Messages
from dschat_ppo.errors import UserError
from dschat_ppo.tools.chat_model import ChatModel, conversation
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


def printable(text: str) -> str:
    """`text` without control characters, with which a model could control the terminal; line breaks and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


def note(text: str) -> None:
    """A line that is no part of the conversation."""
    dim = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(f"\x1b[2m{printable(text)}\x1b[0m" if dim else printable(text), flush=True)


class Terminal:
    """A chat in the terminal. Each model answers every message and has its own conversation. If `interactive`, prompts
    are written, and answers as they are generated; otherwise answers are written whole."""

    def __init__(self, models: Sequence[ChatModel], settings: SamplingSettings, system: str, interactive: bool):
        self.models = models
        self.settings = settings
        self.system = system
        self.interactive = interactive
        self.turns: list[list[tuple[str, str]]] = [[] for _ in models]  # (message, answer) of each model
        self.number = 0  # of the next answer, for its seed

    def run(self) -> None:
        """Read messages and commands until the end of the input or /quit."""
        if self.interactive:
            for model in self.models:
                how = "" if model.has_template else "  (no chat template: the model continues the text)"
                note(f"{model.name}  {model.path}{how}")
            note("/help lists the commands, Ctrl-D ends the chat")
        while True:
            try:
                line = input("> " if self.interactive else "")
                while line.endswith("\\"):
                    line = f"{line[:-1]}\n" + input(". " if self.interactive else "")
            except (EOFError, KeyboardInterrupt):
                print(end="\n" if self.interactive else "")
                return
            try:
                if line.rstrip() == "/quit":
                    return
                if line.startswith("/") and not line.startswith("//"):
                    self.command(*line[1:].partition(" ")[::2])
                elif line.strip():
                    self.ask(line.removeprefix("/"))
            except UserError as problem:
                note(str(problem))

    def command(self, name: str, rest: str) -> None:
        """Carry out a command; raises `UserError` if it cannot be."""
        rest = rest.strip()
        if name == "system":
            if rest and not all(model.has_template for model in self.models):
                raise UserError("a tokenizer has no chat template, so its model takes no system message")
            self.system = rest
            note(f"system message: {rest}" if rest else "no system message")
        elif name == "set":
            setting, _, value = rest.partition(" ")
            if setting and not value:
                raise UserError("/set needs a name and a value, such as: /set temperature 0.7")
            if setting:
                self.settings = self.settings.with_values({setting: value.strip()})
            note("  ".join(f"{each} {number}" for each, number in asdict(self.settings).items()))
        elif f"/{name} " not in HELP:
            raise UserError(f"there is no command /{name}; /help lists them, and //{name} is a message")
        elif rest:
            raise UserError(f"/{name} takes no argument")
        elif name == "help":
            print(HELP, flush=True)
        elif name == "reset":
            self.turns, self.number = [[] for _ in self.models], 0
            note("a new conversation")
        elif not self.turns[0]:
            raise UserError("there is no message yet")
        else:  # undo or retry
            [message, *_] = [turns.pop()[0] for turns in self.turns]
            if name == "retry":
                self.ask(message)
            else:
                note(f"forgotten: {message}")

    def ask(self, message: str) -> None:
        """Let every model answer; all or none of the conversations get the message."""
        answers = []
        try:
            for model, turns in zip(self.models, self.turns, strict=True):
                if len(self.models) > 1:
                    print(f"{printable(model.name)}:", flush=True)
                answers.append(self.answer(model, conversation(self.system, turns, message)))
        except KeyboardInterrupt:  # before the first token of an answer
            note("\nstopped; the message is not part of the conversation")
            return
        self.number += 1
        for turns, answer in zip(self.turns, answers, strict=True):
            turns.append((message, answer))

    def answer(self, model: ChatModel, messages: Messages) -> str:
        """Write an answer while it is generated; Ctrl-C stops it."""
        answer = remark = ""
        try:
            for token in model.answer(messages, self.settings, self.number):
                answer, remark = answer + token.text, token.note
                if self.interactive:
                    print(printable(token.text), end="", flush=True)
        except KeyboardInterrupt:
            if not answer:
                raise
            remark = "stopped"
        print("" if self.interactive else printable(answer), flush=True)
        if remark:
            note(f"[{remark}]")
        return answer
