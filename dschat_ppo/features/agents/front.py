"""The process that listens for programs: it takes their requests, hands them to the rank, and sends
what the rank replies. It has no large library, and knows nothing of messages and tokens.

Rank and front exchange frames over a socket: a line of JSON, whose `length` says how many bytes of
a body follow.

| frame | from | fields |
|---|---|---|
| `port` | front | `port`: where it listens |
| `admit`, `dismiss` | rank | `key`: of an episode that begins, or has ended; `episode`: its index |
| `call` | front | `call`, `episode`, `path`, `retries`; the body |
| `left`, `taken` | front | `call`: its program went away, or has got the reply |
| `dismissed` | front | `episode`: no further call of it comes, and all that it got was said |
| `reply` | rank | `call`, `status`, `type`; the body |
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from typing import Any

from dschat_ppo.common.http_server import reason_to_refuse, server_of
from dschat_ppo.common.processes import signal_when_parent_ends
from dschat_ppo.features.agents.call_replies import error_of, models_of
from dschat_ppo.features.agents.call_requests import RequestError

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
MODELS = "/v1/models"
MOST_BYTES = 2**24  # of a body
MOST_OPEN = 64  # calls of an episode
BODY_SECONDS = 30.0  # in which a body must be there
JSON = "application/json"
_MISSING = {
    "/v1/responses": "the Responses API",
    "/v1/messages": "Anthropic's API",
}


def frame(fields: dict[str, Any], body: bytes = b"") -> bytes:
    """A message between rank and front."""
    return json.dumps({**fields, "length": len(body)}).encode() + b"\n" + body


class FrontApp:
    """An ASGI application that hands requests to the rank."""

    def __init__(self, rank: asyncio.StreamWriter):
        self.rank = rank
        self.episodes = dict[str, int]()  # key -> index of an episode that runs
        self.ended = set[str]()  # keys of episodes that have ended
        self.open_calls = Counter[int]()  # by episode
        self.replies = dict[int, asyncio.Future[tuple[int, str, bytes]]]()  # by number of a call
        self.count = 0  # calls so far
        self.started = int(time.time())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except RequestError as problem:
            body = json.dumps(error_of(problem)).encode()
            await _send(send, problem.status, JSON, body)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or raise why it is refused."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        problem = reason_to_refuse(headers.get("host"), headers.get("origin"))
        if problem is not None:
            raise RequestError(problem, code="wrong_host")
        path = scope["path"]
        _check_path(path, scope["method"])
        episode = self._episode_of(headers.get("authorization", ""))
        if path == MODELS:
            models = json.dumps(models_of(self.started)).encode()
            await _send(send, 200, JSON, models)
            return
        if self.open_calls[episode] >= MOST_OPEN:
            raise RequestError(
                f"the episode has {MOST_OPEN} open calls; make fewer at a time",
                code="too_many_open_calls",
                status=429,
            )
        self.open_calls[episode] += 1
        try:
            body = await _body(receive)
            if body is not None:
                await self._hand_over(path, headers, body, episode, receive, send)
        finally:
            self.open_calls[episode] -= 1

    def _episode_of(self, authorization: str) -> int:
        """The index of the episode whose key a request has."""
        kind, _, key = authorization.partition(" ")
        episode = self.episodes.get(key)
        if kind.lower() == "bearer" and episode is not None:
            return episode
        message = "the API key is that of no episode: use the one that the program was given"
        if key in self.ended:
            message = "the episode of this API key has ended"
        raise RequestError(message, code="invalid_api_key", status=401)

    async def _hand_over(
        self,
        path: str,
        headers: dict[str, str],
        body: bytes,
        episode: int,
        receive: Any,
        send: Any,
    ) -> None:
        """Let the rank answer a call, and tell it whether the program got the reply."""
        call = self.count
        self.count += 1
        reply = asyncio.get_running_loop().create_future()
        self.replies[call] = reply
        retries = headers.get("x-stainless-retry-count", "")
        fields = {"kind": "call", "call": call, "episode": episode, "path": path}
        retry_count = int(retries) if retries.isdecimal() else 0
        self.rank.write(frame({**fields, "retries": retry_count}, body))
        leaving = asyncio.ensure_future(receive())  # nothing but the end of the connection comes
        try:
            await asyncio.wait({reply, leaving}, return_when=asyncio.FIRST_COMPLETED)
            kind = "left"
            if not leaving.done():
                status, content_type, content = reply.result()
                await _send(send, status, content_type, content)
                kind = "taken"
        finally:
            del self.replies[call]
            leaving.cancel()
        self.rank.write(frame({"kind": kind, "call": call}))

    async def listen_to_rank(self, rank: asyncio.StreamReader) -> None:
        """Take the frames of the rank until it ends."""
        while True:
            line = await rank.readline()
            if not line:
                os._exit(0)
            fields = json.loads(line)
            body = await rank.readexactly(fields["length"])
            kind = fields["kind"]
            if kind == "admit":
                self.episodes[fields["key"]] = fields["episode"]
            elif kind == "dismiss":
                self.episodes.pop(fields["key"], None)
                self.ended.add(fields["key"])
                said = {"kind": "dismissed", "call": -1, "episode": fields["episode"]}
                self.rank.write(frame(said))
            else:
                reply = self.replies.get(fields["call"])
                if reply is not None and not reply.done():
                    reply.set_result((fields["status"], fields["type"], body))


def _check_path(path: str, method: str) -> None:
    """`RequestError` for a path or a method that the front does not have."""
    expected = {CHAT: "POST", PLAIN: "POST", MODELS: "GET"}.get(path)
    if expected is None:
        has = f"there is no {path[:80]}"
        for start, name in _MISSING.items():
            if path.startswith(start):
                has = f"{name} is not offered; a translation such as LiteLLM's may speak it"
        raise RequestError(f"{has}: use {CHAT}, {PLAIN} or {MODELS}", code="not_found", status=404)
    if method != expected:
        raise RequestError(f"{path} is for {expected}", code="method_not_allowed", status=405)


async def _body(receive: Any) -> bytes | None:
    """The body of a request; None if the program went away before its end."""
    body = bytearray()
    last = time.monotonic() + BODY_SECONDS
    more = True
    while more:
        try:
            message = await asyncio.wait_for(receive(), last - time.monotonic())
        except asyncio.TimeoutError:
            raise RequestError(
                f"the body was not there within {BODY_SECONDS:g} s", code="timeout", status=408
            ) from None
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            raise RequestError(
                f"the body is longer than {MOST_BYTES >> 20} MiB", code="too_large", status=413
            )
        more = message.get("more_body", False)
    return bytes(body)


async def _send(send: Any, status: int, content_type: str, body: bytes) -> None:
    """Send a response. One that does not follow the whole request ends the connection."""
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
    ]
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _serve_programs(control: socket.socket) -> None:
    """Listen until the rank ends."""
    reader, writer = await asyncio.open_connection(sock=control)
    app = FrontApp(writer)
    listening = socket.create_server(("127.0.0.1", 0))
    server = asyncio.ensure_future(server_of(app).serve(sockets=[listening]))
    writer.write(frame({"kind": "port", "port": listening.getsockname()[1]}))
    await app.listen_to_rank(reader)
    await server


def main(control: int) -> None:
    """In the front's process. `control`: the socket to the rank."""
    signal_when_parent_ends(signal.SIGKILL)
    asyncio.run(_serve_programs(socket.socket(fileno=control)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
