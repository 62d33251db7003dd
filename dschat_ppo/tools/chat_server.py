"""The chat as a page: an HTTP server on the loopback interface of this machine.

GET / is the page; GET /info describes models and settings. POST /answer takes
`{"model": 0, "messages": [{"role": "user", "content": text}, ...], "settings": {name: number}, "number": 0}` and
replies with lines of JSON while the model answers: `{"text": ...}`, and at the end `{"end": "eos" or "length", ...}` or
`{"error": reason}`. The page keeps the conversation. If it disconnects, the answer stops.

Other web sites that the user visits cannot use the server: a request must name this machine as its host, which a
rebound DNS name does not, and come from the page itself.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from typing import Any

from dschat_ppo.common.logging import print_line
from dschat_ppo.data.templates import Messages
from dschat_ppo.errors import UserError
from dschat_ppo.tools.chat_model import ChatModel
from dschat_ppo.tools.http_requests import (
    OWN_NAMES,
    BodyBudget,
    LimitedServer,
    RejectedError,
    check_origin,
    limit_request,
    received_body,
)
from dschat_ppo.tools.sampling_settings import RANGES, SamplingSettings

HOST = "127.0.0.1"
PAGE = {
    "/": ("chat.html", "text/html; charset=utf-8"),
    "/chat.css": ("chat.css", "text/css; charset=utf-8"),
    "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
}
MOST_BYTES = 2**20  # of a request
MOST_NUMBER = 2**31 - 1  # of an answer
ROLES = ("system", "user", "assistant")
MOST_CLIENTS = 64
_SECONDS_FOR_A_REQUEST = 30.0
_SECONDS_FOR_A_LINE = 10.0  # until a page that does not read its answer loses it
_SECONDS_TO_WAIT = 2.0  # for an answer that its page has stopped
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # noqa: E501


@dataclass(frozen=True)
class Question:
    """A valid request for an answer."""

    model: int
    messages: Messages
    settings: SamplingSettings
    number: int


def read_question(body: bytes | bytearray, models: int, settings: SamplingSettings) -> Question:
    """Read the body of POST /answer.

    Args:
        body: JSON.
        models: how many there are.
        settings: where the request names none.

    Raises:
        RejectedError: it is not as the module describes.
    """
    try:
        asked = json.loads(body)
        json.dumps(asked, ensure_ascii=False).encode()  # JSON can hold half a surrogate pair
    except (ValueError, RecursionError) as problem:
        raise RejectedError(400, f"the body is not JSON: {problem}") from None
    if not isinstance(asked, dict):
        raise RejectedError(400, "the body must be an object")
    for name, most in (("model", models - 1), ("number", MOST_NUMBER)):
        if type(asked.get(name, 0)) is not int or not 0 <= asked.get(name, 0) <= most:
            raise RejectedError(400, f'"{name}" must be an integer from 0 to {most}')
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise RejectedError(400, '"messages" must be a list of {"role": "user", "content": text}')
    roles = [message["role"] for message in messages]
    expected = ["user" if place % 2 == 0 else "assistant" for place in range(len(roles))]
    if roles[-1] != "user" or (roles[1:] if roles[0] == "system" else roles) not in (expected, expected[:-1]):
        raise RejectedError(
            400, "after an optional system message, user and assistant must alternate; the user is last"
        )
    values = asked.get("settings", {})
    if not isinstance(values, dict):
        raise RejectedError(400, '"settings" must be an object')
    try:
        settings = settings.with_values(values)
    except UserError as problem:
        raise RejectedError(400, str(problem)) from None
    return Question(asked.get("model", 0), messages, settings, asked.get("number", 0))


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in ROLES
        and isinstance(value["content"], str)
    )


class ChatServer(LimitedServer):
    """One thread for each request; closing does not wait for answers."""

    daemon_threads = True

    def __init__(self, port: int, models: Sequence[ChatModel], settings: SamplingSettings, system: str):
        super().__init__((HOST, port), Handler, MOST_CLIENTS)
        self.budget = BodyBudget(MOST_BYTES)
        self.models = models
        self.settings = settings
        self.info = {
            "models": [{"name": one.name, "path": one.path, "has_template": one.has_template} for one in models],
            "system": system,
            "settings": [
                {"name": name, "value": value, "least": RANGES[name].least, "most": RANGES[name].most,
                 "integer": RANGES[name].kind is int, "help": RANGES[name].help}
                for name, value in asdict(settings).items()
            ],
        }  # fmt: skip

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken connection in one line, without a traceback."""
        print_line(f"a request failed: {sys.exc_info()[1]!r}")


class Handler(BaseHTTPRequestHandler):
    """The requests of the page; one for each connection."""

    server: ChatServer

    def setup(self) -> None:
        """Limit the time in which the request must arrive."""
        super().setup()
        self.reader = limit_request(self, _SECONDS_FOR_A_REQUEST)

    def do_GET(self) -> None:  # noqa: N802
        """The page, its style and script, and GET /info."""
        try:
            check_origin(self.headers, OWN_NAMES)
            if self.path == "/info":
                self._reply(200, json.dumps(self.server.info).encode())
            elif self.path in PAGE:
                name, kind = PAGE[self.path]
                self._reply(200, (files("dschat_ppo.tools") / "web" / name).read_bytes(), kind)
            else:
                raise RejectedError(404, f"there is no {self.path}")
        except RejectedError as problem:
            self._refuse(problem)

    def do_POST(self) -> None:  # noqa: N802
        """POST /answer."""
        try:
            check_origin(self.headers, OWN_NAMES)
            if self.path != "/answer":
                raise RejectedError(404, f"there is no {self.path}")
            with received_body(self.headers, self.rfile, self.reader, self.server.budget) as body:
                question = read_question(body, len(self.server.models), self.server.settings)
            model = self.server.models[question.model]
            if not model.lock.acquire(timeout=_SECONDS_TO_WAIT):
                raise RejectedError(409, f"{model.name} is answering another message; stop that one first")
        except RejectedError as problem:
            self._refuse(problem)
            return
        try:
            self._answer(model, question)
        finally:
            model.lock.release()

    def _answer(self, model: ChatModel, question: Question) -> None:
        """Send an answer while it is generated, until its end or until the page disconnects."""
        self._head(200, "application/x-ndjson")
        try:
            for token in model.answer(question.messages, question.settings, question.number):
                if self._is_gone():
                    return
                if token.text:
                    self._line({"text": token.text})
                if token.end:
                    self._line({name: value for name, value in asdict(token).items() if name != "text"})
        except UserError as problem:
            self._line({"error": str(problem)})
        except OSError:  # the page is gone
            return
        except RuntimeError as problem:  # torch raises it when out of memory
            print_line(f"an answer of {model.name} failed: {problem}")
            self._line({"error": "the model failed; the terminal says why"})

    def _is_gone(self) -> bool:
        """Whether the page has closed the connection; writing would notice only later."""
        try:
            readable = select.select([self.connection], [], [], 0)[0]
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _head(self, status: int, kind: str, length: int | None = None) -> None:
        self.connection.settimeout(_SECONDS_FOR_A_LINE)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self._head(status, kind, len(body))
        self.wfile.write(body)

    def _refuse(self, problem: RejectedError) -> None:
        self._reply(problem.status, json.dumps({"error": str(problem)}).encode())

    def _line(self, content: Mapping[str, Any]) -> None:
        self.wfile.write(json.dumps(content).encode() + b"\n")

    def log_message(self, *words: Any) -> None:
        """Requests are not logged."""


def serve(models: Sequence[ChatModel], settings: SamplingSettings, system: str, port: int) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Raises:
        UserError: the port cannot be used.
    """
    try:
        server = ChatServer(port, models, settings, system)
    except OSError as problem:
        raise UserError(f"--port {port}: cannot listen on it ({problem.strerror}); use another one, or 0") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    with server:
        print_line(f"open http://{HOST}:{server.server_port}/ in a browser on this machine; Ctrl-C ends")
        server.serve_forever()
