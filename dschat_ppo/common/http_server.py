"""Servers of this machine: their socket, which requests they refuse, and uvicorn as they run it."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

from dschat_ppo.errors import UserError

# of this machine, also through an SSH tunnel from another port
LOCAL_NAMES = "127.0.0.1", "localhost", "::1"


def listen(host: str, port: int, flags: str) -> socket.socket:
    """A socket that listens on an address; raises `UserError`, which names the flags, if it cannot
    be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as problem:
        raise UserError(
            f"{flags}: cannot listen on it ({problem}); use another one, or --port 0"
        ) from None


def reason_to_refuse(host: str | None, origin: str | None) -> str | None:
    """Why a server that listens on this machine alone refuses a request with these headers, in one
    line; None if it answers.

    A web site can give its name the address of this machine, to read replies: its requests name it
    as their `Host`. A page of another site can send requests here: its browser names it as their
    `Origin`, which must be the server itself.
    """
    if host is None or _name_in(f"//{host}") not in LOCAL_NAMES:
        return "the Host of the request is none of this machine: use 127.0.0.1 or localhost"
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return "the request comes from a page of another site"
    return None


def _name_in(url: str) -> str | None:
    """The host name in a URL, without its port; None if it has none or is no URL."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def server_of(app: Any) -> Any:
    """uvicorn for an ASGI application: no log of requests, and always the same implementation of
    HTTP."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, loop="asyncio", http="h11", ws="none"
        )
    )
