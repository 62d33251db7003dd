"""Processes of episodes. One server process of a rank imports the user's file once; each episode is
a fork of it, so a call that hangs, crashes or fills the memory ends one episode. The rank asks and
polls: it never waits while it can decode other rows.

Requests are pickled; replies are lines of JSON, because the trainer unpickles nothing that such a
process wrote.
"""

from __future__ import annotations

import gc
import json
import math
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from dschat_ppo.common import ranks
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.own_functions import cause_of, load_callable
from dschat_ppo.common.processes import signal_when_parent_ends
from dschat_ppo.errors import attempt
from dschat_ppo.features.environments.environments import EnvironmentForm, Turn
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
    "from dschat_ppo.features.environments.episode_processes import main; "
    "main(*sys.argv[2:])"
)
# what makes the form of the episodes in the server, MODULE:FUNCTION
_ENVIRONMENTS = "dschat_ppo.features.environments.environment_forms:environment_form"


Reply = TypeVar("Reply")


@dataclass(eq=False)
class _Call:
    """A request of an episode in progress. Its time ends at `end`, or, while it stands, has
    `seconds_left`."""

    unsent: memoryview
    end: float
    seconds_left: float | None = None
    reply: bytearray = field(default_factory=bytearray)


class Episodes(Generic[Reply]):
    """The processes of one rank. A call takes at most `seconds`; at most `most` calls run at a
    time, others wait.

    Args:
        names: arguments of the form.
        seconds, most: as above.
        reply: of its fields the replies are made.
        form: MODULE:FUNCTION of what makes the form, in the server.

    `tools`: JSON schemas of what the environment offers to the model. `CallError`: the user's file
    cannot be used.
    """

    def __init__(
        self,
        names: Mapping[str, Any],
        seconds: float,
        most: int,
        reply: Callable[..., Reply] = Turn,  # type: ignore[assignment]
        form: str = _ENVIRONMENTS,
    ):
        self.seconds = seconds
        self.most = most
        self.reply = reply
        self._control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START_CODE,
                json.dumps([*sys.path, os.getcwd()]),
                str(theirs.fileno()),
                json.dumps(dict(names)),
                form,
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        self._sockets = dict[int, socket.socket]()  # by index of the episode
        self._groups = dict[int, int]()  # its process group
        self._waiting = deque[tuple[int, bytes]]()
        self._calls = dict[int, _Call]()
        self._failed = list[tuple[int, CallError]]()
        self._has_woken = False  # whether a watched file could be read
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a file for each episode
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        self._selector = selectors.DefaultSelector()
        try:
            self._control.settimeout(START_SECONDS)
            with self._control.makefile("rb") as file:
                self.tools: list[dict[str, Any]] = _value_of(file.readline())
        except (CallError, TimeoutError) as problem:
            self.close()
            cause = str(problem)
            if isinstance(problem, TimeoutError):
                cause = f"was not imported within {START_SECONDS:g} s"
            raise CallError(cause) from None

    def start(
        self,
        episode_index: int,
        row: dict[str, Any],
        seed: int,
        prompt: str = "",
        messages: list[Any] | None = None,
    ) -> None:
        """Begin an episode; its first turn comes by `poll`."""
        self.begin(episode_index, "reset", row, seed, prompt, messages)

    def begin(self, episode_index: int, method: str, *arguments: Any) -> None:
        """Begin an episode by a call of a method; the reply comes by `poll`."""
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError as problem:
            self._require_server()
            self._failed.append(
                (episode_index, CallError(f"could not be started ({problem.strerror})"))
            )
            return
        ours.setblocking(False)
        self._sockets[episode_index] = ours
        self._ask(episode_index, (method, *arguments))

    def step(self, episode_index: int, action: dict[str, Any]) -> None:
        """Send the model's message to an episode; the turn that answers it comes by `poll`."""
        self._ask(episode_index, ("step", action))

    def finish(self, episode_index: int) -> None:
        """Let an episode end; its last turn comes by `poll`."""
        self._ask(episode_index, ("finish",))

    def _ask(self, episode_index: int, request: tuple[Any, ...]) -> None:
        self._waiting.append((episode_index, pickle.dumps(request)))
        self._begin_calls()

    def _begin_calls(self) -> None:
        """Let waiting calls begin, until as many run as may."""
        while self._waiting and len(self._calls) < self.most:
            episode_index, request = self._waiting.popleft()
            end = time.monotonic() + self.seconds
            self._calls[episode_index] = _Call(memoryview(request), end)
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.register(self._sockets[episode_index], events, episode_index)

    @property
    def running(self) -> set[int]:
        """The episodes whose calls run, without those that wait for others to end."""
        return set(self._calls)

    def watch(self, file: socket.socket) -> None:
        """Let `poll` wait for this file too: it returns once that can be read."""
        self._selector.register(file, selectors.EVENT_READ)

    def stop_clock(self, episode_index: int) -> None:
        """Let the time of an episode's call stand."""
        call = self._calls.get(episode_index)
        if call is not None and call.seconds_left is None:
            call.seconds_left = call.end - time.monotonic()
            call.end = math.inf

    def start_clock(self, episode_index: int) -> None:
        """Let the time of an episode's call go on."""
        call = self._calls.get(episode_index)
        if call is not None and call.seconds_left is not None:
            call.end = time.monotonic() + call.seconds_left
            call.seconds_left = None

    def poll(self, seconds: float = 0.0) -> list[tuple[int, Reply | CallError]]:
        """The episodes that answered since the last call, with their turns. Waits up to `seconds`
        for the first one, or for a watched file. An episode whose call failed, by an exception, its
        time, its process or an invalid reply, has ended."""
        answers = list[tuple[int, Reply | CallError]](self._failed)
        self._failed.clear()
        last = time.monotonic() + seconds
        self._has_woken = False
        while self._calls:
            answers += self._exchange(0.0 if answers else last - time.monotonic())
            answers += self._fail_late_calls()
            self._begin_calls()
            heartbeat()
            if answers or self._has_woken or time.monotonic() >= last:
                break
        return answers

    def _exchange(self, seconds: float) -> list[tuple[int, Reply | CallError]]:
        """Write and read what the sockets take and hold now, or within `seconds`, or one second, or
        until a call is late; the calls that this ends."""
        now = time.monotonic()
        first_end = min(call.end for call in self._calls.values())
        seconds = max(0.0, min(first_end - now, seconds, 1.0))
        answers = list[tuple[int, Reply | CallError]]()
        for key, events in self._selector.select(seconds):
            if key.data is None:  # a watched file
                self._has_woken = True
                continue
            with suppress(BlockingIOError):
                turn = self._move(key.data, events)
                if turn is not None:
                    answers.append((key.data, turn))
        return answers

    def _fail_late_calls(self) -> list[tuple[int, Reply | CallError]]:
        """End the episodes whose call takes too long."""
        now = time.monotonic()
        late = [index for index, call in self._calls.items() if call.end <= now]
        cause = f"took longer than {self.seconds:g} s (--environment_timeout)"
        return [(index, self._fail(index, cause)) for index in late]

    def _move(self, episode_index: int, events: int) -> Reply | CallError | None:
        """Write and read what the socket of an episode takes and holds; its turn, once that is
        complete."""
        call = self._calls[episode_index]
        ours = self._sockets[episode_index]
        try:
            if events & selectors.EVENT_WRITE:
                call.unsent = call.unsent[ours.send(call.unsent) :]
                if not call.unsent:
                    self._selector.modify(ours, selectors.EVENT_READ, episode_index)
            if events & selectors.EVENT_READ:
                received = ours.recv(2**20)
                if not received:
                    raise ConnectionResetError
                call.reply += received
        except (BrokenPipeError, ConnectionResetError):
            self._require_server()
            return self._fail(episode_index, ENDED + " (a crash, os._exit, or out of memory)")
        # the first line of an episode is its process group
        if episode_index not in self._groups and b"\n" in call.reply:
            group, _, call.reply = call.reply.partition(b"\n")
            self._groups[episode_index] = int(group)
        if len(call.reply) > MOST_BYTES:
            return self._fail(episode_index, f"its reply is longer than {MOST_BYTES >> 20} MiB")
        if not call.reply.endswith(b"\n"):
            return None
        try:
            turn = self.reply(**_value_of(bytes(call.reply)))
        except CallError as problem:
            return self._fail(episode_index, str(problem))
        except (TypeError, ValueError):
            return self._fail(episode_index, "its process sent an invalid reply")
        self._end_call(episode_index)
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

    def _end_call(self, episode_index: int) -> None:
        if self._calls.pop(episode_index, None) is not None:
            self._selector.unregister(self._sockets[episode_index])

    def _fail(self, episode_index: int, cause: str) -> CallError:
        self._end_call(episode_index)
        self._kill(episode_index)
        self.end(episode_index)
        return CallError(cause)

    def _kill(self, episode_index: int) -> None:
        """Kill the processes of an episode that lives. The id of one that has ended may be
        another's by now; the server kills what that one has started."""
        group = self._groups.get(episode_index)
        lives = select.poll()
        lives.register(self._sockets[episode_index], 0)  # tells whether the other end is closed
        if group is not None and not lives.poll(0):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def end(self, episode_index: int) -> None:
        """End the process of an episode that has answered."""
        self._sockets.pop(episode_index).close()
        self._groups.pop(episode_index, None)

    def end_all(self) -> None:
        """End all episodes, also in the middle of a call."""
        self._waiting.clear()
        self._failed.clear()
        for episode_index, ours in self._sockets.items():
            if episode_index not in self._groups:
                ours.settimeout(1.0)
                with suppress(OSError, ValueError):
                    self._groups[episode_index] = int(ours.recv(2**10).partition(b"\n")[0])
        for episode_index in list(self._sockets):
            self._fail(episode_index, "the rollout has ended")

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
    if not line:
        raise CallError(ENDED)
    try:
        [(kind, value)] = json.loads(line).items()
    except (ValueError, AttributeError):
        raise CallError("its process sent an invalid reply") from None
    if kind == "error":
        raise CallError(str(value))
    return value


def main(control: str, names: str, form_name: str) -> None:
    """In the server: import the user's file, and fork an episode for each socket that arrives.

    `control`: the socket to the trainer. `names`: the arguments of the form's function, as JSON.
    `form_name`: MODULE:FUNCTION of that.
    """
    outlive_signals()
    trainer = socket.socket(fileno=int(control))
    with attempt(also_exits=True) as tried:
        flags = json.loads(names)
        module, _, function = form_name.partition(":")
        form: EnvironmentForm = load_callable(module, function)(**flags)
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            raise RuntimeError(
                "importing it starts CUDA, which forked processes cannot use; start it in reset"
            )
    if tried.problem is not None:
        with trainer.makefile("wb", buffering=0) as replies:
            _send_reply(replies, "error", cause_of(tried.problem, None))
        return
    if not _describe_tools(form, trainer):
        return
    named = flags.get("environment") or flags.get("function") or ""
    user_file = flags.get("agent") or named.rpartition(":")[0]
    if user_file:
        user_file = os.path.abspath(user_file)
    gc.freeze()  # so that a collection in an episode writes to none of the pages it shares
    episodes = set[int]()  # process ids
    signal.signal(signal.SIGCHLD, lambda *_: _reap_episodes(episodes))
    while True:
        _, descriptors, *_ = socket.recv_fds(trainer, 1, 1)
        if not descriptors:  # the trainer has ended
            for process in episodes:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)  # with all that the environment has started
            return
        # until `episodes` knows it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        process = _fork_episode(form, trainer, descriptors[0], user_file or None)
        if process > 0:
            episodes.add(process)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.close(descriptors[0])


def _describe_tools(form: EnvironmentForm, trainer: socket.socket) -> bool:
    """Send the JSON schemas of the tools to the trainer, or why there are none. Returns whether the
    process that did it ended well. It is a fork, because describing functions imports transformers,
    and every later fork takes time for each page of its parent."""
    with trainer.makefile("wb", buffering=0) as replies:
        process = os.fork()
        if process == 0:
            with attempt(also_exits=True) as tried:
                _send_reply(replies, "value", form.tools)
            if tried.problem is not None:
                _send_reply(replies, "error", cause_of(tried.problem, None))
            os._exit(0)
    _, status = os.waitpid(process, 0)
    return status == 0


def _reap_episodes(episodes: set[int]) -> None:
    """Forget the processes of episodes that have ended, and kill what they have started."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):  # there is none
        while True:
            ended = os.waitid(os.P_ALL, 0, how)
            if ended is None:
                return
            with suppress(ProcessLookupError):  # its id is still taken
                os.killpg(ended.si_pid, signal.SIGKILL)
            os.waitpid(ended.si_pid, 0)
            episodes.discard(ended.si_pid)


def _fork_episode(
    form: EnvironmentForm, trainer: socket.socket, descriptor: int, user_file: str | None
) -> int:
    """The id of a new process, which runs one episode at the socket `descriptor`; -1 if there can
    be none: its episode finds the socket closed. `trainer`: the server's socket, which the process
    closes. `user_file`: see `_serve_episode`."""
    try:
        process = os.fork()
    except OSError:
        return -1
    if process == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        trainer.close()
        # a stop of all processes leaves the episode alone
        os.register_at_fork(after_in_child=restore_signals)
        signal_when_parent_ends(signal.SIGKILL)
        os.setsid()
        _serve_episode(form, socket.socket(fileno=descriptor), user_file)
        os.killpg(0, signal.SIGKILL)  # with all that the environment has started
    return process


def _serve_episode(form: EnvironmentForm, trainer: socket.socket, user_file: str | None) -> None:
    """Run one episode until the trainer closes its socket. Causes name the line of
    `user_file`."""
    process = os.getpid()
    environment = None
    with trainer.makefile("rb") as requests, trainer.makefile("wb", buffering=0) as replies:
        replies.write(b"%d\n" % process)
        while True:
            try:
                method, *arguments = pickle.load(requests)
            except (EOFError, OSError):  # OSError: the trainer has ended the episode
                break
            with attempt(also_exits=True) as tried:
                environment = environment or form.make()
                turn = getattr(environment, method)(*arguments)
                reply = json.dumps({"value": asdict(turn)})
            if os.getpid() != process:  # a fork of the user's code returned
                os._exit(1)
            if tried.problem is not None:
                reply = json.dumps({"error": cause_of(tried.problem, user_file)})
            try:
                replies.write(reply.encode() + b"\n")
            except OSError:
                break


def _send_reply(replies: socket.SocketIO, kind: str, value: Any) -> None:
    replies.write(json.dumps({kind: value}).encode() + b"\n")
