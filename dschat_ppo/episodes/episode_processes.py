"""Processes of episodes. One server process of a rank imports the user's file once; each episode is
a fork of it, so a call that hangs, crashes or fills the memory ends one episode. The rank asks and
polls: it never waits while it can decode other rows.

Requests are pickled; replies are lines of JSON, because the trainer unpickles nothing that such a
process wrote.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from dschat_ppo.common import ranks
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.own_functions import cause_of
from dschat_ppo.common.processes import signal_when_parent_ends
from dschat_ppo.episodes.environments import Form, Turn, form_of
from dschat_ppo.errors import attempt
from dschat_ppo.rewards.worker_pool import (
    START_SECONDS,
    CallError,
    outlive_signals,
    restore_signals,
)

MOST_BYTES = 2**24  # of a reply
ENDED = "its process ended"
_START_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dschat_ppo.episodes.episode_processes import main; main(int(sys.argv[2]), sys.argv[3])"
)


@dataclass(eq=False)
class _Call:
    """A request of an episode in progress."""

    unsent: memoryview
    end: float  # of its time
    reply: bytearray = field(default_factory=bytearray)


class Episodes:
    """The processes of one rank. A call takes at most `seconds`; at most `most` calls run at a
    time, others wait.

    `tools`: JSON schemas of what the environment offers to the model. `CallError`: the user's file
    cannot be used.
    """

    def __init__(self, names: Mapping[str, Any], seconds: float, most: int):
        self.seconds, self.most = seconds, most
        self._control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START_CODE,
                json.dumps([*sys.path, os.getcwd()]),
                str(theirs.fileno()),
                json.dumps(dict(names)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        self._sockets = dict[int, socket.socket]()  # by number of the episode
        self._groups = dict[int, int]()  # its process group
        self._waiting = deque[tuple[int, bytes]]()
        self._calls = dict[int, _Call]()
        self._failed = list[tuple[int, CallError]]()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a file for each episode
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        self._selector = selectors.DefaultSelector()
        try:
            self._control.settimeout(START_SECONDS)
            with self._control.makefile("rb") as file:
                self.tools: list[dict[str, Any]] = _value_of(file.readline())
        except (CallError, TimeoutError) as problem:
            self.close()
            late = isinstance(problem, TimeoutError)
            raise CallError(
                f"was not imported within {START_SECONDS:g} s" if late else str(problem)
            ) from None

    def start(
        self,
        number: int,
        row: dict[str, Any],
        seed: int,
        prompt: str = "",
        messages: list[Any] | None = None,
    ) -> None:
        """Begin episode `number`; its first turn comes by `poll`."""
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError as problem:
            self._require_server()
            self._failed.append((number, CallError(f"could not be started ({problem.strerror})")))
            return
        ours.setblocking(False)
        self._sockets[number] = ours
        self._ask(number, ("reset", row, seed, prompt, messages))

    def step(self, number: int, action: dict[str, Any]) -> None:
        """Send the model's message to an episode; the turn that answers it comes by `poll`."""
        self._ask(number, ("step", action))

    def finish(self, number: int) -> None:
        """Let an episode end; its last turn comes by `poll`."""
        self._ask(number, ("finish",))

    def _ask(self, number: int, request: tuple[Any, ...]) -> None:
        self._waiting.append((number, pickle.dumps(request)))
        self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self._calls) < self.most:
            number, request = self._waiting.popleft()
            self._calls[number] = _Call(memoryview(request), time.monotonic() + self.seconds)
            self._selector.register(
                self._sockets[number], selectors.EVENT_READ | selectors.EVENT_WRITE, number
            )

    def poll(self, seconds: float = 0.0) -> list[tuple[int, Turn | CallError]]:
        """The episodes that answered since the last call, with their turns. Waits up to `seconds`
        for the first one. An episode whose call failed, by an exception, its time, its process or
        an invalid reply, has ended."""
        found, last = list[tuple[int, Turn | CallError]](self._failed), time.monotonic() + seconds
        self._failed.clear()
        while self._calls:
            now = time.monotonic()
            ends = min(call.end for call in self._calls.values())
            for key, events in self._selector.select(
                0 if found else max(0.0, min(ends, last, now + 1) - now)
            ):
                with suppress(BlockingIOError):
                    if (turn := self._move(key.data, events)) is not None:
                        found.append((key.data, turn))
            now = time.monotonic()
            late = [number for number, call in self._calls.items() if call.end <= now]
            found += [
                (n, self._fail(n, f"took longer than {self.seconds:g} s (--environment_timeout)"))
                for n in late
            ]
            self._begin()
            heartbeat()
            if found or now >= last:
                break
        return found

    def _move(self, number: int, events: int) -> Turn | CallError | None:
        """Write and read what the socket of an episode takes and holds; its turn, once that is
        complete."""
        call, ours = self._calls[number], self._sockets[number]
        try:
            if events & selectors.EVENT_WRITE:
                call.unsent = call.unsent[ours.send(call.unsent) :]
                if not call.unsent:
                    self._selector.modify(ours, selectors.EVENT_READ, number)
            if events & selectors.EVENT_READ:
                part = ours.recv(2**20)
                if not part:
                    raise ConnectionResetError
                call.reply += part
        except (BrokenPipeError, ConnectionResetError):
            self._require_server()
            return self._fail(number, ENDED + " (a crash, os._exit, or out of memory)")
        # the first line of an episode is its process group
        if number not in self._groups and b"\n" in call.reply:
            group, _, call.reply = call.reply.partition(b"\n")
            self._groups[number] = int(group)
        if len(call.reply) > MOST_BYTES:
            return self._fail(number, f"its reply is longer than {MOST_BYTES >> 20} MiB")
        if not call.reply.endswith(b"\n"):
            return None
        try:
            turn = Turn(**_value_of(bytes(call.reply)))
        except CallError as problem:
            return self._fail(number, str(problem))
        except (TypeError, ValueError):
            return self._fail(number, "its process sent an invalid reply")
        self._end_call(number)
        return turn

    def _require_server(self) -> None:
        """`RuntimeError` if the server has ended, which ends all its episodes: not an environment
        has failed. It closes its socket before its episodes end."""
        control = select.poll()
        control.register(self._control, select.POLLIN)
        if control.poll(0):  # its end: the server has nothing more to say
            raise RuntimeError(
                f"the process that runs the environments of rank {ranks.rank()} ended (exit code"
                f" {self._process.wait()}; -9: killed or out of memory); run the same command again"
                " to resume"
            )

    def _end_call(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self._selector.unregister(self._sockets[number])

    def _fail(self, number: int, cause: str) -> CallError:
        self._end_call(number)
        self._kill(number)
        self.end(number)
        return CallError(cause)

    def _kill(self, number: int) -> None:
        """Kill the processes of an episode that lives. The number of one that has ended may be
        another's by now; the server kills what that one has started."""
        group = self._groups.get(number)
        lives = select.poll()
        lives.register(self._sockets[number], 0)  # tells whether the other end is closed
        if group is not None and not lives.poll(0):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def end(self, number: int) -> None:
        """End the process of an episode that has answered."""
        self._sockets.pop(number).close()
        self._groups.pop(number, None)

    def end_all(self) -> None:
        """End all episodes, also in the middle of a call."""
        self._waiting.clear()
        self._failed.clear()
        for number, ours in self._sockets.items():
            if number not in self._groups:
                ours.settimeout(1.0)
                with suppress(OSError, ValueError):
                    self._groups[number] = int(ours.recv(2**10).partition(b"\n")[0])
        for number in list(self._sockets):
            self._fail(number, "the rollout has ended")

    def close(self) -> None:
        """End all episodes and the server."""
        self.end_all()
        self._selector.close()
        self._control.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _value_of(line: bytes) -> Any:
    """The value of a reply; `CallError` with the cause that it reports."""
    try:
        [(kind, value)] = json.loads(line).items()
    except (ValueError, AttributeError):
        raise CallError("its process sent an invalid reply" if line else ENDED) from None
    if kind == "error":
        raise CallError(str(value))
    return value


def main(control: int, names: str) -> None:
    """In the server: import the user's file, and fork an episode for each socket that arrives."""
    outlive_signals()
    parent = socket.socket(fileno=control)
    with attempt(also_exits=True) as tried:
        given = json.loads(names)
        form = form_of(**given)
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            raise RuntimeError(
                "importing it starts CUDA, which forked processes cannot use; start it in reset"
            )
    with parent.makefile("wb", buffering=0) as replies:
        # a fork takes time for each page of its parent
        if tried.problem is None and (process := os.fork()) == 0:
            with attempt(also_exits=True) as tried:
                _reply(replies, "value", form.tools)
            if tried.problem is not None:
                _reply(replies, "error", cause_of(tried.problem, None))
            os._exit(0)
        if tried.problem is not None:
            return _reply(replies, "error", cause_of(tried.problem, None))
        if os.waitpid(process, 0)[1]:
            return None
    file = given.get("agent") or (given.get("environment") or "").rpartition(":")[0]
    own = os.path.abspath(file) if file else None
    gc.freeze()  # so that a collection in an episode writes to none of the pages it shares
    begun = set[int]()

    def reap(*_: Any) -> None:
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):  # there is none
            while (ended := os.waitid(os.P_ALL, 0, how)) is not None:
                with suppress(ProcessLookupError):  # what it has started; its number is still taken
                    os.killpg(ended.si_pid, signal.SIGKILL)
                os.waitpid(ended.si_pid, 0)
                begun.discard(ended.si_pid)

    signal.signal(signal.SIGCHLD, reap)
    while True:
        _, numbers, *_ = socket.recv_fds(parent, 1, 1)
        if not numbers:  # the trainer has ended
            for process in begun:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)  # with all that the environment has started
            return None
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # until `begun` knows it
        process = _fork_episode(form, parent, numbers[0], own)
        if process > 0:
            begun.add(process)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.close(numbers[0])


def _fork_episode(form: Form, parent: socket.socket, number: int, own: str | None) -> int:
    """The id of a new process, which runs one episode at the socket `number`; -1 if there can be
    none: its episode finds the socket closed."""
    try:
        process = os.fork()
    except OSError:
        return -1
    if process == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        parent.close()
        # a stop of all processes leaves the episode alone
        os.register_at_fork(after_in_child=restore_signals)
        signal_when_parent_ends(signal.SIGKILL)
        os.setsid()
        _serve(form, socket.socket(fileno=number), own)
        os.killpg(0, signal.SIGKILL)  # with all that the environment has started
    return process


def _serve(form: Form, trainer: socket.socket, own: str | None) -> None:
    """Run one episode until the trainer closes its socket. Causes name the line of the file
    `own`."""
    process, environment = os.getpid(), None
    with trainer.makefile("rb") as requests, trainer.makefile("wb", buffering=0) as replies:
        replies.write(b"%d\n" % process)
        while True:
            try:
                method, *arguments = pickle.load(requests)
            except (EOFError, OSError):  # OSError: the trainer has ended the episode
                break
            with attempt(also_exits=True) as tried:
                environment = environment or form.make()
                reply = (
                    json.dumps({"value": asdict(getattr(environment, method)(*arguments))}).encode()
                    + b"\n"
                )
            if os.getpid() != process:  # a fork of the user's code returned
                os._exit(1)
            if tried.problem is not None:
                reply = json.dumps({"error": cause_of(tried.problem, own)}).encode() + b"\n"
            try:
                replies.write(reply)
            except OSError:
                break


def _reply(replies: socket.SocketIO, kind: str, value: Any) -> None:
    replies.write(json.dumps({kind: value}).encode() + b"\n")
