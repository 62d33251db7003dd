"""Worker processes that run a reward function, with a time limit for each call."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pickle import PicklingError, dumps
from typing import Any, NoReturn

from dschat_ppo.common.heartbeat import TimeLeft, heartbeat
from dschat_ppo.rewards.call_arguments import Signature
from dschat_ppo.rewards.returned_values import Returned
from dschat_ppo.rewards.worker_process import LENGTH

_HEARTBEAT_SECONDS = 1.0
START_SECONDS = 120.0  # a module may import slow libraries
_MOST_BYTES = 2**28
_DIED = "its process ended (a crash, os._exit, or out of memory)"
_GARBAGE = "its process sent an invalid reply"
_START_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dschat_ppo.rewards.worker_process import main; main(sys.argv[2:])"
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
    """One worker process. It starts at the first call; after a timeout or crash it is replaced at the next call."""

    def __init__(self, target: Target):
        self.target = target
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Signature:
        """Start the process and wait until it has imported the function."""
        self.stop()
        argv = [self.target.where, self.target.name, json.dumps(dict(self.target.settings))]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START_CODE, json.dumps([*sys.path, os.getcwd()]), *argv],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        try:
            ready = self._receive("ready", TimeLeft(START_SECONDS), f"was not imported within {START_SECONDS:g} s")
        except CallError:
            self.stop()
            raise
        return Signature(
            ready["form"], frozenset(ready["takes"]), frozenset(ready["needs"]), ready["any"], ready["settings"]
        )

    def call(self, arguments: dict[str, Any], seconds: float) -> list[Returned]:
        """Call the function with keyword arguments; its results, one for each response, or `CallError`."""
        if self.process is None:
            self.start()
        left = TimeLeft(seconds)
        late = f"took longer than {seconds:g} s (--reward_timeout) and was killed"
        try:
            body = dumps(arguments)
        except (PicklingError, TypeError, AttributeError) as problem:
            raise CallError(f"the row cannot be sent to its process: {problem}") from None
        self._write(LENGTH.pack(len(body)) + body, left, late)
        values = self._receive("values", left, late)
        try:
            return [Returned(score, numbers) for score, numbers in values]
        except (TypeError, ValueError):
            self._fail(CallError(_GARBAGE))

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

    def _receive(self, kind: str, left: TimeLeft, late: str) -> Any:
        """The next reply, of one kind. An error that the worker reports leaves it alive; any other failure ends it."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size, left, late))
        if length > _MOST_BYTES:
            self._fail(CallError(_GARBAGE))
        try:
            reply = json.loads(self._read(length, left, late))
        except ValueError:
            self._fail(CallError(_GARBAGE))
        if not isinstance(reply, dict) or not {kind, "error"} & set(reply):
            self._fail(CallError(_GARBAGE))
        if "error" in reply:
            raise CallError(str(reply["error"]))
        return reply[kind]

    def _read(self, size: int, left: TimeLeft, late: str) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        number, data = self.process.stdout.fileno(), b""
        while len(data) < size:
            self._wait(number, select.POLLIN, left, late)
            part = os.read(number, size - len(data))
            if not part:
                self._fail(WorkerDiedError(_DIED))
            data += part
        return data

    def _write(self, data: bytes, left: TimeLeft, late: str) -> None:
        assert self.process is not None and self.process.stdin is not None
        number, view = self.process.stdin.fileno(), memoryview(data)
        while view:
            self._wait(number, select.POLLOUT, left, late)
            try:
                view = view[os.write(number, view) :]
            except BrokenPipeError:
                self._fail(WorkerDiedError(_DIED))

    def _wait(self, number: int, event: int, left: TimeLeft, late: str) -> None:
        poll = select.poll()
        poll.register(number, event)
        while not poll.poll(1000 * min(_HEARTBEAT_SECONDS, max(0.0, left.seconds()))):
            heartbeat()  # a call that hangs is found by its own time limit
            if left.seconds() <= 0:
                self._fail(CallError(late))

    def _fail(self, problem: CallError) -> NoReturn:
        self.stop()
        raise problem


class WorkerPool:
    """`size` worker processes of one function, with a time limit of `seconds` for each call."""

    def __init__(self, target: Target, size: int, seconds: float):
        self.seconds = seconds
        self.workers = [Worker(target) for _ in range(size)]
        self.threads = ThreadPoolExecutor(size, thread_name_prefix="reward")
        self.closed = False
        try:
            self.signature = list(self.threads.map(Worker.start, self.workers))[0]
        except CallError:
            self.close()
            raise

    def map(self, calls: Sequence[dict[str, Any]]) -> list[list[Returned] | CallError]:
        """Result or failure of each call, in order. Each worker takes the next call when it is free.

        A call whose worker dies is repeated once. Takes at most `ceil(len(calls) / size) * seconds`, plus
        `START_SECONDS` per round if every worker is replaced, and both once more for calls whose worker dies.
        """
        waiting = queue.SimpleQueue[int]()
        for number in range(len(calls)):
            waiting.put(number)
        results: list[list[Returned] | CallError] = [CallError("was not called")] * len(calls)

        def serve(worker: Worker) -> None:
            while not self.closed:
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                heartbeat()
                for _ in range(2):  # a process may be killed without the fault of this call (out of memory)
                    try:
                        results[number] = worker.call(calls[number], self.seconds)
                    except WorkerDiedError as problem:
                        results[number] = problem
                        continue
                    except CallError as problem:
                        results[number] = problem
                    break

        list(self.threads.map(serve, self.workers[: len(calls)]))
        return results

    def close(self) -> None:
        """Kill all workers. After an interrupted `map`, only waits for the calls in progress."""
        self.closed = True
        self.threads.shutdown(wait=True)
        for worker in self.workers:
            worker.stop()
