"""The bytes that arrive on a socket, with one time limit and one length limit for all of them together.

The timeout of a socket applies to each read. A peer that sends a byte now and then never exceeds it, whether in a
status line, in headers, in a chunk's size or in the body.
"""

from __future__ import annotations

import io
import socket
import time
from http.client import HTTPException
from typing import Any


class TooManyBytesError(HTTPException):
    """More bytes arrived than the limit. `http.server` and `http.client` treat it as they treat too long headers."""


class TimedReader(io.RawIOBase):
    """The raw stream of a socket's incoming bytes; wrap it in `io.BufferedReader`. `left` bytes may still arrive.

    Raises:
        TimeoutError: when reading, at the deadline (of `time.monotonic()`).
        TooManyBytesError: when reading, after `most` bytes.
    """

    def __init__(self, connection: socket.socket, deadline: float, most: int):
        self.connection = connection
        self.deadline = deadline
        self.left = most
        self.raw = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read some bytes; 0 at the end of the stream."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the time limit has passed")
        if self.left <= 0:
            raise TooManyBytesError("too many bytes")
        self.connection.settimeout(seconds)
        count = self.raw.readinto(memoryview(buffer)[: self.left])
        self.left -= count or 0
        return count

    def close(self) -> None:
        """Close the stream, not the socket."""
        self.raw.close()
        super().close()
