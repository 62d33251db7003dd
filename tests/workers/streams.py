"""Runs steps over a stream of chunks of 8 rows, one after another in the same ranks.

streams.py CASES_FILE OUT_FILE

    cases: name -> [step, words, how it ends], where the end is "done", ["stop", N] for a stop request at its Nth check,
        or ["kill", N] for a SIGKILL of every rank after optimizer step N
    out: name -> output
"""

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path

from dschat_ppo.checkpoint.manager import CheckpointManager
from dschat_ppo.common import dist, stop_requests
from dschat_ppo.config.cli import parse
from dschat_ppo.data import streaming
from dschat_ppo.errors import StopRequested
from dschat_ppo.ppo import train_ppo
from dschat_ppo.run import session
from dschat_ppo.run.launch import leave
from dschat_ppo.supervised import sft, train_preference
from workers.quick import be_quick

TRAIN = {"sft": sft.train_sft, "reward": train_preference.train_preferences, "ppo": train_ppo.train_ppo}


def manager_that_dies(step: int) -> type:
    class DyingManager(CheckpointManager):
        def save_if_due(self) -> None:
            super().save_if_due()
            if self._trainer.position[0] == step:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)

    return DyingManager


def main() -> None:
    be_quick()
    streaming.CHUNK_ROWS = 8
    found = {}
    for name, (step, words, end) in json.loads(Path(sys.argv[-2]).read_text()).items():
        checks = iter(range(10**9))
        last = end[1] if end[0] == "stop" else 10**9
        stop_requests.requested = lambda checks=checks, last=last: next(checks) >= last - 1
        session.CheckpointManager = manager_that_dies(end[1]) if end[0] == "kill" else CheckpointManager
        said = io.StringIO()
        print("---", name, flush=True)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(StopRequested):
                TRAIN[step](parse(step, words))
        finally:
            print(said.getvalue(), flush=True)
        found[name] = said.getvalue()
    if dist.is_main():
        Path(sys.argv[-1]).write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
