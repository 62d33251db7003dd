"""Two ranks that reduce a number step by step, until one of them fails as the case says.

failing.py CASE OUT        OUT/ready_R holds rank R's process number once steps go by, OUT/left_R
how it ended
"""

import ctypes
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import deepspeed.accelerator  # noqa: F401  slow: a run imports it before its first phase too
import torch
import torch.distributed as torch_dist

from dschat_ppo.common import dist, heartbeat, stop_requests
from dschat_ppo.common.logging import logger
from dschat_ppo.common.phases import PhaseClock, announce_step
from dschat_ppo.errors import NonFiniteError, StopRequested, UserError
from dschat_ppo.run import rank_log, watchdog
from dschat_ppo.run.launch import leave, run_step

LIMIT = 3.0
READY, FAULT, LAST = 3, 5, 2000  # steps


def hang() -> None:
    while True:
        time.sleep(1)


def hold_the_lock() -> None:
    while True:
        ctypes.PyDLL(None).sleep(1000)


def take_time() -> None:
    """Exceed the watchdog's limit twice, with heartbeats, then with the watchdog paused; then be
    asked to stop. Rank 0 waits."""
    for _ in range(int((LIMIT + 11.0) / 0.1)):
        heartbeat.heartbeat()
        time.sleep(0.1)
    with heartbeat.watchdog_paused():
        time.sleep(LIMIT + 11.0)
    os.kill(os.getpid(), signal.SIGTERM)


def fail(problem: Exception) -> None:
    raise problem


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {  # case: rank, what it does
    "rank 1 raises": (1, lambda: fail(ZeroDivisionError("boom"))),
    "both raise": (None, lambda: fail(NonFiniteError("the loss is nan"))),
    "user error on rank 1": (1, lambda: fail(UserError("--flag: this machine has no such file"))),
    "rank 1 is killed": (1, be_killed),
    "rank 1 hangs": (1, hang),
    "rank 1 holds the lock": (1, hold_the_lock),
    "rank 1 takes its time": (1, take_time),
}


def train(words: list[str]) -> None:
    case, out = words[0], Path(words[1])
    rank_log.open_log(out)
    logger().info("begins")
    torch_dist.init_process_group("gloo")
    watchdog.start(LIMIT)
    who, fault = FAULTS.get(case, (None, None))
    clock = PhaseClock()
    for step in range(1, LAST):
        announce_step(step)
        with clock.phase("update"):
            if fault and step == FAULT and who in (None, dist.rank()):
                fault()
            time.sleep(0.02)
            stop = dist.all_reduce(torch.tensor([float(stop_requests.requested())]), "max")
        if step == READY:
            (out / f"ready_{dist.rank()}").write_text(str(os.getpid()))
        if bool(stop):
            raise StopRequested(f"saved after step {step}; run the same command again to resume")
    raise AssertionError("nothing happened")


def main() -> None:
    words = [word for word in sys.argv[1:] if not re.match("--local_rank", word)]
    code = run_step(lambda argv: argv, train, words)
    (Path(words[1]) / f"left_{dist.rank()}").write_text(
        json.dumps({"code": code, "reason": stop_requests.reason()})
    )
    leave(code)


main()
