"""Models to chat with: conversations to prompts, responses as they are generated; and the chat in a
terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.common.paths import shown_path
from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.config.data_flags import DataFlags
from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.data.content_marks import with_places
from dschat_ppo.data.encode import encode_prompt
from dschat_ppo.data.templates import Messages, with_template_flags
from dschat_ppo.errors import UserError, escaped
from dschat_ppo.features import hooks
from dschat_ppo.html_report.run_folder import short_names
from dschat_ppo.models.architectures import first_position
from dschat_ppo.models.given_embeddings import GivenSource
from dschat_ppo.models.lm_kinds import further_kinds
from dschat_ppo.models.loading import (
    AS_SAVED,
    ModelChanges,
    check_causal_lm,
    check_sequence_classifier,
    load_causal_lm,
    load_config,
)
from dschat_ppo.models.model_folders import model_folder
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.models.vocabulary import check_vocabulary
from dschat_ppo.ppo.generation_settings import end_ids
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.self_check import choose_engine
from dschat_ppo.tools.sampling_settings import SamplingSettings
from dschat_ppo.tools.token_stream import GivenPrompt, TextStream, stream_tokens

_CONTEXT = 16  # tokens of a text prompt after which its continuation is decoded


@dataclass(frozen=True)
class CheckedModel:
    """A model folder that can be loaded, and its tokenizer with the chat
    template of the flags. `name` is as the user gave it after `flag`; `label` is short and
    distinguishes it from the others. `is_for_text`: its prompts are text, without the template."""

    name: str
    label: str
    flag: str
    folder: str
    tokenizer: PreTrainedTokenizerBase
    is_for_text: bool = False


def changes_of_tool(features: HasFeatures) -> ModelChanges:
    """What the flags of a tool change in the models that it loads."""
    return ModelChanges(kinds=further_kinds(features))


def checked_models(
    names: Sequence[tuple[str, str]],
    data: DataFlags | None,
    is_scorer: bool = False,
    features: HasFeatures | None = None,
) -> list[CheckedModel]:
    """Check language models, or reward models, without reading their weights. A feature offers
    `checks.check_answering_model(features, configuration of the model, its flag and folder)`, which
    raises `UserError`.

    Args:
        names: the flag that names each model, and its folder or hub name.
        data: gives the chat template; None: it is the tokenizer's.
        is_scorer: whether they are reward models.
        features: the flags of the tool whose models answer, or score what is answered; None: the
            models are of text, and no feature checks them.
    """
    changes = AS_SAVED
    if features is not None:
        changes = changes_of_tool(features)
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
            check_sequence_classifier(folder, False, changes)
        else:
            check_causal_lm(folder, changes)
        if features is not None and not is_scorer:
            for check_answering_model in hooks("checks.check_answering_model"):
                check_answering_model(features, config, f"{flag} {folder}")
        models.append(CheckedModel(name, label, flag, folder, tokenizer))
    return models


@dataclass(frozen=True)
class StreamedToken:
    """One token of a response: the text that it completes, perhaps "". The `note` of the last one
    says whether a limit cut the response. An `aside` is no part of the response."""

    text: str
    note: str = ""
    token_id: int = -1
    aside: str = ""


class ChatModel:
    """A loaded model that answers conversations, one at a time. `NonFiniteError` if its log-probs
    are not finite, `UserError` if generation does not support the architecture."""

    def __init__(
        self,
        checked: CheckedModel,
        dtype: str,
        changes: ModelChanges = AS_SAVED,
        source: GivenSource | None = None,
    ):
        """Load the model.

        Args:
            checked: its folder and tokenizer.
            dtype: of its weights, "bf16", "fp16" or "fp32".
            changes: what it has otherwise than its folder.
            source: of what it gets in place of the embeddings of some ids.
        """
        self.name = checked.label
        self.path = shown_path(checked.name)
        self.tokenizer = checked.tokenizer
        # otherwise texts are joined as they are
        self.has_template = checked.tokenizer.chat_template is not None and not checked.is_for_text
        self.tools: list[dict[str, Any]] = []  # JSON schemas for the chat template
        model: Any = load_causal_lm(checked.folder, dtype, None, changes)
        self.model: PreTrainedModel = model.to(dist.device()).eval()
        banned_ids: tuple[int, ...] = ()
        if source is not None:
            banned_ids = source.banned_ids
        stopping = StoppingCriteria(1, banned_ids=banned_ids)
        config = GenerationConfig(SamplingParameters(), stopping, prepack=False, engine="padded")
        try:
            engine = choose_engine(self.model, config, source=source).engine
        except UserError as problem:
            raise UserError(f"{checked.flag} {checked.name}: {problem}") from None
        if engine != config.engine:
            raise UserError(
                f"{checked.flag} {checked.name}: this model has no cache that a chat can use"
            )
        text_config = self.model.config.get_text_config()
        self.positions: int | None = None  # any number
        embeddings = getattr(text_config, "max_position_embeddings", None)
        if embeddings is not None:
            self.positions = int(embeddings) - first_position(self.model.config)
        self.ends = end_ids(self.tokenizer, self.model)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """The tokens of a conversation, after which the model responds."""
        if self.has_template:
            return encode_prompt(self.tokenizer, messages, self.tools or None)
        if any(message["role"] == "system" for message in messages):
            raise UserError(
                f"{self.name}: its messages have no chat template, so it takes no system message;"
                " name a template with --chat_template, and omit --apply_chat_template False"
            )
        return encode_prompt(self.tokenizer, "".join(message["content"] for message in messages))

    def respond(
        self, messages: Messages, settings: SamplingSettings, response_index: int
    ) -> Iterator[StreamedToken]:
        """Respond to a conversation, whose last message is the user's. To stop early, abandon the
        iterator. Responses of one seed with different indices are independent. A `UserError` comes
        before the first token."""
        prompt_ids = self.prompt_ids(messages)
        yield from self.draw_tokens(prompt_ids, settings, settings.max_tokens, response_index)

    def tokens_that_fit(self, ids: Sequence[int], max_tokens: int) -> int:
        """How many of `max_tokens` fit into the model's positions after `ids`."""
        if self.positions is None:
            return max_tokens
        return min(max_tokens, self.positions - len(ids))

    def draw_tokens(
        self,
        ids: list[int],
        settings: SamplingSettings,
        max_tokens: int,
        *seed_path: int,
        given_prompt: GivenPrompt | None = None,
    ) -> Iterator[StreamedToken]:
        """Draw at most `max_tokens` after `ids`. The seed is that of the settings for `seed_path`,
        numbers that distinguish what a chat draws. `given_prompt`: in place of the embeddings of
        some ids."""
        if not ids:
            raise UserError(f"{self.name}: the message has no tokens; write something")
        max_tokens = self.tokens_that_fit(ids, max_tokens)
        if max_tokens < 1:
            raise UserError(
                f"{self.name}: the conversation has {len(ids)} tokens, but the model has"
                f" {self.positions} positions; begin a new one, or shorten the message"
            )
        first, *rest = seed_path
        seed = int(row_seeds(first, 1, settings.seed, *rest))
        context: list[int] = []
        if not self.has_template:
            context = ids[-_CONTEXT:]
        stream = TextStream(self.tokenizer, context)
        drawn_ids = stream_tokens(
            self.model, ids, seed, settings.sampling, self.ends, max_tokens, given_prompt
        )
        for count, token_id in enumerate(drawn_ids, 1):
            if token_id in self.ends:  # a text end need not be a special token
                yield StreamedToken(stream.rest(), "", token_id)
            elif count == max_tokens:
                text = stream.add(token_id) + stream.rest()
                yield StreamedToken(text, f"cut after {count} tokens", token_id)
            else:
                yield StreamedToken(stream.add(token_id), "", token_id)


def conversation(system: str, exchanges: Sequence[tuple[str, str]], message: str) -> Messages:
    """A conversation of (message, response) exchanges, with a new message of the user."""
    messages: Messages = []
    if system:
        messages.append({"role": "system", "content": system})
    for earlier_message, response in exchanges:
        messages.append({"role": "user", "content": earlier_message})
        messages.append({"role": "assistant", "content": response})
    messages.append({"role": "user", "content": message})
    return messages


@dataclass(frozen=True)
class ChatCommand:
    """A command of the terminal that a feature adds. It puts something before the next message."""

    name: str
    usage: str  # its line in /help
    # argument -> (text before the next message, a note for the person); `UserError` if it cannot be
    run: Callable[[str], tuple[str, str]]


HELP = """\
/help              show these commands
/reset             forget the conversation, and draw the same random numbers again
/undo              forget the last message and its answers
/retry             answer the last message again, with other random numbers
/system [TEXT]     set the system message of the whole conversation; without TEXT, remove it
/set [NAME VALUE]  change a sampling setting; without NAME, show all of them
{of_features}/quit              end the chat (or Ctrl-D); Ctrl-C stops an answer
A line that ends with \\ continues on the next one. To send a message that starts with /, start it
with //."""


def print_note(text: str) -> None:
    """Print a line that is no part of the conversation. With control characters a model could
    control the terminal."""
    line = escaped(text)
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        line = f"\x1b[2m{line}\x1b[0m"  # dim
    print(line, flush=True)


class Terminal:
    """A chat in the terminal. Each model responds to every message and has its own conversation. If
    `interactive`, prompts are written, and responses as they are generated; otherwise responses are
    written whole."""

    def __init__(
        self,
        models: Sequence[ChatModel],
        settings: SamplingSettings,
        system: str,
        interactive: bool,
        further_commands: Sequence[ChatCommand] = (),
    ):
        self.models = models
        self.further_commands = {command.name: command for command in further_commands}
        usages = "".join(f"{command.usage}\n" for command in further_commands)
        self.help = HELP.format(of_features=usages)
        self.begun_message = ""  # what commands have put before the next message
        self.settings = settings
        self.system = system
        self.interactive = interactive
        # (message, response) of each model
        self.exchanges: list[list[tuple[str, str]]] = [[] for _ in models]
        self.response_index = 0  # of the next response, for its seed

    def run(self) -> None:
        """Read messages and commands until the end of the input or /quit."""
        if self.interactive:
            for model in self.models:
                remark = ""
                if not model.has_template:
                    remark = "  (no chat template: the model continues the text)"
                print_note(f"{model.name}  {model.path}{remark}")
            print_note("/help lists the commands, Ctrl-D ends the chat")
        while True:
            try:
                line = self._read_line("> ")
                while line.endswith("\\"):
                    line = f"{line[:-1]}\n{self._read_line('. ')}"
            except (EOFError, KeyboardInterrupt):
                if self.interactive:
                    print()
                return
            try:
                if line.rstrip() == "/quit":
                    return
                if line.startswith("/") and not line.startswith("//"):
                    name, _, argument = line[1:].partition(" ")
                    self.command(name, argument.strip())
                elif line.strip():
                    if self.ask(self.begun_message + line.removeprefix("/")):
                        self.begun_message = ""
            except UserError as problem:
                print_note(str(problem))

    def _read_line(self, prompt: str) -> str:
        if self.interactive:
            return input(prompt)
        return input("")

    def command(self, name: str, argument: str) -> None:
        """Carry out a command; raises `UserError` if it cannot be."""
        if name == "system":
            if argument and not all(model.has_template for model in self.models):
                raise UserError("a model has no chat template here, so it takes no system message")
            self.system = argument
            if argument:
                print_note(f"system message: {argument}")
            else:
                print_note("no system message")
        elif name == "set":
            self._change_setting(argument)
        elif name in self.further_commands:
            text, note = self.further_commands[name].run(argument)
            self.begun_message += text
            print_note(note)
        elif f"/{name} " not in self.help:
            raise UserError(
                f"there is no command /{name}; /help lists them, and //{name} is a message"
            )
        elif argument:
            raise UserError(f"/{name} takes no argument")
        elif name == "help":
            print(self.help, flush=True)
        elif name == "reset":
            self.exchanges = [[] for _ in self.models]
            self.response_index = 0
            self.begun_message = ""
            print_note("a new conversation")
        elif name == "undo" and self.begun_message:
            print_note(f"forgotten: {with_places(self.begun_message)}")
            self.begun_message = ""
        elif not self.exchanges[0]:
            raise UserError("there is no message yet")
        else:  # undo or retry
            message, _ = self.exchanges[0][-1]
            for exchanges in self.exchanges:
                exchanges.pop()
            if name == "retry":
                self.ask(message)
            else:
                print_note(f"forgotten: {with_places(message)}")

    def _change_setting(self, argument: str) -> None:
        """Change a sampling setting, "NAME VALUE", and show all of them."""
        setting, _, value = argument.partition(" ")
        if setting and not value:
            raise UserError("/set needs a name and a value, such as: /set temperature 0.7")
        if setting:
            self.settings = self.settings.with_values({setting: value.strip()})
        settings = asdict(self.settings).items()
        print_note("  ".join(f"{setting} {value}" for setting, value in settings))

    def ask(self, message: str) -> bool:
        """Let every model respond; all or none of the conversations get the message. Returns
        whether they did."""
        responses = []
        try:
            for model, exchanges in zip(self.models, self.exchanges, strict=True):
                if len(self.models) > 1:
                    print(f"{escaped(model.name)}:", flush=True)
                messages = conversation(self.system, exchanges, message)
                responses.append(self.write_response(model, messages))
        except KeyboardInterrupt:  # before the first token of a response
            print_note("\nstopped; the message is not part of the conversation")
            return False
        self.response_index += 1
        for exchanges, response in zip(self.exchanges, responses, strict=True):
            exchanges.append((message, response))
        return True

    def write_response(self, model: ChatModel, messages: Messages) -> str:
        """Write a response while it is generated; Ctrl-C stops it."""
        response = line = remark = ""
        try:
            for token in model.respond(messages, self.settings, self.response_index):
                response += token.text
                line += token.text
                remark = token.note
                if self.interactive:
                    print(escaped(token.text), end="", flush=True)
                if token.aside:
                    if line:
                        self._end_line(line)
                    print_note(token.aside)
                    line = ""
        except KeyboardInterrupt:
            if not response:
                raise
            remark = "stopped"
        if line or not response:
            self._end_line(line)
        if remark:
            print_note(f"[{remark}]")
        return response

    def _end_line(self, line: str) -> None:
        """End a line of a response; an interactive terminal has its text already."""
        if self.interactive:
            line = ""
        print(escaped(line), flush=True)
