"""ASGI applications served from a thread of the test, and requests to them."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from dschat_ppo.tools.serve_reward import listen, server_options


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of a server."""
    listening = listen("127.0.0.1", 0, "--port")
    server = uvicorn.Server(server_options(app))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = server.force_exit = True
    thread.join(60)


def send(url: str, body: bytes | None = None, **headers: str) -> tuple[int, dict]:
    """Status and JSON of the reply; {} for a reply in another format. Names of headers have "_" for "-"."""
    named = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, named), timeout=20) as answer:
            return answer.status, json.loads(answer.read()) if "json" in answer.headers["Content-Type"] else {}
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.loads(refusal.read()) if "json" in refusal.headers["Content-Type"] else {}
