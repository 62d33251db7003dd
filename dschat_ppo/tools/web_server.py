"""What the HTTP servers of this package share: a socket, a clean end, and the refusal of web sites."""

from __future__ import annotations

import signal
import socket
from typing import Any

from dschat_ppo.errors import UserError

OWN_NAMES = ["127.0.0.1", "localhost"]  # of this machine, also through an SSH tunnel from another port


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


def refuse_other_hosts(app: Any) -> None:
    """Let an application that listens on this machine answer requests for `OWN_NAMES` only: a web site can give a name
    of its own the address of this machine, and would then be allowed to read the replies."""
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    app.add_middleware(TrustedHostMiddleware, allowed_hosts=OWN_NAMES)
