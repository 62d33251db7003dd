"""Conversations to token ids in a process of their own.

The limits of chat templates need signals, which only a main thread receives; a server works in other threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType

from dschat_ppo.data.templates import Messages
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.processes import signal_when_parent_ends

Encoder = Callable[[Messages], list[int]]


class EncodingProcess:
    """A forked process that encodes conversations, one at a time, for all threads of this process.

    Args:
        encoders: of the models; each raises UserError for a conversation that it rejects.
    """

    def __init__(self, encoders: Sequence[Encoder]):
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        self._lock = threading.Lock()
        self._process = context.Process(
            target=_encode_until_closed, args=(other, self._connection, os.getpid(), encoders), daemon=True
        )
        self._process.start()
        other.close()

    def __call__(self, number: int, messages: Messages) -> list[int]:
        """The ids of a conversation by encoder `number`.

        Raises:
            UserError: the encoder rejects it, or the process has ended.
        """
        with self._lock:
            try:
                self._connection.send((number, messages))
                found: list[int] | str = self._connection.recv()
            except (EOFError, OSError):
                raise UserError("the process that encodes conversations has ended; start the chat again") from None
        if isinstance(found, str):
            raise UserError(found)
        return found

    def __enter__(self) -> EncodingProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _encode_until_closed(connection: Connection, other: Connection, parent: int, encoders: Sequence[Encoder]) -> None:
    """Body of the process: reply to each (number, messages) with ids, or with the message of a UserError."""
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the signal was set up
        return
    other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too; the server ends it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else the library warns of a fork
    while True:
        number, messages = connection.recv()
        try:
            connection.send(encoders[number](messages))
        except UserError as problem:
            connection.send(str(problem))
