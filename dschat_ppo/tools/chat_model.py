"""Models to chat with: conversations to prompts, answers as they are generated; and the chat in a
terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.paths import shown_path
from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.data.templates import Messages, with_template_flags
from dschat_ppo.errors import UserError, escaped
from dschat_ppo.html_report.run_folder import short_names
from dschat_ppo.models.architectures import first_position
from dschat_ppo.models.loading import (
    check_causal_lm,
    check_sequence_classifier,
    load_causal_lm,
    load_config,
)
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.vocabulary import check_vocabulary
from dschat_ppo.ppo.generation_settings import end_ids
from dschat_ppo.rollout.generator import GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.self_check import choose_engine
from dschat_ppo.tools.sampling_settings import SamplingSettings
from dschat_ppo.tools.token_stream import TextStream, stream_tokens

_CONTEXT = 16  # tokens of a text prompt before which its answer is decoded


@dataclass(frozen=True)
class CheckedModel:
    """A model folder, or adapter folder, that can be loaded, and its tokenizer with the chat
    template of the flags. `name` is as the user gave it after `flag`; `label` is short and
    distinguishes it from the others. `is_for_text`: its prompts are text, without the template."""

    name: str
    label: str
    flag: str
    folder: str
    tokenizer: PreTrainedTokenizerBase
    is_for_text: bool = False


def checked_models(
    names: Sequence[tuple[str, str]], data: DataFlags | None, is_scorer: bool = False
) -> list[CheckedModel]:
    """Check language models, or reward models, without reading their weights. `names` holds the
    flag that names each model, and its folder or hub name; `data` gives the chat template, None for
    the tokenizer's."""
    models = []
    labels = short_names([Path(name) for _, name in names])
    for (flag, name), label in zip(names, labels, strict=True):
        folder = model_folder(name, flag)
        config = load_config(folder, flag)
        tokenizer = load_tokenizer(folder, flag)
        if data is not None:
            tokenizer = with_template_flags(tokenizer, data)
        check_vocabulary(tokenizer, config, flag, folder)
        if is_scorer:
            check_sequence_classifier(folder, new_head=False)
        else:
            check_causal_lm(folder)
        models.append(CheckedModel(name, label, flag, folder, tokenizer))
    return models


@dataclass(frozen=True)
class Token:
    """One token of an answer: the text that it completes, perhaps "". The `note` of the last one
    says whether a limit cut the answer. An `aside` is no part of the answer."""

    text: str
    note: str
    number: int = -1  # its id
    aside: str = ""


class ChatModel:
    """A loaded model that answers conversations, one at a time. `NonFiniteError` if its log-probs
    are not finite, `UserError` if generation does not support the architecture."""

    def __init__(self, checked: CheckedModel, dtype: str):
        self.name = checked.label
        self.path = shown_path(checked.name)
        self.tokenizer = checked.tokenizer
        # otherwise texts are joined as they are
        self.has_template = checked.tokenizer.chat_template is not None and not checked.is_for_text
        self.tools: list[dict[str, Any]] = []  # JSON schemas for the chat template
        model: Any = load_causal_lm(checked.folder, dtype, None)
        self.model: PreTrainedModel = model.to(dist.device()).eval()
        config = GenerationConfig(
            SamplingParameters(), StoppingCriteria(1), prepack=False, engine="padded"
        )
        try:
            engine = choose_engine(self.model, config).engine
        except UserError as problem:
            raise UserError(f"{checked.flag} {checked.name}: {problem}") from None
        if engine != config.engine:
            raise UserError(
                f"{checked.flag} {checked.name}: this model has no cache that a chat can use"
            )
        known = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.positions = None if known is None else int(known) - first_position(self.model.config)
        self.ends = end_ids(self.tokenizer, self.model)

    def prompt_ids(self, messages: Messages) -> list[int]:
        if self.has_template:
            return encode_prompt(self.tokenizer, messages, self.tools or None)
        if any(message["role"] == "system" for message in messages):
            raise UserError(
                f"{self.name}: its messages have no chat template, so it takes no system message;"
                " name a template with --chat_template, and omit --apply_chat_template False"
            )
        return encode_prompt(self.tokenizer, "".join(message["content"] for message in messages))

    def answer(
        self, messages: Messages, settings: SamplingSettings, number: int
    ) -> Iterator[Token]:
        """Answer a conversation, whose last message is the user's. To stop early, abandon the
        iterator. Answers of one seed with different numbers are independent. A `UserError` comes
        before the first token."""
        yield from self.continued(self.prompt_ids(messages), settings, settings.max_tokens, number)

    def room(self, ids: Sequence[int], most: int) -> int:
        """How many of `most` tokens fit after `ids`."""
        if self.positions is None:
            return most
        return min(most, self.positions - len(ids))

    def continued(
        self, ids: list[int], settings: SamplingSettings, most: int, *path: int
    ) -> Iterator[Token]:
        """Draw at most `most` tokens after `ids`, by a seed that `path` numbers."""
        if not ids:
            raise UserError(f"{self.name}: the message has no tokens; write something")
        most = self.room(ids, most)
        if most < 1:
            raise UserError(
                f"{self.name}: the conversation has {len(ids)} tokens, but the model has"
                f" {self.positions} positions; begin a new one, or shorten the message"
            )
        seed = int(row_seeds(path[0], 1, settings.seed, *path[1:]))
        stream = TextStream(self.tokenizer, () if self.has_template else ids[-_CONTEXT:])
        drawn = stream_tokens(self.model, ids, seed, settings.sampling, self.ends, most)
        for tokens, token in enumerate(drawn, 1):
            if token in self.ends:  # a text end need not be a special token
                yield Token(stream.rest(), "", token)
            elif tokens == most:
                yield Token(stream.add(token) + stream.rest(), f"cut after {tokens} tokens", token)
            else:
                yield Token(stream.add(token), "", token)


def conversation(system: str, turns: Sequence[tuple[str, str]], message: str) -> Messages:
    """A conversation, (message, answer) each, with a new message of the user."""
    messages: Messages = []
    if system:
        messages.append({"role": "system", "content": system})
    for asked, answered in turns:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    messages.append({"role": "user", "content": message})
    return messages


HELP = """\
/help              show these commands
/reset             forget the conversation, and draw the same random numbers again
/undo              forget the last message and its answers
/retry             answer the last message again, with other random numbers
/system [TEXT]     set the system message of the whole conversation; without TEXT, remove it
/set [NAME VALUE]  change a sampling setting; without NAME, show all of them
/quit              end the chat (or Ctrl-D); Ctrl-C stops an answer
A line that ends with \\ continues on the next one. To send a message that starts with /, start it
with //."""


def note(text: str) -> None:
    """A line that is no part of the conversation. With control characters a model could control the
    terminal."""
    dim = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(f"\x1b[2m{escaped(text)}\x1b[0m" if dim else escaped(text), flush=True)


class Terminal:
    """A chat in the terminal. Each model answers every message and has its own conversation. If
    `interactive`, prompts are written, and answers as they are generated; otherwise answers are
    written whole."""

    def __init__(
        self,
        models: Sequence[ChatModel],
        settings: SamplingSettings,
        system: str,
        interactive: bool,
    ):
        self.models = models
        self.settings = settings
        self.system = system
        self.interactive = interactive
        # (message, answer) of each model
        self.turns: list[list[tuple[str, str]]] = [[] for _ in models]
        self.number = 0  # of the next answer, for its seed

    def run(self) -> None:
        """Read messages and commands until the end of the input or /quit."""
        if self.interactive:
            for model in self.models:
                if model.has_template:
                    how = ""
                else:
                    how = "  (no chat template: the model continues the text)"
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
                raise UserError("a model has no chat template here, so it takes no system message")
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
            raise UserError(
                f"there is no command /{name}; /help lists them, and //{name} is a message"
            )
        elif rest:
            raise UserError(f"/{name} takes no argument")
        elif name == "help":
            print(HELP, flush=True)
        elif name == "reset":
            self.turns = [[] for _ in self.models]
            self.number = 0
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
                    print(f"{escaped(model.name)}:", flush=True)
                answers.append(self.answer(model, conversation(self.system, turns, message)))
        except KeyboardInterrupt:  # before the first token of an answer
            note("\nstopped; the message is not part of the conversation")
            return
        self.number += 1
        for turns, answer in zip(self.turns, answers, strict=True):
            turns.append((message, answer))

    def answer(self, model: ChatModel, messages: Messages) -> str:
        """Write an answer while it is generated; Ctrl-C stops it."""
        answer = line = remark = ""
        try:
            for token in model.answer(messages, self.settings, self.number):
                answer = answer + token.text
                line = line + token.text
                remark = token.note
                if self.interactive:
                    print(escaped(token.text), end="", flush=True)
                if token.aside:
                    if line:
                        print("" if self.interactive else escaped(line), flush=True)
                    note(token.aside)
                    line = ""
        except KeyboardInterrupt:
            if not answer:
                raise
            remark = "stopped"
        if line or not answer:
            print("" if self.interactive else escaped(line), flush=True)
        if remark:
            note(f"[{remark}]")
        return answer
