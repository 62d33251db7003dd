"""What the HTTP servers of this package share: a socket, a clean end, and the refusal of web sites."""

from __future__ import annotations

import signal
import socket
from typing import Any

from dschat_ppo.errors import UserError

_OWN_NAMES = ("127.0.0.1", "localhost", "::1")  # of this machine, also through an SSH tunnel from another port


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


def refuse_web_sites(app: Any, host: str) -> None:
    """Let an application that listens on `host` answer no page of a web site. A browser sends some requests, such as
    uploads, to any address for any page, and says whose they are: status 403. A web site can also give a name of its
    own the address of this machine, and would then be allowed to read the replies: on this machine, requests for
    another name than `_OWN_NAMES` get status 400."""
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import PlainTextResponse

    if host in _OWN_NAMES:  # clients of another address choose its name
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*_OWN_NAMES, "[::1]"])  # as a Host header has it

    @app.middleware("http")
    async def same_origin(request: Any, call_next: Any) -> Any:
        site, origin = request.headers.get("sec-fetch-site", "none"), request.headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2] != request.headers.get("host")
        if foreign or site not in ("none", "same-origin"):
            return PlainTextResponse("requests of web sites are refused", 403)
        return await call_next(request)
