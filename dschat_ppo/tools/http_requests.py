"""What the servers of this package have in common: limits on clients, on their time and on what they send."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from dschat_ppo.common.timed_reader import TimedReader

OWN_NAMES = ("127.0.0.1", "localhost", "::1")  # of this machine, also through an SSH tunnel from another port
_HEADER_BYTES = 2**17
_CHUNK_BYTES = 2**16
_BODIES_IN_MEMORY = 8  # bodies of the largest size
_LINGER_SECONDS = 2.0
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
_BUSY += b'{"error": "too many clients; try again later"}'


class RejectedError(Exception):
    """A request that gets an error reply with `status` and a reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class BodyBudget:
    """The bytes of request bodies that a server holds at once: eight times those of the largest body.

    Only bytes that have arrived count, so a client that declares a large body and does not send it takes none.

    Args:
        largest: bytes of the largest body.
    """

    def __init__(self, largest: int):
        self.largest = largest
        self.held = 0
        self.lock = threading.Lock()

    def take(self, count: int) -> None:
        """Count `count` more bytes.

        Raises:
            RejectedError: the other requests hold too many.
        """
        with self.lock:
            if self.held + count > _BODIES_IN_MEMORY * self.largest:
                raise RejectedError(503, "other requests use the server's memory; try again later")
            self.held += count

    def give_back(self, count: int) -> None:
        """Count `count` bytes less."""
        with self.lock:
            self.held -= count


class LimitedServer(ThreadingHTTPServer):
    """A thread for each connection, up to `most_clients`; further ones get status 503 at once."""

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], most_clients: int):
        self.slots = threading.BoundedSemaphore(most_clients)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread, or refuse it."""
        if not self.slots.acquire(blocking=False):
            with suppress(OSError):
                request.setblocking(False)
                request.recv(_CHUNK_BYTES)  # a connection that is closed with unread bytes loses its reply
            with suppress(OSError):
                request.send(_BUSY)
            self.close_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system permits no further thread
            self.slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection, then let another one in."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection after its reply.

        Bytes that still arrive are discarded for a moment: most clients read a reply only after they have sent their
        whole body, and a connection that is closed earlier is reset.
        """
        deadline = time.monotonic() + _LINGER_SECONDS
        with suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            while (seconds := deadline - time.monotonic()) > 0:
                request.settimeout(seconds)
                if not request.recv(_CHUNK_BYTES):
                    break
        self.close_request(request)


def limit_request(handler: BaseHTTPRequestHandler, seconds: float) -> TimedReader:
    """Limit the time of the whole request and the bytes of its headers; call it at the end of `setup`."""
    handler.rfile.close()
    reader = TimedReader(handler.connection, time.monotonic() + seconds, _HEADER_BYTES)
    handler.rfile = io.BufferedReader(reader)
    return reader


def check_origin(headers: Message, names: Sequence[str] | None) -> None:
    """Refuse a request that a page of a web site sends, also from a name that was rebound to this machine.

    Args:
        headers: of the request.
        names: hosts that a request may name; None: any. A request without a host is of no browser.

    Raises:
        RejectedError: the host is another one, or another site sends the request.
    """
    host, origin = headers.get("Host"), headers.get("Origin")
    if names is not None and host is not None and _name_of(f"//{host}") not in names:
        raise RejectedError(403, f"the host {host!r} is not this machine; use http://{OWN_NAMES[0]}:PORT/")
    if origin is not None and origin != f"http://{host}":
        raise RejectedError(403, "requests from other sites are refused")
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise RejectedError(403, "requests from other sites are refused")


def _name_of(address: str) -> str | None:
    """The host name in `//name:port`, in lower case; None if it is malformed."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def declared_length(headers: Message, most: int) -> int:
    """The length of a JSON body, from the headers of its request.

    Raises:
        RejectedError: the body is compressed, of another type, has no single length, or is longer than `most` bytes.
    """
    if headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise RejectedError(415, "compressed bodies are refused; send the body without a Content-Encoding")
    if headers.get_content_type() != "application/json":  # pages of web sites cannot send it to another site
        raise RejectedError(415, "the Content-Type must be application/json")
    given = headers.get_all("Content-Length", [])
    if len(given) > 1:
        raise RejectedError(400, "the request has several Content-Length")
    if "Transfer-Encoding" in headers or not given or not (given[0].isascii() and given[0].isdigit()):
        raise RejectedError(411, "the request needs a Content-Length, and no Transfer-Encoding")
    if len(given[0]) > len(str(most)) + 20 or int(given[0]) > most:  # a number of many digits is not converted
        raise RejectedError(413, f"{given[0][:30]} bytes exceed the limit of {most}")
    return int(given[0])


@contextmanager
def received_body(
    headers: Message, stream: io.BufferedIOBase, reader: TimedReader, budget: BodyBudget
) -> Iterator[bytearray]:
    """The JSON body of a request; its bytes count in the budget until the context ends.

    Args:
        headers: of the request.
        stream: stands at its body.
        reader: under `stream`.
        budget: of the server.

    Raises:
        RejectedError: see `declared_length`; the body is incomplete or late, or the budget is used up.
    """
    length = declared_length(headers, budget.largest)
    reader.left = length
    body = bytearray()
    try:
        try:
            while len(body) < length and (chunk := stream.read1(min(length - len(body), _CHUNK_BYTES))):
                budget.take(len(chunk))
                body += chunk
        except TimeoutError:
            raise RejectedError(408, f"received {len(body)} of {length} bytes in time") from None
        if len(body) < length:
            raise RejectedError(400, f"received {len(body)} of {length} bytes")
        yield body
    finally:
        budget.give_back(len(body))
