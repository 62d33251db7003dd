"""Requests and replies of `fuzz.py`: bytes to the servers of this package, and to the client of a reward service.

The exit code is 0 for a reply with status 200 and 2 for a refusal, which is printed as `error: ...`.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from fuzz_material import note
from fuzz_mutations import json_bytes, mutate_bytes, mutate_json

_STATUSES = ("200 OK",) * 8 + (
    "302 Found\r\nLocation: file:///etc/passwd", "429 Slow", "500 No", "-1 x", "999 y", "x"
)  # fmt: skip
_HEADERS = (
    "", "", "", "Transfer-Encoding: chunked\r\n", "Content-Encoding: gzip\r\n", "X: y\r\n" * 200,
    "Content-Length: 3\r\n",
)  # fmt: skip


def _request(rng: random.Random, path: str, content: Any) -> bytes:
    """An HTTP request that is changed in its head, its JSON or its bytes."""
    part = rng.choice(("json", "json", "json", "body", "head", "length", "whole", "none"))
    if part == "json":
        content, done = mutate_json(rng, content)
        note(done)
    body = json_bytes(content)
    if part == "body":
        body, done = mutate_bytes(rng, body)
        note(f"body: {done}")
    length: Any = len(body)
    if part == "length":
        length = rng.choice((0, 1, -1, "", "x", "9" * 5000, 2**40, len(body) - 1, len(body) + 1, "٣", f"+{len(body)}"))
    word = rng.choice(("POST", "POST", "POST", "POST", "GET", "PUT", "post", "X" * 100))
    head = f"{word} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {length}"
    start = f"{head}\r\n\r\n".encode()
    if part == "head":
        start, done = mutate_bytes(rng, start)
        note(f"head: {done}")
    whole = start + body
    if part == "whole":
        whole, done = mutate_bytes(rng, whole)
        note(f"request: {done}")
    note(repr(whole[:600]))
    return whole


def _exchange(server: Any, request: bytes) -> int:
    """Let the server's handler read the request from a socket, and judge its reply."""
    near, far = socket.socketpair()
    near.settimeout(30)
    received: list[bytes] = []

    def client() -> None:
        try:
            near.sendall(request)
            near.shutdown(socket.SHUT_WR)
        except OSError:  # the server has replied before it read everything
            pass
        try:
            while chunk := near.recv(2**16):
                received.append(chunk)
        except OSError:
            pass

    thread = threading.Thread(target=client)
    thread.start()
    try:
        server.RequestHandlerClass(far, ("fuzz", 0), server)
    except ConnectionError:
        note("the connection broke")
    far.close()
    thread.join()
    reply = b"".join(received)
    head, _, body = reply.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status == [b"200"] or not reply:
        return 0
    if status[:1] and status[0].startswith(b"4"):
        print(f"error: {status[0].decode()} {body[:300]!r}", file=sys.stderr)
        return 2
    if not head.startswith(b"HTTP/1") and b"Error response" in reply:  # http.server's own refusal of HTTP/0.9
        print("error: the request is not HTTP", file=sys.stderr)
        return 2
    if status[:1] and status[0] in (b"501", b"505"):  # a method or a version that http.server does not know
        print(f"error: {status[0].decode()}", file=sys.stderr)
        return 2
    raise AssertionError(f"the server replied {reply[:500]!r}")


def ask_reward_server(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated request to `serve_reward`, with the tiny reward model."""
    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.tools.serve_reward import RewardServer, Scorer

    quiet_libraries()
    server = RewardServer(("127.0.0.1", 0), Scorer(str(material / "reward"), "fp32", 256), 2**20, 16)
    path = rng.choice(("/get_reward", "/get_reward", "/get_reward", "/health", "/", "//x", "http://[::1"))
    query = {"query": ["a word", "", "<|end|>"], "prompts": ["a", "", "b"], "labels": [None, 1, "x"]}
    try:
        return _exchange(server, _request(rng, path, query))
    finally:
        server.server_close()


def ask_chat(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated request to the chat's page server, with the tiny model."""
    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.config.data_flags import DataFlags
    from dschat_ppo.tools.chat_model import load_models
    from dschat_ppo.tools.chat_server import ChatServer
    from dschat_ppo.tools.sampling_settings import SamplingSettings

    quiet_libraries()
    models = load_models([("--model", str(material / "model"))], DataFlags(["unused"]), "fp32")
    server = ChatServer(0, models, SamplingSettings(), "")
    path = rng.choice(("/answer", "/answer", "/answer", "/answer", "/info", "/", "/chat.js", "/../x", "//["))
    turns = [{"role": role, "content": text} for role, text in (("user", "a word"), ("assistant", "b"), ("user", "c"))]
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 3}
    question = {"model": 0, "messages": turns, "settings": settings, "number": 1}
    try:
        return _exchange(server, _request(rng, path, question))
    finally:
        server.server_close()


def score_remotely(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated reply of a reward service."""
    import torch

    from dschat_ppo.errors import UserError
    from dschat_ppo.rewards.remote_reward import RemoteReward
    from dschat_ppo.rewards.reward_source import RewardRequest

    content, done = mutate_json(rng, {"rewards": [0.5, -1, 2]})
    body = json_bytes(content if rng.random() < 0.6 else {"rewards": [0.5, -1, 2]})
    if rng.random() < 0.5:
        body, done = mutate_bytes(rng, body)
    length = rng.choice((len(body),) * 6 + (0, -1, 2**40, len(body) + 5, "x", "9" * 5000))
    head = f"HTTP/1.1 {rng.choice(_STATUSES)}\r\n{rng.choice(_HEADERS)}Content-Length: {length}\r\n\r\n".encode()
    if rng.random() < 0.3:
        head, done = mutate_bytes(rng, head)
    note(f"{done}: {head[:300]!r} {body[:300]!r}")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    connection.recv(2**16)
                    connection.sendall(head + body)
                except OSError:
                    continue

    threading.Thread(target=serve, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
    reward = RemoteReward([url], timeout=5.0, retries=0, batch_size=3)
    rows: list[dict[str, Any]] = [{"label": "a"}, {}, {"answer": 3}]
    try:
        scores = reward(RewardRequest(["a", "b", "c"], ["d", "e", "f"], rows), None)  # type: ignore[arg-type]
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    assert scores.shape == (3,) and bool(torch.isfinite(scores).all()), scores
    return 0
