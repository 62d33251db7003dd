"""Worker processes that run a reward function, with a time limit for each call."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pickle import PicklingError, dumps
from typing import Any

from dschat_ppo.common.heartbeat import TimeLeft, heartbeat

_INVALID_REPLY = "its process sent an invalid reply"
_HEARTBEAT_SECONDS = 1.0
START_SECONDS = 120.0  # a module may import slow libraries
_MOST_BYTES = 2**28  # of a reply
_START_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dschat_ppo.rewards.worker_process import main; main(*sys.argv[2:])"
)


class CallError(Exception):
    """A call or the start of its worker failed; the message is the cause."""


class WorkerDiedError(CallError):
    """The process of the worker has ended, by the call or before it."""


@dataclass(frozen=True)
class Target:
    """The function to load: a file `*.py` or a dotted module, its name there, and settings as text."""

    where: str
    name: str
    settings: tuple[tuple[str, str], ...] = ()


class Worker:
    """One worker process. It starts at the first call; after a timeout or crash it is replaced at the next call, so
    what the function keeps between calls is lost with it. `seconds`: for each call. `read`: what a reply means;
    `TypeError` or `ValueError` for one that the function forged."""

    def __init__(self, target: Target, seconds: float, read: Callable[[Any], Any]):
        self.target = target
        self.seconds = seconds
        self.read = read
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Any:
        """Start the process and wait until it has imported the function; what it says about it (JSON)."""
        self.stop()
        argv = [self.target.where, self.target.name, json.dumps(dict(self.target.settings))]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START_CODE, json.dumps([*sys.path, os.getcwd()]), *argv],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        try:
            return self._exchange(b"", START_SECONDS, f"was not imported within {START_SECONDS:g} s")
        except CallError:
            self.stop()
            raise

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call the function with keyword arguments; its reply, or `CallError`."""
        try:
            request = dumps(arguments)
        except (PicklingError, TypeError, AttributeError) as problem:
            raise CallError(f"the row cannot be sent to its process: {problem}") from None
        if self.process is None:
            self.start()
        late = f"took longer than {self.seconds:g} s (--reward_timeout) and was killed"
        reply = self._exchange(request, self.seconds, late)
        try:
            return self.read(reply)
        except (TypeError, ValueError):
            self.stop()  # its true reply may follow, and would be taken for that to the next call
            raise CallError(_INVALID_REPLY) from None

    def stop(self) -> None:
        """Kill the process and everything that it started."""
        if self.process is None:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # `wait` comes later, so no other process has this id
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process = None

    def _exchange(self, request: bytes, seconds: float, late: str) -> Any:
        """Send a request; the value that the worker replies. An error that it reports leaves it alive, any other ends
        it."""
        try:
            kind, value = self._transfer(request, seconds, late)
        except CallError:
            self.stop()
            raise
        if kind == "error":
            raise CallError(str(value))
        return value

    def _transfer(self, request: bytes, seconds: float, late: str) -> tuple[str, Any]:
        """Write a request and read a line, {kind: value}. The process may end or hang at any byte of them."""
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        inward, outward = self.process.stdin.fileno(), self.process.stdout.fileno()
        left, unsent, line = TimeLeft(seconds), memoryview(request), bytearray()
        poll = select.poll()
        poll.register(outward, select.POLLIN)
        if unsent:
            poll.register(inward, select.POLLOUT)
        try:
            while not line.endswith(b"\n"):
                if (most := left.seconds()) <= 0:
                    raise CallError(late)
                for number, _ in poll.poll(1000 * min(_HEARTBEAT_SECONDS, most)):
                    if number == inward:
                        unsent = unsent[os.write(inward, unsent) :]
                        if not unsent:
                            poll.unregister(inward)
                        continue
                    part = os.read(outward, 2**20)
                    if not part:
                        raise BrokenPipeError
                    line += part
                    if len(line) > _MOST_BYTES:
                        raise ValueError
                heartbeat()  # a call that hangs is found by its own time limit
            [(kind, value)] = json.loads(line).items()
        except BrokenPipeError:
            raise WorkerDiedError("its process ended (a crash, os._exit, or out of memory)") from None
        except (ValueError, AttributeError):
            raise CallError(_INVALID_REPLY) from None
        return kind, value


class WorkerPool:
    """`size` worker processes of one function, with a time limit of `seconds` for each call, whose replies `read`
    reads. `ready`: what the first says about the function."""

    def __init__(self, target: Target, size: int, seconds: float, read: Callable[[Any], Any]):
        self.workers = [Worker(target, seconds, read) for _ in range(size)]
        self.threads = ThreadPoolExecutor(size, thread_name_prefix="reward")
        self.closed = False
        try:
            self.ready = list(self.threads.map(Worker.start, self.workers))[0]
        except CallError:
            self.close()
            raise

    def map(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        """Reply or `CallError` of each call, in order. Each worker takes the next call when it is free.

        A call whose worker dies is repeated once: a process may be killed without the fault of this call (out of
        memory). Takes at most `ceil(len(calls) / size) * seconds`, plus `START_SECONDS` per round if every worker is
        replaced, and both once more for calls whose worker dies.
        """
        waiting = queue.SimpleQueue[int]()
        for number in range(len(calls)):
            waiting.put(number)
        results: list[Any] = [None] * len(calls)

        def serve(worker: Worker) -> None:
            while not self.closed:
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                heartbeat()
                for _ in range(2):
                    try:
                        results[number] = worker.call(calls[number])
                        break
                    except CallError as problem:
                        results[number] = problem
                        if not isinstance(problem, WorkerDiedError):
                            break

        list(self.threads.map(serve, self.workers[: len(calls)]))
        return results

    def close(self) -> None:
        """Kill all workers. After an interrupted `map`, only waits for the calls in progress."""
        self.closed = True
        self.threads.shutdown(wait=True)
        for worker in self.workers:
            worker.stop()
