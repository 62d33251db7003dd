"""The worker process that runs a reward function. Started by `worker_pool.Worker`; needs only the standard library.

Requests arrive on standard input, each a length and a pickle of keyword arguments. Replies leave on the original
standard output, each a length and JSON: the trainer unpickles nothing that a worker wrote. The function itself gets an
empty standard input, and its prints go to standard error.

The process forks. The child runs the function. The parent watches whether the trainer is alive, because a function that
never releases the interpreter's lock (such as a regular expression that backtracks for ever) blocks every thread of its
process. When the trainer ends for any reason, the watcher kills the whole process group.

Both processes ignore SIGTERM and SIGINT: DeepSpeed's launcher sends SIGTERM to all its descendants when the run is to
stop, and the trainer still needs the rewards of its last step.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import select
import signal
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import CodeType
from typing import Any, BinaryIO, NoReturn

from dschat_ppo.common.dead_terminal import leave_dead_terminal
from dschat_ppo.common.own_functions import NoSuchFunctionError, cause_of, load, one_line
from dschat_ppo.rewards.call_forms import CALL_FORMS, describe
from dschat_ppo.rewards.returned_values import CallLog, returned_rows

LENGTH = struct.Struct(">Q")
_POLL_MILLISECONDS = 1000


def main(argv: list[str]) -> None:
    """Serve a function. `argv`: its file or module, its name, its settings as JSON."""
    parent = os.getppid()
    outlive_signals()
    child = os.fork()
    if child:
        _watch(parent, child)
    os.register_at_fork(after_in_child=restore_signals)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")  # descriptors are not inherited
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    where, name, settings = argv
    try:
        function = load(where, name)
        loaded, file = describe(function, json.loads(settings)), file_of(function)
    except NoSuchFunctionError as problem:
        _send(replies, {"error": one_line(str(problem))})
        return
    except BaseException as problem:  # noqa: BLE001  the user's module may raise anything; the trainer reports it
        _send(replies, {"error": cause_of(problem, os.path.abspath(where))})
        return
    _send(replies, {"ready": loaded})
    loop = asyncio.new_event_loop()
    per_row = CALL_FORMS[loaded["form"]].per_row
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        leave_dead_terminal()  # a print of the function would fail
        arguments = pickle.loads(requests.read(LENGTH.unpack(head)[0]))
        log = CallLog()
        if loaded["form"] == "trl":
            loggers = {name: call for name, call in log.loggers.items() if loaded["any"] or name in loaded["takes"]}
            arguments = loggers | arguments
        try:
            result = function(**arguments)
            if inspect.isawaitable(result):
                result = loop.run_until_complete(_awaited(result))
            reply: dict[str, Any] = {"values": log.added_to(returned_rows(result, per_row))}
        except BaseException as problem:  # noqa: BLE001  a failed call costs its rows, not the run
            reply = {"error": cause_of(problem, file)}
        _send(replies, reply)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def outlive_signals() -> None:
    """Handle SIGTERM and SIGINT by doing nothing. `SIG_IGN` would be inherited by programs started from here."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def restore_signals() -> None:
    """Default handlers in processes that the function forks: `multiprocessing` ends its pools by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _watch(parent: int, child: int) -> NoReturn:
    """End when the child ends; kill the whole process group when the trainer closes the pipe or ends."""
    os.close(1)
    hang_up = select.poll()
    hang_up.register(0, 0)  # without events `poll` reports only that the other end closed
    while not hang_up.poll(_POLL_MILLISECONDS) and os.getppid() == parent:
        if os.waitpid(child, os.WNOHANG)[0]:
            os._exit(0)
    os.killpg(os.getpid(), signal.SIGKILL)  # this process leads the group
    os._exit(1)


def _send(replies: BinaryIO, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    replies.write(LENGTH.pack(len(body)) + body)
    replies.flush()


def file_of(function: Callable[..., Any]) -> str | None:
    """The file that defines the function; None for a shipped rule or a function that is not written in Python."""
    plain = inspect.unwrap(function)
    for written in (plain, type(plain).__call__):
        code = getattr(written, "__code__", None)
        if isinstance(code, CodeType) and Path(code.co_filename).parent != Path(__file__).parent:
            return code.co_filename
    return None
