"""The worker process that runs a reward function. Started by `worker_pool.Worker`; imports no large library.

Requests arrive on standard input: pickled keyword arguments, one call after another. Replies leave on the original
standard output, a line of JSON each: the trainer unpickles nothing that a worker wrote. The function itself gets an
empty standard input, and its prints go to standard error.

The kernel kills the process when the trainer ends for any reason. It ignores SIGTERM and SIGINT: DeepSpeed's launcher
sends SIGTERM to all its descendants when the run is to stop, and the trainer still needs the rewards of its last step.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from dschat_ppo.common.own_functions import cause_of, load
from dschat_ppo.common.processes import leave_dead_terminal, signal_when_parent_ends
from dschat_ppo.errors import attempt
from dschat_ppo.rewards.call_forms import LOGGERS, Returned, Signature, describe, returned_rows


def main(where: str, name: str, settings: str) -> None:
    """Serve the function `name` of a file or module. `settings`: as JSON."""
    signal_when_parent_ends(signal.SIGKILL)
    outlive_signals()
    os.register_at_fork(after_in_child=restore_signals)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")  # descriptors are not inherited
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    process = os.getpid()

    def reply(kind: str, value: Any) -> None:
        if os.getpid() != process:  # a fork of the function returned: its reply would shift later ones
            os._exit(1)
        print(json.dumps({kind: value}), file=replies, flush=True)

    file = os.path.abspath(where)  # messages name its line
    with attempt(also_exits=True) as tried:
        function = load(where, name)
        signature = describe(function, json.loads(settings))
    if tried.problem is not None:  # the trainer reports it
        return reply("error", cause_of(tried.problem, file))
    reply("value", asdict(signature))
    loop = asyncio.new_event_loop()
    while True:
        try:
            arguments = pickle.load(requests)
        except EOFError:
            return None
        leave_dead_terminal()  # a print of the function would fail
        with attempt(also_exits=True) as tried:
            reply("value", _call(function, signature, arguments, loop))
        if tried.problem is not None:  # a failed call costs its rows, not the run
            reply("error", cause_of(tried.problem, file))


def _call(
    function: Callable[..., Any], signature: Signature, arguments: dict[str, Any], loop: asyncio.AbstractEventLoop
) -> list[Returned]:
    logged: dict[str, Any] = {}
    if signature.form == "trl":
        arguments = dict.fromkeys(filter(signature.wants, LOGGERS), logged.__setitem__) | arguments
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = loop.run_until_complete(result)
    return returned_rows(result, signature.call.per_row, logged)


def outlive_signals() -> None:
    """Handle SIGTERM and SIGINT by doing nothing. `SIG_IGN` would be inherited by programs started from here."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def restore_signals() -> None:
    """Default handlers in processes that the function forks: `multiprocessing` ends its pools by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
