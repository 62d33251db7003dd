"""The watchdog: a thread of each rank that ends a hanging run and logs the stacks of all ranks.

It checks whether this rank makes progress (`heartbeat`), and whether another rank of this machine
has failed (`FirstFailureRecord`) or its process has ended, and it passes stop requests on to them.
C code that holds the GIL blocks this thread. Then faulthandler's own thread, which needs no GIL,
writes the stacks and ends the process a little later with exit code 1, the only one that it
supports.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from dschat_ppo.common import heartbeat, ranks, stop_requests
from dschat_ppo.common.exit_codes import DONE, HOW_TO_RESUME, RANK_LOST
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import training_has_started, where
from dschat_ppo.common.processes import leave_dead_terminal
from dschat_ppo.run.first_failure import FirstFailureRecord
from dschat_ppo.run.rank_log import log_path, write_to_log

POLL_SECONDS = 0.5
# for all ranks to notice and to write their stacks: the first one to end ends the others
_STACKS_SECONDS = 5.0
_FAULTHANDLER_SECONDS = 10.0  # after the limit, when all other ranks have written
LOST_SECONDS = 5.0  # for the main thread to notice by itself that a rank is lost
FAILED_SECONDS = 10.0  # for the main thread to end by itself when another rank has failed


class _Watchdog:
    """The thread, once `begin` is called. `limit`: seconds without progress that are allowed; None:
    any number."""

    def __init__(self, record: FirstFailureRecord):
        self.record = record
        self.limit: float | None = None
        self._stop_is_known = False  # all ranks of this machine know of the stop request
        self._ended = threading.Event()
        self._since: dict[str, float] = {}  # name of a condition -> when it became true
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        """What the thread does, until `end`: end this process if the run hangs, or if another rank
        has failed or is lost and the main thread does not end by itself."""
        while not self._ended.wait(POLL_SECONDS):
            self._arm_faulthandler()
            leave_dead_terminal()
            self._pass_on_stop_request()
            # for two polls: after a suspension the other ranks need one to report their progress
            hangs = self._has_lasted("hangs", self._hangs(), 2 * POLL_SECONDS)
            first = self.record.read()
            is_stopping = first is not None and first.code == DONE
            if hangs and (first is None or is_stopping):
                first = self.record.record(RANK_LOST, hung=True)
            if first is None:
                self._end_if_a_rank_is_lost()
            elif first.hung or (hangs and is_stopping):
                text = (
                    f"rank {ranks.rank()} has made no progress for {heartbeat.idle_seconds():.0f}"
                    f" s: {where()}"
                )
                self._end(
                    RANK_LOST, text, prints=is_stopping or first.rank == ranks.rank(), hangs=True
                )
            elif first.code != DONE and first.rank != ranks.rank():
                # another rank has failed, and the main thread does not end: it waits in a
                # collective of a GPU
                if self._has_lasted("failed", True, FAILED_SECONDS):
                    self._end(first.code, f"ends because rank {first.rank} failed")

    def _end_if_a_rank_is_lost(self) -> None:
        """End this process if another one has ended without a record, and the main thread has had
        the time to notice it."""
        lost_ranks = self.record.lost_ranks()
        if self._has_lasted("lost", bool(lost_ranks), LOST_SECONDS):
            first = self.record.record(RANK_LOST)
            text = (
                f"rank {ranks.rank()}: another rank is gone (rank"
                f" {', '.join(map(str, lost_ranks))}; {where()}): the run ends; {HOW_TO_RESUME}"
            )
            self._end(first.code, text, prints=first.rank == ranks.rank())

    def _arm_faulthandler(self) -> None:
        """Restart faulthandler's timer, which expires if this thread cannot run: C code holds the
        GIL."""
        if heartbeat.watchdog_is_paused():
            faulthandler.cancel_dump_traceback_later()
        elif self.limit is not None:
            faulthandler.dump_traceback_later(self.limit + _FAULTHANDLER_SECONDS, exit=True, file=2)

    def _pass_on_stop_request(self) -> None:
        """Let all ranks of this machine know that one of them is to stop. Needed because the
        launcher sends its signal to one rank and waits for its end before it signals the next."""
        if self._stop_is_known or (
            stop_requests.reason() is None and not self.record.stop_requested()
        ):
            return
        self._stop_is_known = True
        self.record.request_stop()
        stop_requests.set_flag()
        if ranks.is_main():
            next_event = "the state is saved after this optimizer step"
            if not training_has_started():
                next_event = "the run ends before training begins, with nothing to save"
            logger().info(
                f"stopping ({stop_requests.reason()}): {next_event}; a second Ctrl-C ends the run"
                " at once"
            )

    def _hangs(self) -> bool:
        """Whether no rank of this machine makes progress. A rank may wait for another one that
        makes progress."""
        if self.limit is None:
            return False
        if heartbeat.idle_seconds() < 2 * POLL_SECONDS:
            self.record.mark_progress()
        return min(heartbeat.idle_seconds(), self.record.seconds_since_progress()) > self.limit

    def _has_lasted(self, name: str, is_true: bool, seconds: float) -> bool:
        """Whether the named condition has been true for this long."""
        if not is_true:
            self._since.pop(name, None)
            return False
        return time.monotonic() - self._since.setdefault(name, time.monotonic()) >= seconds

    def _end(self, code: int, text: str, prints: bool = False, hangs: bool = False) -> NoReturn:
        """Write `text` and the stacks of all threads to this rank's log, `text` to stderr too if it
        `prints`, and end the process. If the run `hangs`, stderr gets the stacks too, and the other
        ranks have time to write theirs."""
        # before anything is written: the disk that holds the log may be the one that hangs
        timer = threading.Timer(_STACKS_SECONDS, self._leave, [code])
        timer.daemon = True
        timer.start()
        if prints:
            with suppress(OSError):  # nobody reads any more (a closed pipe or terminal)
                sys.stderr.flush()
                logs = ""
                log = log_path()
                if hangs and log is not None:
                    logs = f"(the stacks of all ranks are in {log.parent})\n"
                # in one call: lines stay whole
                os.write(2, f"{text}\n{logs}".encode(errors="backslashreplace"))
                if hangs:
                    faulthandler.dump_traceback(2)
        write_to_log(text, stacks=True)
        faulthandler.cancel_dump_traceback_later()  # not earlier: C code may take the GIL again
        if hangs:
            timer.join()
        self._leave(code)

    def _leave(self, code: int) -> NoReturn:
        self.record.leave()
        os._exit(code)


_WATCHDOGS: list[_Watchdog] = []  # one at most


def watch_ranks(record: FirstFailureRecord) -> None:
    """Start the thread: from here on this rank ends when another rank has failed or is lost."""
    stop()
    watchdog = _Watchdog(record)
    watchdog.begin()
    _WATCHDOGS.append(watchdog)


def start(seconds: float) -> None:
    """End the run with exit code 5 when a rank sends no `heartbeat` for this long outside
    `watchdog_paused`. Every rank of this machine then writes its phase, step and stacks to its log,
    the first one also to stderr."""
    if not _WATCHDOGS:
        watch_ranks(FirstFailureRecord())
    heartbeat.heartbeat()  # the time without progress counts from now on
    _WATCHDOGS[-1].limit = seconds


def stop() -> None:
    while _WATCHDOGS:
        _WATCHDOGS.pop().end()
