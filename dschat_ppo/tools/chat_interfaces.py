"""The chat in a terminal, and as a page of gradio for the browser of this machine, which loads nothing from the network
and sends nothing to it."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from itertools import chain, zip_longest
from typing import Any

from dschat_ppo.common.logging import print_line
from dschat_ppo.data.templates import Messages
from dschat_ppo.errors import UserError
from dschat_ppo.tools.chat_model import ChatModel, conversation
from dschat_ppo.tools.sampling_settings import RANGES, SamplingSettings
from dschat_ppo.tools.web_server import refuse_web_sites, serve_until_stopped

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


# gradio's scripts and styles are inline in part; "self" keeps the page from everything that is not this server
_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'; form-action 'none'"
_FONTS = ["system-ui", "sans-serif"]  # of the system
_STYLE = """
.message-content span { white-space: pre-wrap }
@media (max-width: 700px) { .chat { height: 38vh !important } }
"""  # answers are texts, not Markdown; two models fit a phone
Turns = list[list[tuple[str, str]]]  # (message, answer) of each model


def page(models: Sequence[ChatModel], settings: SamplingSettings, system: str) -> Any:
    """An ASGI application with the page: the conversations side by side, and the settings."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import
    import gradio as gr
    from fastapi import FastAPI

    def shown(message: Any, number: int, turns: Turns, remark: str = "") -> tuple[Any, ...]:
        """The values of `outputs`."""
        return message, number, turns, gr.Textbox(remark, visible=bool(remark)), *map(_messages, turns)

    def ask(message: str, number: int, turns: Turns, system: str, *values: float) -> Iterator[tuple[Any, ...]]:
        """Let all models answer, a token of each at a time."""
        if not message.strip():
            yield shown(message, number, turns)
            return
        stop.clear()
        answers, remarks = [""] * len(models), [""] * len(models)
        try:
            chosen = settings.with_values(dict(zip(RANGES, values, strict=True)))
            prompts = [conversation(system, old, message) for old in turns]
            streams = [model.answer(prompt, chosen, number) for model, prompt in zip(models, prompts, strict=True)]
            for tokens in chain([()], zip_longest(*streams)):  # first the message alone
                for place, token in enumerate(tokens):
                    if token is not None:
                        answers[place] += token.text
                        remarks[place] = f"{models[place].name}: {token.note}" if token.note else ""
                new = [[*old, (message, answer)] for old, answer in zip(turns, answers, strict=True)]
                typed = gr.skip() if tokens else ""  # the next message can be written meanwhile
                yield shown(typed, number + 1, new, "\n".join(filter(None, remarks)))
                if stop.is_set():
                    return
        except UserError as problem:  # no conversation has the message, and it can be edited
            gr.Warning(escape(str(problem)))
            yield shown(message, number, turns)

    def retry(_: str, number: int, turns: Turns, *others: Any) -> Iterator[tuple[Any, ...]]:
        """Answer the last message again, with other random numbers."""
        yield from ask(turns[0][-1][0], number, [old[:-1] for old in turns], *others)

    def undo(number: int, turns: Turns) -> tuple[Any, ...]:
        """Forget the last message and its answers; the message can be edited."""
        return shown(turns[0][-1][0], number, [old[:-1] for old in turns])

    stop = threading.Event()  # the models answer one message at a time
    nothing: Turns = [[] for _ in models]
    with gr.Blocks(title="Chat", analytics_enabled=False) as blocks:
        number, turns = gr.State(0), gr.State(nothing)
        with gr.Row():
            chats = [
                gr.Chatbot(
                    label=model.name, render_markdown=False, line_breaks=False, buttons=[], feedback_options=None,
                    height="65vh", min_width=320, elem_classes="chat",
                )
                for model in models
            ]  # fmt: skip
        remarks = gr.Textbox(label="note", visible=False, interactive=False)
        message = gr.Textbox(
            label="message", show_label=False, placeholder="Message (Enter sends, Shift+Enter starts a new line)",
            autofocus=True, submit_btn=True, stop_btn=True,
        )  # fmt: skip
        with gr.Accordion("Settings", open=False):
            fields: list[Any] = [
                gr.Textbox(system, label="system message", visible=all(model.has_template for model in models))
            ]
            with gr.Row():
                for name, value in asdict(settings).items():
                    kind, least, most, what = RANGES[name]
                    whole = 0 if kind is int else None
                    fields.append(gr.Number(value, label=name, info=what, minimum=least, maximum=most, precision=whole))
        outputs = [message, number, turns, remarks, *chats]
        inputs = [message, number, turns, *fields]
        # one event at a time, so that an answer in progress does not undo what follows it
        answering: dict[str, Any] = {"concurrency_id": "models", "show_progress": "hidden"}
        message.submit(ask, inputs, outputs, **answering)
        message.stop(stop.set, queue=False)
        for chat in chats:
            chat.retry(retry, inputs, outputs, **answering)
            chat.undo(undo, [number, turns], outputs, **answering)
            chat.clear(lambda: shown("", 0, nothing), None, outputs, **answering)
    app = gr.mount_gradio_app(
        FastAPI(openapi_url=None), blocks, "/", footer_links=[], run_history=False, ssr_mode=False, css=_STYLE,
        theme=gr.themes.Default(font=_FONTS),
    )  # fmt: skip

    refuse_web_sites(app, "127.0.0.1")

    @app.middleware("http")
    async def with_policy(request: Any, call_next: Any) -> Any:
        reply = await call_next(request)
        reply.headers["content-security-policy"] = _POLICY
        return reply

    return app


def _messages(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """A conversation for gradio, which takes texts for HTML and would change the indentation of lines."""
    return [
        {"role": role, "content": escape(text, quote=False).replace("\n", "<br>")}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def serve(models: Sequence[ChatModel], settings: SamplingSettings, system: str, listening: socket.socket) -> None:
    """Serve the page until SIGINT or SIGTERM."""
    for model in models:
        model.prompt_ids(conversation(system, [], "Hello"))  # a template that refuses messages is told at the start
    host, port = listening.getsockname()[:2]
    app = page(models, settings, system)
    print_line(f"open http://{host}:{port}/ in a browser on this machine; Ctrl-C ends")
    # an open page holds a connection, whose end uvicorn would log with a traceback; gradio prints those of its events
    serve_until_stopped(app, listening, timeout_graceful_shutdown=1, log_level="critical")
