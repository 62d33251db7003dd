"""From `main.py` to a step: exit codes, and who speaks when something is wrong."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from dschat_ppo.common import dist, phases
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import NonFiniteError, StopRequested, UserError
from dschat_ppo.runtime import stop_requests, watchdog
from dschat_ppo.runtime.first_failure import (
    DONE,
    RANK_LOST,
    TO_GO_ON,
    FirstFailureRecord,
    exit_code,
    open_board,
    other_end_is_gone,
)
from dschat_ppo.runtime.rank_log import log_path, to_log

_SPEAKER_HEAD_START_SECONDS = 20


def run_step(parse: Callable[[Sequence[str]], Any], train: Callable[[Any], None], argv: Sequence[str]) -> int:
    """Parse `argv`, train, and return the exit code (`runtime/first_failure.py`).

    However the run ends, the user gets one message. Of `UserError` and `NonFiniteError` it is what the exception says,
    by rank 0; of any other exception the first rank that fails tells rank, phase, step and traceback. Ranks that fail
    after another one keep silent and write their traceback to their log only; they end with the same exit code.
    """
    phases.begin_anew()
    faulthandler.enable(2)
    stop_requests.install()
    board = open_board()
    if board.folder is not None:
        watchdog.watch(board)
    try:
        train(parse(argv))
        dist.shutdown()
        return DONE
    except StopRequested as stop:
        return _stop(board, stop)
    except (UserError, NonFiniteError) as problem:
        return _tell_user(board, problem)
    except (Exception, KeyboardInterrupt) as problem:  # noqa: BLE001  there is nothing above it
        return _fail(board, problem)
    finally:
        watchdog.stop()
        board.leave()


def _stop(board: FirstFailureRecord, stop: StopRequested) -> int:
    board.claim(DONE)
    logger().info(str(stop))
    dist.shutdown()
    return DONE


def _tell_user(board: FirstFailureRecord, problem: UserError | NonFiniteError) -> int:
    """Its message alone. The other ranks give rank 0 some time, because it most often has the same to say."""
    deadline = time.monotonic() + _SPEAKER_HEAD_START_SECONDS
    while not dist.is_main() and board.claimed() is None and time.monotonic() < deadline:
        if stop_requests.requested() and not board.is_present(0):
            return exit_code(problem)  # rank 0 has spoken and is gone, and the launcher ends the others
        heartbeat()
        time.sleep(0.05)
    claim = board.claim(exit_code(problem))
    causes = f"\n{''.join(traceback.format_exception(problem)).rstrip()}" if problem.__cause__ else ""
    to_log(f"error: {problem}{causes}")
    if claim.rank == dist.rank() or claim.code == DONE:
        _speak(f"error: {problem}" if dist.is_main() else f"error on rank {dist.rank()}: {problem}")
    return claim.code or exit_code(problem)


def _fail(board: FirstFailureRecord, problem: BaseException) -> int:
    """Message and traceback, of the first rank that fails; what is no fault of this rank's code needs no traceback."""
    others_fault = other_end_is_gone(problem) or bool(board.lost_ranks())
    code = RANK_LOST if others_fault else exit_code(problem)
    claim = board.claim(code)
    story = "".join(traceback.format_exception(problem)).rstrip()
    told = claim.rank != dist.rank() or claim.hung
    if told and (claim.code != DONE or others_fault):
        to_log(f"ends after rank {claim.rank}:\n{story}")
        return claim.code
    said = f"rank {dist.rank()} failed in {phases.where(' at')}:\n{story}"
    if others_fault:
        said = f"rank {dist.rank()}: another rank is gone ({phases.where()}): the run ends; {TO_GO_ON}"
    elif isinstance(problem, KeyboardInterrupt):
        said = f"rank {dist.rank()} was interrupted a second time ({phases.where()}): the run ends at once; {TO_GO_ON}"
    logs = log_path()
    to_log(said if said.endswith(story) else f"{said}\n{story}")
    _speak(said + (f"\n(the logs of all ranks are in {logs.parent})" if logs else ""))
    return code


def _speak(text: str) -> None:
    """In one write, so that no other rank's lines come between."""
    print(end="", flush=True)
    sys.stderr.write(("\n" if sys.stderr.isatty() else "") + text + "\n")  # the cursor may be behind a progress bar
    sys.stderr.flush()


def leave(code: int) -> NoReturn:
    """End the process with `code` at once, after everything is written.

    DeepSpeed engines hold process groups beyond `destroy_process_group`, and gloo's threads, destroyed while the
    interpreter is torn down, now and then abort a process that has finished its work. So it is not torn down.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
