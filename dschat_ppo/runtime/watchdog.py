"""A thread of each rank that ends a run which no longer gets anywhere, and says where it stands.

It checks three things: whether this rank makes progress (`heartbeat`), whether another rank has already ended the run
(`FirstFailureRecord`), and whether another rank's process is gone. It also passes requests to stop on to other ranks. C
code that holds the interpreter's lock blocks this thread; then faulthandler's own thread, which needs no lock, writes
the stacks and ends the process a little later with exit code 1, the only one that it knows.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import NoReturn

from dschat_ppo.common import dist, heartbeat
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import training_has_begun, where
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime.first_failure import RANK_LOST, TO_GO_ON, FirstFailure, FirstFailureRecord
from dschat_ppo.runtime.rank_log import to_log

POLL_SECONDS = 0.5
_TURN_SECONDS = 0.25  # of each rank, to write its stacks
_LAST_WORDS_SECONDS = 5.0  # after the last turn
_LEAST_SECONDS = 1.0  # to write them, however late it is
_NET_SECONDS = 10.0  # after the limit, when all others have written
_REARM_SECONDS = 1.0
GONE_SECONDS = 5.0  # for the main thread to notice by itself that a rank is gone
FAILED_SECONDS = 10.0  # for the main thread to end by itself when another rank has failed


class _Watch:
    """The thread. `limit`: seconds without progress; None: any time is right."""

    def __init__(self, board: FirstFailureRecord):
        self.board = board
        self.limit: float | None = None
        self._stops = False  # the run is to stop, and everybody knows
        self._stopped = threading.Event()
        self._armed = threading.Lock()
        self._armed_at = -math.inf
        self._since: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, seconds: float) -> None:
        """Count from now."""
        self.limit = seconds
        heartbeat.on_heartbeat(self._arm)
        heartbeat.heartbeat()

    def end(self) -> None:
        """Stop looking."""
        self._stopped.set()
        heartbeat.on_heartbeat(None)
        with self._armed:
            faulthandler.cancel_dump_traceback_later()
        self._thread.join()

    def _arm(self, now: float) -> None:
        """Stretch the net anew, at most once a second; take it away inside `watchdog_paused`."""
        if self.limit is None or not self._armed.acquire(blocking=False):
            return
        try:
            if heartbeat.is_patient():
                faulthandler.cancel_dump_traceback_later()
                self._armed_at = -math.inf
            elif now - self._armed_at >= _REARM_SECONDS:
                faulthandler.dump_traceback_later(self.limit + _NET_SECONDS, exit=True, file=2)
                self._armed_at = now
        finally:
            self._armed.release()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            self._pass_on_stop()
            claim = self.board.claimed()
            if self._nothing_moves() and (claim is None or not claim.code):
                claim = self._claim()
            if claim is not None and claim.hung:
                self._end_with_stacks(claim)
            elif claim is not None and claim.code and claim.rank != dist.rank():
                self._follow(claim)
            elif claim is None and self._lasts("gone", bool(self.board.lost_ranks()), GONE_SECONDS):
                self._say_gone()

    def _pass_on_stop(self) -> None:
        """The launcher sends its signal to one rank and waits for its end before it sends it to the next."""
        if self._stops or (stop_requests.reason() is None and not self.board.asks_to_stop()):
            return
        self._stops = True
        self.board.ask_to_stop()
        stop_requests.tell()
        if dist.is_main():
            then = "the state is saved after this optimizer step"
            if not training_has_begun():
                then = "the run ends before training begins, with nothing to save"
            logger().info(f"stopping ({stop_requests.reason()}): {then}; a second Ctrl-C ends the run at once")

    def _nothing_moves(self) -> bool:
        """Whether no rank of this machine makes progress. One that waits for another that works is all right."""
        if self.limit is None:
            return False
        if heartbeat.idle_seconds() < 2 * POLL_SECONDS:
            self.board.show_progress()
        if min(heartbeat.idle_seconds(), self.board.seconds_since_progress()) > self.limit:
            return True
        if self.board.seconds_since_progress() < 2 * POLL_SECONDS:
            self._arm(time.monotonic())
        return False

    def _claim(self) -> FirstFailure:
        claim = self.board.claim(RANK_LOST, hung=True)
        return claim if claim.code else replace(claim, rank=dist.rank(), code=RANK_LOST, hung=True, when=time.time())

    def _lasts(self, what: str, true: bool, seconds: float) -> bool:
        """Whether something has been true for so long."""
        if not true:
            self._since.pop(what, None)
            return False
        return time.monotonic() - self._since.setdefault(what, time.monotonic()) >= seconds

    def _follow(self, claim: FirstFailure) -> None:
        """Another rank has failed, and this one's main thread does not end (it waits in a collective of a GPU)."""
        if self._lasts("failed", True, FAILED_SECONDS):
            to_log(f"ends because rank {claim.rank} failed\n{_stacks()}")
            self._leave(claim.code)

    def _say_gone(self) -> None:
        """A rank was killed, and this one's main thread has not noticed."""
        lost = ", ".join(map(str, self.board.lost_ranks()))
        claim = self.board.claim(RANK_LOST)
        text = f"rank {dist.rank()}: another rank is gone (rank {lost}; {where()}): the run ends; {TO_GO_ON}\n"
        if claim.rank == dist.rank():
            _to_stderr(text)
        to_log(text + _stacks())
        self._leave(claim.code)

    def _leave(self, code: int) -> NoReturn:
        self.board.leave()
        os._exit(code)

    def _end_with_stacks(self, claim: FirstFailure) -> None:
        """Every rank writes its stacks, one after another, and ends."""
        idle, turns = heartbeat.idle_seconds(), dist.local_world_size()
        first = claim.when + POLL_SECONDS + 0.1  # by then every rank has seen the claim
        end = first + turns * _TURN_SECONDS + _LAST_WORDS_SECONDS
        stacks = _stacks()
        # one that was kept from looking until now (a signal of the launcher wakes it) still says where it was
        timer = threading.Timer(max(_LEAST_SECONDS, end - time.time()), self._leave, [RANK_LOST])
        timer.daemon = True
        timer.start()  # before anything is written: the disk that holds the log may be what hangs
        what = f"makes no progress since {idle:.0f} s"
        if claim.rank != dist.rank() and self.limit is not None and idle < self.limit / 2:
            what = f"ends because rank {claim.rank} makes no progress"
        text = f"rank {dist.rank()} {what}: {where()}\n{stacks}"
        time.sleep(max(0.0, first + dist.local_rank() * _TURN_SECONDS - time.time()))
        _to_stderr(text)
        faulthandler.cancel_dump_traceback_later()  # not before: C code may take the interpreter's lock again
        self.board.mark_told()
        to_log(text)
        time.sleep(max(0.0, end - 0.5 - time.time()))
        for silent in self.board.untold_ranks() if claim.rank == dist.rank() else ():
            _to_stderr(f"rank {silent} does not answer: it runs C code that holds Python's lock, or is stopped\n")
        timer.join()


_WATCH: list[_Watch] = []


def watch(board: FirstFailureRecord) -> None:
    """Start the thread: from here on this rank ends when another one has failed or is gone."""
    stop()
    _WATCH.append(_Watch(board))


def start(seconds: float) -> None:
    """From here on a rank without a `heartbeat` for so long ends the run, unless it is inside `watchdog_paused`.

    Every rank of this machine then writes its phase, its step and the stacks of all its threads to stderr and to its
    log, and ends with exit code 5.
    """
    if not _WATCH:
        watch(FirstFailureRecord(None))
    _WATCH[-1].begin(seconds)


def give_up(text: str, code: int) -> NoReturn:
    """End this process at once, from any thread, with exit code `code` and `text` as the run's message."""
    board = _WATCH[-1].board if _WATCH else FirstFailureRecord(None)
    claim = board.claim(code)
    if claim.rank == dist.rank():
        _to_stderr(text)
    to_log(text)
    os._exit(claim.code)


def stop() -> None:
    """End the thread, if it runs."""
    while _WATCH:
        _WATCH.pop().end()


def _stacks() -> str:
    """The stacks of all threads but this one, innermost frame first, the main thread last."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read().decode(errors="replace").rstrip().split("\n\n")
    return "\n\n".join(thread for thread in threads if not thread.startswith("Current thread")) + "\n"


def _to_stderr(text: str) -> None:
    """In one write, so that other ranks' lines do not come between."""
    sys.stderr.flush()
    os.write(2, text.encode(errors="backslashreplace"))
