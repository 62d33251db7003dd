"""From `main.py` to a step: exit codes, and who speaks when something is wrong."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from dschat_ppo.common import dist, stopping
from dschat_ppo.common.phases import current_phase
from dschat_ppo.errors import StopRequested, UserError

USER_ERROR = 2
_SPEAKER_HEAD_START_SECONDS = 20


def run_step(parse: Callable[[Sequence[str]], Any], train: Callable[[Any], None], argv: Sequence[str]) -> int:
    """Parse `argv`, train, and return the exit code: 0, or 2 for an error that is the user's to mend.

    Such an error is one line on rank 0. The other ranks keep silent and wait a little for the launcher to stop them:
    if one of them ended first, the launcher would stop rank 0 before it has spoken. Any other exception propagates
    with its traceback, after a line that names rank and phase.
    """
    try:
        stopping.install()
        with _rank_and_phase_of_failures():
            train(parse(argv))
    except UserError as problem:
        if not dist.is_main():
            time.sleep(_SPEAKER_HEAD_START_SECONDS)
        who = "error" if dist.is_main() else f"error on rank {dist.rank()}"
        print(f"{who}: {' '.join(str(problem).split())}", file=sys.stderr, flush=True)
        return USER_ERROR
    except StopRequested as reason:
        if dist.is_main():
            print(reason, flush=True)
    dist.shutdown()
    return 0


@contextmanager
def _rank_and_phase_of_failures() -> Iterator[None]:
    """Say which rank failed in which phase when an unexpected exception passes through."""
    try:
        yield
    finally:
        kind = sys.exc_info()[0]
        if kind is not None and not issubclass(kind, UserError | SystemExit | StopRequested):
            print(f"rank {dist.rank()} failed in phase '{current_phase()}':", file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End the process with `code` at once, after everything is written.

    DeepSpeed engines hold process groups beyond `destroy_process_group`, and gloo's threads, destroyed while the
    interpreter is torn down, now and then abort a process that has finished its work. So it is not torn down.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
