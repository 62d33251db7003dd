"""Processes that run a reward function, with a time limit for each call."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pickle import PicklingError, dumps
from typing import Any, NoReturn

from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.rewards.worker_process import LENGTH

_BEAT_SECONDS = 1.0
START_SECONDS = 120.0  # a module may import slow libraries
_MOST_BYTES = 2**28
_DIED = "its process ended (a crash, os._exit, or killed for want of memory)"
_GARBAGE = "its process answered what is no answer"
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dschat_ppo.rewards.worker_process import main; main(sys.argv[2:])"
)


class CallError(Exception):
    """A call, or the start of its worker, failed; the message is the cause."""


@dataclass(frozen=True)
class Target:
    """A function: a file `*.py` or a dotted module, its name there, and settings as text."""

    where: str
    name: str
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Signature:
    """How the function wants to be called; see `worker.describe`."""

    per_row: bool
    takes: frozenset[str]
    needs: frozenset[str]
    any: bool
    settings: dict[str, Any]


class Worker:
    """One process. It is started at the first call, killed when a call goes wrong, and started anew at the next."""

    def __init__(self, target: Target):
        self.target = target
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Signature:
        """Start the process and wait until it has imported the function.

        Raises:
            CallError: it did not within `START_SECONDS`; the cause is the module's own where it has one.
        """
        self.stop()
        words = [self.target.where, self.target.name, json.dumps(dict(self.target.settings))]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps([*sys.path, os.getcwd()]), *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        try:
            late = f"was not imported within {START_SECONDS:g} s"
            ready = self._answer("ready", time.monotonic() + START_SECONDS, late)
        except CallError:
            self.stop()
            raise
        return Signature(
            ready["per_row"], frozenset(ready["takes"]), frozenset(ready["needs"]), ready["any"], ready["settings"]
        )

    def call(self, arguments: dict[str, Any], seconds: float) -> list[float | None]:
        """Call the function with keyword arguments; what it returned, None where that is no number.

        Raises:
            CallError: it raised, died, or took longer than `seconds`.
        """
        if self.process is None:
            self.start()
        deadline = time.monotonic() + seconds
        late = f"took longer than {seconds:g} s (--reward_timeout) and was killed"
        try:
            body = dumps(arguments)
        except (PicklingError, TypeError, AttributeError) as problem:
            raise CallError(f"the row cannot be sent to its process: {problem}") from None
        self._write(LENGTH.pack(len(body)) + body, deadline, late)
        return self._answer("values", deadline, late)

    def stop(self) -> None:
        """Kill the process and all that it started."""
        if self.process is None:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process = None

    def _answer(self, kind: str, deadline: float, late: str) -> Any:
        """The next answer, of one kind. An error that the worker reports leaves it alive, any other ends it."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline, late))
        if length > _MOST_BYTES:
            self._give_up(_GARBAGE)
        try:
            answer = json.loads(self._read(length, deadline, late))
        except ValueError:
            self._give_up(_GARBAGE)
        if not isinstance(answer, dict) or not {kind, "error"} & set(answer):
            self._give_up(_GARBAGE)
        if "error" in answer:
            raise CallError(str(answer["error"]))
        return answer[kind]

    def _read(self, size: int, deadline: float, late: str) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        number, data = self.process.stdout.fileno(), b""
        while len(data) < size:
            self._wait(number, select.POLLIN, deadline, late)
            part = os.read(number, size - len(data))
            if not part:
                self._give_up(_DIED)
            data += part
        return data

    def _write(self, data: bytes, deadline: float, late: str) -> None:
        assert self.process is not None and self.process.stdin is not None
        number, view = self.process.stdin.fileno(), memoryview(data)
        while view:
            self._wait(number, select.POLLOUT, deadline, late)
            try:
                view = view[os.write(number, view) :]
            except BrokenPipeError:
                self._give_up(_DIED)

    def _wait(self, number: int, event: int, deadline: float, late: str) -> None:
        poll = select.poll()
        poll.register(number, event)
        while not poll.poll(1000 * min(_BEAT_SECONDS, max(0.0, deadline - time.monotonic()))):
            heartbeat()  # its own limit tells a call that hangs
            if time.monotonic() >= deadline:
                self._give_up(late)

    def _give_up(self, cause: str) -> NoReturn:
        self.stop()
        raise CallError(cause)


class WorkerPool:
    """`size` workers of one function.

    Args:
        target: the function.
        size: number of processes.
        seconds: time limit of each call.

    Raises:
        CallError: the function cannot be loaded.
    """

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

    def map(self, calls: Sequence[dict[str, Any]]) -> list[list[float | None] | CallError]:
        """Result or failure of each call, in order; each worker takes the next call when it is free.

        Takes at most `ceil(len(calls) / size) * seconds`, and as often `START_SECONDS` if every worker is replaced.
        """
        waiting = queue.SimpleQueue[int]()
        for number in range(len(calls)):
            waiting.put(number)
        results: list[list[float | None] | CallError] = [CallError("was not called")] * len(calls)

        def serve(worker: Worker) -> None:
            while not self.closed:
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                heartbeat()
                try:
                    results[number] = worker.call(calls[number], self.seconds)
                except CallError as problem:
                    results[number] = problem

        list(self.threads.map(serve, self.workers[: len(calls)]))
        return results

    def close(self) -> None:
        """Kill all workers; of a `map` that was interrupted only the calls at work are waited for."""
        self.closed = True
        self.threads.shutdown(wait=True)
        for worker in self.workers:
            worker.stop()
