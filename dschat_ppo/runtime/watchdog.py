"""The watchdog: a thread of each rank that ends a hanging run and logs the stacks of all ranks.

It checks three things: whether this rank makes progress (`heartbeat`), whether another rank has failed
(`FirstFailureRecord`), and whether the process of another rank of this machine has ended. It passes stop requests on to
the other ranks of this machine. C code that holds the GIL blocks this thread. Then faulthandler's own thread, which
needs no GIL, writes the stacks and ends the process a little later with exit code 1, the only one that it supports.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import NoReturn

from dschat_ppo.common import heartbeat, ranks
from dschat_ppo.common.dead_terminal import leave_dead_terminal
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import training_has_started, where
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime.exit_codes import HOW_TO_RESUME, RANK_LOST
from dschat_ppo.runtime.first_failure import FirstFailureRecord
from dschat_ppo.runtime.rank_log import log_path, write_to_log

POLL_SECONDS = 0.5
_STOPPED_SECONDS = 2.0  # this thread has not run for so long: the process was stopped
_STACKS_SECONDS = 5.0  # for all ranks to notice and to write their stacks: the first one to end ends the others
_FAULTHANDLER_SECONDS = 10.0  # after the limit, when all other ranks have written
_REARM_SECONDS = 1.0
LOST_SECONDS = 5.0  # for the main thread to notice by itself that a rank is lost
FAILED_SECONDS = 10.0  # for the main thread to end by itself when another rank has failed


class _Watchdog:
    """The thread. `limit`: seconds without progress that are allowed; None: any number."""

    def __init__(self, record: FirstFailureRecord):
        self.record = record
        self.limit: float | None = None
        self._stop_is_known = False  # all ranks of this machine know of the stop request
        self._ended = threading.Event()
        self._arming = threading.Lock()
        self._armed_at = -math.inf
        self._since: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def set_limit(self, seconds: float) -> None:
        """Measure the time without progress from now on."""
        self.limit = seconds
        heartbeat.on_heartbeat(self._arm)
        heartbeat.heartbeat()

    def end(self) -> None:
        """End the thread and disarm faulthandler."""
        self._ended.set()
        heartbeat.on_heartbeat(None)
        with self._arming:
            faulthandler.cancel_dump_traceback_later()
        self._thread.join()

    def _arm(self, now: float) -> None:
        """Restart faulthandler's timer, at most once a second; cancel it inside `watchdog_paused`."""
        if self.limit is None or not self._arming.acquire(blocking=False):
            return
        try:
            if heartbeat.watchdog_is_paused():
                faulthandler.cancel_dump_traceback_later()
                self._armed_at = -math.inf
            elif now - self._armed_at >= _REARM_SECONDS:
                faulthandler.dump_traceback_later(self.limit + _FAULTHANDLER_SECONDS, exit=True, file=2)
                self._armed_at = now
        finally:
            self._arming.release()

    def _run(self) -> None:
        polled = time.monotonic()
        while not self._ended.wait(POLL_SECONDS):
            now = time.monotonic()
            if now - polled > _STOPPED_SECONDS:
                heartbeat.note_stop(now - polled)
            polled = now
            leave_dead_terminal()
            self._pass_on_stop_request()
            # for two polls: after a suspension the other ranks need one to report their progress
            hangs = self._has_lasted("hangs", self._hangs(), 2 * POLL_SECONDS)
            first = self.record.read()
            is_stopping = first is not None and not first.code
            if hangs and (first is None or is_stopping):
                first = self.record.record(RANK_LOST, hung=True)
            if first is None:
                if self._has_lasted("lost", bool(self.record.lost_ranks()), LOST_SECONDS):
                    self._end_without_lost_rank()
            elif first.hung or (hangs and is_stopping):
                self._end_with_stacks(is_stopping or first.rank == ranks.rank())
            elif first.code and first.rank != ranks.rank() and self._has_lasted("failed", True, FAILED_SECONDS):
                # another rank has failed, and the main thread does not end: it waits in a collective of a GPU
                write_to_log(f"ends because rank {first.rank} failed\n{_stacks()}")
                self._leave(first.code)

    def _pass_on_stop_request(self) -> None:
        """Needed because the launcher sends its signal to one rank and waits for its end before it signals the next."""
        if self._stop_is_known or (stop_requests.reason() is None and not self.record.stop_requested()):
            return
        self._stop_is_known = True
        self.record.request_stop()
        stop_requests.set_flag()
        if ranks.is_main():
            then = "the state is saved after this optimizer step"
            if not training_has_started():
                then = "the run ends before training begins, with nothing to save"
            logger().info(f"stopping ({stop_requests.reason()}): {then}; a second Ctrl-C ends the run at once")

    def _hangs(self) -> bool:
        """Whether no rank of this machine makes progress. A rank may wait for another one that makes progress."""
        if self.limit is None:
            return False
        if heartbeat.idle_seconds() < 2 * POLL_SECONDS:
            self.record.mark_progress()
        if min(heartbeat.idle_seconds(), self.record.seconds_since_progress()) > self.limit:
            return True
        if self.record.seconds_since_progress() < 2 * POLL_SECONDS:
            self._arm(heartbeat.running_clock())
        return False

    def _has_lasted(self, name: str, is_true: bool, seconds: float) -> bool:
        """Whether the named condition has been true for this long."""
        if not is_true:
            self._since.pop(name, None)
            return False
        return time.monotonic() - self._since.setdefault(name, time.monotonic()) >= seconds

    def _end_without_lost_rank(self) -> NoReturn:
        """The process of another rank was killed, and the main thread of this rank has not noticed."""
        lost = ", ".join(map(str, self.record.lost_ranks()))
        first = self.record.record(RANK_LOST)
        text = f"rank {ranks.rank()}: another rank is gone (rank {lost}; {where()}): the run ends; {HOW_TO_RESUME}\n"
        if first.rank == ranks.rank():
            _write_to_stderr(text)
        write_to_log(text + _stacks())
        self._leave(first.code)

    def _leave(self, code: int) -> NoReturn:
        self.record.leave()
        os._exit(code)

    def _end_with_stacks(self, prints: bool) -> NoReturn:
        """Write the stacks of this rank to its log, and also to stderr if it `prints` them, and end."""
        text = f"rank {ranks.rank()} has made no progress for {heartbeat.idle_seconds():.0f} s: {where()}\n{_stacks()}"
        # before anything is written: the disk that holds the log may be the one that hangs
        timer = threading.Timer(_STACKS_SECONDS, self._leave, [RANK_LOST])
        timer.daemon = True
        timer.start()
        if prints:
            logs = log_path()
            _write_to_stderr(text + (f"(the stacks of all ranks are in {logs.parent})\n" if logs else ""))
        write_to_log(text)
        faulthandler.cancel_dump_traceback_later()  # not earlier: C code may take the GIL again
        timer.join()
        self._leave(RANK_LOST)


_WATCHDOGS: list[_Watchdog] = []  # one at most


def watch_ranks(record: FirstFailureRecord) -> None:
    """Start the thread: from here on this rank ends when another rank has failed or is lost."""
    stop()
    _WATCHDOGS.append(_Watchdog(record))


def start(seconds: float) -> None:
    """End the run when a rank sends no `heartbeat` for this long outside `watchdog_paused`, with exit code 5. Every
    rank of this machine then writes its phase, its step and the stacks of all its threads to its log, the first one
    also to stderr."""
    if not _WATCHDOGS:
        watch_ranks(FirstFailureRecord(None))
    _WATCHDOGS[-1].set_limit(seconds)


def stop() -> None:
    """End the thread, if it runs."""
    while _WATCHDOGS:
        _WATCHDOGS.pop().end()


def _stacks() -> str:
    """The stacks of all threads but this one, innermost frame first, the main thread last."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read().decode(errors="replace").rstrip().split("\n\n")
    return "\n\n".join(thread for thread in threads if not thread.startswith("Current thread")) + "\n"


def _write_to_stderr(text: str) -> None:
    """Write in one call, so that lines of other ranks do not come between."""
    with suppress(OSError):  # nobody reads any more (a closed pipe or terminal)
        sys.stderr.flush()
        os.write(2, text.encode(errors="backslashreplace"))
