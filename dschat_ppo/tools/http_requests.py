"""What the servers of this package have in common: refused requests, and bodies of limited length."""

from __future__ import annotations

from email.message import Message
from io import BufferedIOBase

_CHUNK_BYTES = 2**16


class RejectedError(Exception):
    """A request that gets an error reply with `status` and a reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


def read_body(headers: Message, stream: BufferedIOBase, most: int) -> bytes:
    """The body of a request.

    Args:
        headers: of the request.
        stream: stands at its body.
        most: bytes.

    Raises:
        RejectedError: it has no length, is longer than `most`, or is incomplete.
    """
    given = headers.get("Content-Length", "")
    if not (given.isascii() and given.isdigit()):
        raise RejectedError(411, "the request needs a Content-Length")
    length = int(given)
    if length > most:
        left = min(length, 16 * most)  # discard the body: most clients read a reply only after they have sent it all
        while left > 0 and (chunk := stream.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
        raise RejectedError(413, f"{length} bytes exceed the limit of {most}")
    body = stream.read(length)
    if len(body) < length:
        raise RejectedError(400, f"received {len(body)} of {length} bytes")
    return body
