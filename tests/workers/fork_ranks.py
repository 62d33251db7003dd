"""Forks ranks from one process that has imported the libraries, which costs a process about seven seconds.

fork_ranks.py      reads a line of JSON for each launch, answers each with its exit code, and ends with its input

    a launch: {"ranks": number, "port": number, "script": path, "words": [text, ...], "env": name -> text,
        "folder": path where it runs, "stdin": path, "out": path, "err": path, "timeout": seconds, after which the exit
        code is -SIGALRM, "end": number of the signal that the other ranks get if one fails}
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn, TextIO

from dschat_ppo.common.processes import signal_when_parent_ends

IMPORTED = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imports the compiler of torch
    "dschat_ppo.ppo.train_ppo",
    "dschat_ppo.supervised.sft",
    "dschat_ppo.supervised.train_preference",
    "peft",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
)


def redirect(stdin: str, out: str, err: str) -> None:
    """Standard input from a file, output and error to the ends of files, below Python too."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number, path, flags in ((0, stdin, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        file = os.open(path, flags | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)


def run_rank(rank: int, launch: dict) -> None:
    """Run the script as `__main__` with the environment of a rank; ends the process with its exit code."""
    signal_when_parent_ends(signal.SIGKILL)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": launch["ranks"], "LOCAL_WORLD_SIZE": launch["ranks"]}
    os.environ.update({key: str(number) for key, number in numbers.items()})
    os.environ.update(launch["env"], MASTER_ADDR="127.0.0.1", MASTER_PORT=str(launch["port"]))
    redirect(launch["stdin"], launch["out"], launch["err"])
    os.chdir(launch["folder"])
    run_script(launch["script"], [f"--local_rank={rank}", *launch["words"]])


def run_script(script: str, words: list[str]) -> None:
    """Run a script as `__main__`; ends the process with its exit code."""
    code = 1
    try:
        sys.argv = [script, *words]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  the top level of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_launch(launch: dict) -> NoReturn:
    """Start the ranks and wait for them; the first that fails ends the others. Ends the process with its exit code.

    A process of its own, so that the ranks of each launch have a parent that they share with no other launch.
    """
    signal_when_parent_ends(signal.SIGKILL)
    signal.alarm(launch["timeout"])  # ends this process, and with it the ranks
    ranks = []
    for rank in range(launch["ranks"]):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            run_rank(rank, launch)
    end_with(ranks, launch["end"])


def end_with(ranks: list[int], number: int) -> NoReturn:
    """Wait for these processes; the first that fails ends the others by a signal. Ends the process with its code."""
    failed = 0
    while ranks:
        ended, status = os.wait()
        if ended not in ranks:
            continue  # a process that a rank left behind
        ranks.remove(ended)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            for rank in ranks:
                os.kill(rank, number)
    os._exit(failed % 256)


def import_libraries() -> TextIO:
    """Import what the ranks need, and return the file for answers."""
    signal_when_parent_ends(signal.SIGKILL)  # the tests are interrupted
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the ranks share these pages
    return answers


def fork_for_each_line(run: Callable[[dict], NoReturn]) -> Iterator[int]:
    """For each line of input, the process that was forked to run its JSON."""
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            run(json.loads(line))
        yield process


def main() -> None:
    answers = import_libraries()
    for process in fork_for_each_line(run_launch):
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()
