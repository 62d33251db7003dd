"""Step 3 with one fault: `training/step3_ppo/main.py`, but the rank, place and act named in $FAULT go wrong.

$FAULT is JSON: {"rank": 1, "place": "update", "count": 3, "act": "kill"} ends rank 1 by SIGKILL as it begins its third
update. Acts: kill, raise, hang. {} is an ordinary run.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from dschat_ppo.checkpoint import state_files, store
from dschat_ppo.common import dist
from dschat_ppo.config.cli import parse
from dschat_ppo.data import tokenise
from dschat_ppo.ppo import loop, train_ppo
from dschat_ppo.ppo.collect import ExperienceCollection
from dschat_ppo.run.launch import leave, run_step

# place -> (what holds the function, its name)
PLACES: dict[str, tuple[Any, str]] = {
    "preparing": (multiprocessing.connection, "wait"),  # the processes that prepare data have just begun
    "loading": (train_ppo, "RLHFEngine"),
    "rollout": (ExperienceCollection, "sample"),
    "scoring": (ExperienceCollection, "forward_passes"),
    "update": (loop, "update"),
    "saving": (state_files, "_write"),  # in the thread that writes
    "committing": (store.CheckpointFolder, "commit"),  # rank 0 alone: before the checkpoint gets its name
    "pointing": (store, "write_text"),  # rank 0 alone: it has its name, `latest` does not know it yet
    "exporting": (train_ppo, "save_models"),
}


def go_wrong(act: str) -> None:
    """End, fail or hang."""
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "raise":
        raise RuntimeError("injected")
    time.sleep(10**6)


def break_at(place: str, count: int, act: str) -> None:
    """Let the `count`-th call of a place begin with `act`."""
    holder, name = PLACES[place]
    whole: Callable[..., Any] = getattr(holder, name)
    calls = [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            go_wrong(act)
        return whole(*args, **kwargs)

    setattr(holder, name, broken)


def kill_a_data_worker() -> None:
    """As the kernel does when memory is short: one of the processes that tokenise ends by SIGKILL."""
    whole = tokenise.in_processes

    def starve() -> None:
        while True:
            for child in psutil.Process().children(recursive=True):
                if child.name().startswith("python"):
                    child.kill()
                    return
            time.sleep(0.01)

    def in_processes(count: int, *args: Any) -> Any:
        if count > 1:
            threading.Thread(target=starve, daemon=True).start()
        return whole(count, *args)

    tokenise.in_processes = in_processes


def main() -> int:
    """The step, with its fault."""
    fault = json.loads(os.environ.get("FAULT", "{}"))
    if fault.get("rank") == dist.rank():
        if fault["place"] == "data worker":
            kill_a_data_worker()
        else:
            break_at(fault["place"], fault["count"], fault["act"])
    return run_step(lambda argv: parse("ppo", argv), train_ppo.train_ppo, sys.argv[1:])


if __name__ == "__main__":
    leave(main())
