"""Requests and replies of `fuzz.py`: bytes to the reward server, and to the client of a reward service.

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


def _reply(port: int, request: bytes) -> bytes:
    """The reply to bytes; the client closes its side of the connection after 5 s."""
    received = []
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        try:
            client.sendall(request)
            while chunk := client.recv(2**16):
                received.append(chunk)
        except OSError:  # the server waits for more, or has replied before it read everything
            pass
    return b"".join(received)


def ask_reward_server(rng: random.Random, material: Path, own: Path) -> int:
    """A mutated request to `serve_reward`, with the tiny reward model."""
    import uvicorn

    from dschat_ppo.common.logging import quiet_libraries
    from dschat_ppo.tools.serve_reward import reward_app
    from dschat_ppo.tools.text_scorer import TextScorer
    from dschat_ppo.tools.web_server import listen, server_options

    quiet_libraries()
    scorer = TextScorer(str(material / "reward"), "fp32", 256)
    app = reward_app(scorer)
    server, listening = uvicorn.Server(server_options(app, timeout_keep_alive=1)), listen("127.0.0.1", 0, "--port")
    path = rng.choice(("/get_reward", "/get_reward", "/get_reward", "/health", "/", "//x", "http://[::1"))
    query = {"query": ["a word", "", "<|end|>"], "prompts": ["a", "", "b"], "labels": [None, 1, "x"]}
    request = _request(rng, path, query)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        reply = _reply(listening.getsockname()[1], request)
    finally:
        server.should_exit = True
        thread.join()
    status = reply.split(b" ", 2)[1:2]
    if status == [b"200"] or not reply:
        return 0
    if status[:1] and status[0].startswith(b"4"):
        print(f"error: {reply[:300]!r}", file=sys.stderr)
        return 2
    raise AssertionError(f"the server replied {reply[:500]!r}")


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
        scores = reward(RewardRequest.of(["a", "b", "c"], ["d", "e", "f"], rows), None)  # type: ignore[arg-type]
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    assert scores.shape == (3,) and bool(torch.isfinite(scores).all()), scores
    return 0
