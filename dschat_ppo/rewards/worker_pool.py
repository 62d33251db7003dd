"""Worker processes that run a reward function, with a time limit for each call. They import no
large library.

Standard input and output of a worker are one socket. Requests arrive there: pickled keyword
arguments, one call after another. Replies leave, a line of JSON each: the trainer unpickles nothing
that a worker wrote. The function itself gets an empty standard input, and its prints go to standard
error.

The kernel kills the process when the trainer ends for any reason. It ignores SIGTERM and SIGINT:
DeepSpeed's launcher sends SIGTERM to all its descendants when the run is to stop, and the trainer
still needs the rewards of its last step.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.own_functions import cause_of, load_callable
from dschat_ppo.common.processes import leave_dead_terminal, signal_when_parent_ends
from dschat_ppo.errors import attempt, is_secret_name, remember_secret
from dschat_ppo.rewards.call_forms import (
    LOGGERS,
    Returned,
    Signature,
    returned_rows,
    signature_of,
    with_made,
)

_HEARTBEAT_SECONDS = 1.0
START_SECONDS = 120.0  # a module may import slow libraries
_START_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dschat_ppo.rewards.worker_pool import main; main(*sys.argv[2:])"
)


class CallError(Exception):
    """A call or the start of its worker failed; the message is the cause."""


class WorkerDiedError(CallError):
    """The process of the worker has ended, by the call or before it."""


class Worker:
    """One process. It starts at the first call, and again, without its state, after a timeout or
    crash."""

    def __init__(self, function: Sequence[str], seconds: float):
        self.function = function  # arguments of `main`
        self.seconds = seconds  # for each call
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Any:
        """Start the process and wait until it is ready; what it says then (JSON)."""
        self.stop()
        self.channel, inside = socket.socketpair()
        with inside:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _START_CODE,
                    json.dumps([*sys.path, os.getcwd()]),
                    *self.function,
                ],
                stdin=inside.fileno(),
                stdout=inside.fileno(),
                start_new_session=True,
            )
        return self._exchange(b"", START_SECONDS, f"was not imported within {START_SECONDS:g} s")

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call the function with keyword arguments; its reply, or `CallError`. A call whose process
        ends is repeated once in a new one, because the kernel may kill any process when memory runs
        out."""
        request = pickle.dumps(arguments)
        try:
            return self._reply(request)
        except WorkerDiedError:
            return self._reply(request)

    def _reply(self, request: bytes) -> Any:
        if self.process is None:
            self.start()
        late = f"took longer than {self.seconds:g} s (--reward_timeout) and was killed"
        return self._exchange(request, self.seconds, late)

    def stop(self) -> None:
        """Kill the process and everything that it started."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            # `wait` comes later, so no other process has this id
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()
        self.process = None

    def _exchange(self, request: bytes, seconds: float, late: str) -> Any:
        """Write a request and read a line, the reply. The process may end or hang at any byte of
        them. A reported error leaves the worker alive, others end it."""
        end = time.monotonic() + seconds
        line = bytearray()
        try:
            self.channel.settimeout(seconds)
            self.channel.sendall(request)
            while not line.endswith(b"\n"):
                self.channel.settimeout(max(0.001, end - time.monotonic()))
                received = self.channel.recv(2**20)
                if not received:
                    raise ConnectionResetError
                line += received
            [(kind, value)] = json.loads(line).items()
        except ConnectionError:
            self.stop()
            raise WorkerDiedError(
                "its process ended (a crash, os._exit, or out of memory)"
            ) from None
        except TimeoutError:
            self.stop()
            raise CallError(late) from None
        except (ValueError, AttributeError):
            self.stop()
            raise CallError("its process sent an invalid reply") from None
        if kind == "error":
            raise CallError(str(value))
        return value


class WorkerPool:
    """`size` workers with the same `function` (arguments of `main`). `ready`: what the first said
    when it was."""

    def __init__(self, function: Sequence[str], size: int, seconds: float):
        self.workers = [Worker(function, seconds) for _ in range(size)]
        self.threads = ThreadPoolExecutor(size, thread_name_prefix="reward")
        self.closed = False
        try:
            self.ready = self._at_once(Worker.start, self.workers)[0]
        except CallError:
            self.close()
            raise

    def _at_once(self, function: Callable[[Worker], Any], workers: Sequence[Worker]) -> list[Any]:
        """What the function returns for each worker."""
        futures = [self.threads.submit(function, worker) for worker in workers]
        while wait(futures, _HEARTBEAT_SECONDS).not_done:
            heartbeat()  # a call that hangs is found by its own time limit
        return [future.result() for future in futures]

    def map(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        """Reply or `CallError` of each call, in order. Each worker takes the next call when it is
        free. Takes at most `ceil(len(calls) / size) * seconds`, plus `START_SECONDS` per round if
        every worker is replaced, and both once more for calls whose worker dies."""
        results: list[Any] = [None] * len(calls)
        waiting = iter(range(len(calls)))  # shared by the threads

        def take_calls(worker: Worker) -> None:
            for index in waiting:
                if self.closed:
                    return
                try:
                    results[index] = worker.call(calls[index])
                except CallError as problem:
                    results[index] = problem

        self._at_once(take_calls, self.workers[: len(calls)])
        return results

    def close(self) -> None:
        """Kill all workers. After an interrupted `map`, only waits for the calls in progress."""
        self.closed = True
        self.threads.shutdown(wait=True)
        for worker in self.workers:
            worker.stop()


def main(where: str, name: str, settings: str) -> None:
    """In a worker process: serve calls of a function until the trainer closes the socket.

    Standard input holds pickled keyword arguments of the function, one call after another. Standard
    output gets one line of JSON when the function is loaded, with its `Signature`, and one line for
    each call, with its `Returned` rows: {"value": ...}, or {"error": cause}. A function that cannot
    be loaded ends the process after its line.

    Args:
        where: the file or module of the function.
        name: the function in it.
        settings: those that the flag gives the function, a JSON object of texts; `signature_of`
            checks and converts them.
    """
    signal_when_parent_ends(signal.SIGKILL)
    outlive_signals()
    os.register_at_fork(after_in_child=restore_signals)
    # Programs that the function starts do not inherit these copies: they could write replies, and
    # would keep the socket open after the end of the worker, which the trainer notices by it.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    process = os.getpid()

    def reply(kind: str, value: Any) -> None:
        # a fork of the function returned: its reply would shift later ones
        if os.getpid() != process:
            os._exit(1)
        print(json.dumps({kind: value}), file=replies, flush=True)

    for key, value in json.loads(settings).items():
        if is_secret_name(key):
            remember_secret(value)  # the function may quote it in an exception
    file = os.path.abspath(where)  # messages name its line
    with attempt(also_exits=True) as tried:
        function = load_callable(where, name)
        signature = signature_of(function, json.loads(settings))
    if tried.problem is not None:
        reply("error", cause_of(tried.problem, file))  # the trainer reports it
        return
    reply("value", asdict(signature))
    loop = asyncio.new_event_loop()
    while True:
        try:
            arguments = pickle.load(requests)
        except EOFError:
            return
        leave_dead_terminal()  # else a print of the function would fail
        with attempt(also_exits=True) as tried:
            reply("value", _call_function(function, signature, arguments, loop))
        if tried.problem is not None:  # a failed call costs its rows, not the run
            reply("error", cause_of(tried.problem, file))


def _call_function(
    function: Callable[..., Any],
    signature: Signature,
    arguments: dict[str, Any],
    loop: asyncio.AbstractEventLoop,
) -> list[Returned]:
    """The results of a call for each of its responses. TRL's functions also get callables that log,
    if they take them."""
    logged: dict[str, Any] = {}
    arguments = with_made(arguments)
    if signature.form == "trl":
        arguments = dict.fromkeys(filter(signature.wants, LOGGERS), logged.__setitem__) | arguments
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = loop.run_until_complete(result)
    return returned_rows(result, signature.call.per_row, logged)


def outlive_signals() -> None:
    """Handle SIGTERM and SIGINT by doing nothing. `SIG_IGN` would be inherited by programs started
    from here."""
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: None)


def restore_signals() -> None:
    """Default handlers in processes that the function forks: `multiprocessing` ends its pools by
    SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
