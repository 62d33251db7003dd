"""What the HTTP servers of this package share: a socket, a clean end, and the refusal of requests."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from dschat_ppo.errors import UserError

OWN_NAMES = ("127.0.0.1", "localhost", "::1")  # of this machine, also through an SSH tunnel from another port


class RefusedError(Exception):
    """A request that gets an error reply with `status` and a reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


def listen(host: str, port: int, flags: str) -> socket.socket:
    """A socket that listens on an address; raises `UserError`, which names the flags, if it cannot be used."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as problem:
        raise UserError(f"{flags}: cannot listen on it ({problem}); use another one, or --port 0") from None


def serve_until_stopped(app: Any, listening: socket.socket, **options: Any) -> None:
    """Serve an ASGI application with uvicorn until SIGINT or SIGTERM; requests in progress are answered first."""
    import uvicorn

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # uvicorn handles them, and raises them again at its end
    uvicorn.Server(server_options(app, **options)).run(sockets=[listening])


def server_options(app: Any, **options: Any) -> Any:
    """uvicorn's configuration: no log of requests, and always the same implementation of HTTP."""
    import uvicorn

    given: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "loop": "asyncio",
        "http": "h11",
        "ws": "none",
    }
    return uvicorn.Config(app, **(given | options))


def check_origin(headers: Mapping[str, str], names: tuple[str, ...] | None) -> None:
    """Refuse (`RefusedError`) a request that a page of a web site sends, also from a name that was rebound to this
    machine. `headers` are in lower case. `names` are the hosts that a request may name; None: any. A request without a
    host is of no browser."""
    host, origin = headers.get("host"), headers.get("origin")
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:  # it is malformed
        name = None
    if names is not None and host is not None and name not in names:
        raise RefusedError(403, f"the host {host!r} is not this machine; use http://{OWN_NAMES[0]}:PORT/")
    site = headers.get("sec-fetch-site", "none")
    if origin not in (None, f"http://{host}") or site not in ("none", "same-origin"):
        raise RefusedError(403, "requests from other sites are refused")
