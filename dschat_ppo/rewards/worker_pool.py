"""Worker processes that keep state between calls, such as a loaded function, with a time limit for each call."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pickle import PicklingError, dumps
from typing import Any

from dschat_ppo.common.heartbeat import heartbeat

_HEARTBEAT_SECONDS = 1.0
START_SECONDS = 120.0  # a module may import slow libraries
_START_CODE = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(*sys.argv[3:])"
)


class CallError(Exception):
    """A call or the start of its worker failed; the message is the cause."""


class WorkerDiedError(CallError):
    """The process of the worker has ended, by the call or before it."""


class Worker:
    """One worker process. It starts at the first call; after a timeout or crash it is replaced at the next call, so
    that its state is lost."""

    def __init__(self, main: Sequence[str], seconds: float):
        # The module whose `main` the process runs, and its arguments. It reads pickled keyword arguments from standard
        # input, and writes a line of JSON when it is ready and for each call: {"value": ...} or {"error": cause}. The
        # trainer unpickles nothing that a worker wrote.
        self.main = main
        self.seconds = seconds  # for each call
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Any:
        """Start the process and wait until it is ready; what it says then (JSON)."""
        self.stop()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START_CODE, json.dumps([*sys.path, os.getcwd()]), *self.main],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        return self._exchange(b"", START_SECONDS, f"was not imported within {START_SECONDS:g} s", ends=True)

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call the function with keyword arguments; its reply, or `CallError`. A call whose process ends is repeated
        once in a new one, because the kernel may kill any process when memory runs out."""
        try:
            request = dumps(arguments)
        except (PicklingError, TypeError, AttributeError) as problem:
            raise CallError(f"the row cannot be sent to its process: {problem}") from None
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
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # `wait` comes later, so no other process has this id
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process = None

    def _exchange(self, request: bytes, seconds: float, late: str, ends: bool = False) -> Any:
        """Send a request; the value that the worker replies. An error that it reports leaves it alive unless `ends`,
        any other ends it."""
        try:
            [(kind, value)] = json.loads(self._transfer(request, seconds)).items()
        except BrokenPipeError:
            self.stop()
            raise WorkerDiedError("its process ended (a crash, os._exit, or out of memory)") from None
        except TimeoutError:
            self.stop()
            raise CallError(late) from None
        except (ValueError, AttributeError):
            self.stop()
            raise CallError("its process sent an invalid reply") from None
        if kind == "error":
            if ends:
                self.stop()
            raise CallError(str(value))
        return value

    def _transfer(self, request: bytes, seconds: float) -> bytearray:
        """Write a request and read a line. The process may end or hang at any byte of them."""
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        inward, outward = self.process.stdin.fileno(), self.process.stdout.fileno()
        end, unsent, line = time.monotonic() + seconds, memoryview(request), bytearray()
        poll = select.poll()
        poll.register(outward, select.POLLIN)
        if unsent:
            poll.register(inward, select.POLLOUT)
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            ready = poll.poll(1000 * max(0.0, min(_HEARTBEAT_SECONDS, left)))
            if left <= 0 and not ready:
                raise TimeoutError
            for number, _ in ready:
                if number == inward:
                    unsent = unsent[os.write(inward, unsent) :]
                    if not unsent:
                        poll.unregister(inward)
                    continue
                part = os.read(outward, 2**20)
                if not part:
                    raise BrokenPipeError
                line += part
            heartbeat()  # a call that hangs is found by its own time limit
        return line


class WorkerPool:
    """`size` worker processes with the same `main`. Other arguments as for `Worker`. `ready`: what the first said when
    it was ready."""

    def __init__(self, main: Sequence[str], size: int, seconds: float):
        self.workers = [Worker(main, seconds) for _ in range(size)]
        self.threads = ThreadPoolExecutor(size, thread_name_prefix="reward")
        self.closed = False
        try:
            self.ready = list(self.threads.map(Worker.start, self.workers))[0]
        except CallError:
            self.close()
            raise

    def map(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        """Reply or `CallError` of each call, in order. Each worker takes the next call when it is free. Takes at most
        `ceil(len(calls) / size) * seconds`, plus `START_SECONDS` per round if every worker is replaced, and both once
        more for calls whose worker dies."""
        results: list[Any] = [None] * len(calls)
        waiting = iter(range(len(calls)))  # shared by the threads

        def serve(worker: Worker) -> None:
            for number in waiting:
                if self.closed:
                    return
                heartbeat()
                try:
                    results[number] = worker.call(calls[number])
                except CallError as problem:
                    results[number] = problem

        list(self.threads.map(serve, self.workers[: len(calls)]))
        return results

    def close(self) -> None:
        """Kill all workers. After an interrupted `map`, only waits for the calls in progress."""
        self.closed = True
        self.threads.shutdown(wait=True)
        for worker in self.workers:
            worker.stop()
