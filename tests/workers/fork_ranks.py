"""Forks ranks from one process that has imported the libraries, which costs a process about seven
seconds.

fork_ranks.py      reads a line of JSON for each launch, answers with the number of a process, and
ends with its input

    a launch: {"ranks": [environment of a rank, ...], "script": path, "words": [text, ...],
    "folder": where it runs,
        "stdin": path, "out": path, "err": path, "code": path of the file that gets the exit
        code, "end": number of the
        signal that the other ranks get if one fails, "machine": null, or see `enter`}

The process waits for the ranks. A signal to its group reaches all of them, as Ctrl-C does; its end
is theirs.
"""

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn, TextIO

from fixed_dtype import use_bf16_by_default
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import dschat_ppo
from dschat_ppo.common.processes import signal_when_parent_ends

IMPORTED = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "dschat_ppo.ppo.train_ppo",
    "dschat_ppo.supervised.sft",
    "dschat_ppo.supervised.train_preference",
    "peft",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
)
# modules of the package that no run imports, or none without a GPU
NOT_IMPORTED = ("dschat_ppo.__main__", "dschat_ppo.gpu_kernels", "dschat_ppo.tools")
NEW_MOUNTS, NEW_NAME, NEW_MEMORY, NEW_PROCESSES, NETWORK = (
    0x20000,
    0x4000000,
    0x8000000,
    0x20000000,
    0x40000000,
)
PRIVATE, RECURSIVE, BIND = 1 << 18, 1 << 14, 1 << 12
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(source: str, place: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = (
        source.encode(),
        place.encode(),
        kind.encode() or None,
        flags,
        options.encode() or None,
    )
    check(LIBC.mount(*words))


def enter(machine: dict) -> None:
    """Leave the network, names, memory and mounts of this machine, and the processes for children.

    machine: {"space": network namespace, "name": its name, "disk": folder, "place": where it sees
    that folder}
    """
    with open(f"/run/netns/{machine['space']}") as space:
        check(LIBC.setns(space.fileno(), NETWORK))
    check(LIBC.unshare(NEW_MOUNTS | NEW_NAME | NEW_MEMORY | NEW_PROCESSES))
    name = machine["name"].encode()
    check(LIBC.sethostname(name, len(name)))
    mount("none", "/", flags=PRIVATE | RECURSIVE)
    mount("none", "/dev/shm", "tmpfs", options="size=1g")
    mount(f"{machine['disk']}/hosts", "/etc/hosts", flags=BIND)
    mount(machine["disk"], machine["place"], flags=BIND)


def run_rank(number: int, launch: dict) -> NoReturn:
    """Run the script as `__main__` with the environment of a rank; ends the process with its exit
    code."""
    signal_when_parent_ends(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(launch["ranks"][number])
    tempfile.tempdir = None  # which the process before may have looked up
    # DeepSpeed collects for each engine, in a third of the time of small runs
    gc.collect = lambda generation=2: 0
    if launch["machine"]:
        from dschat_ppo.run import first_failure

        first_failure._OWN_FOLDERS = f"dschat_ppo_{os.getuid()}_{launch['machine']['name']}_"
    sys.stdout.flush()
    sys.stderr.flush()
    for file, name, flags in (
        (0, "stdin", os.O_RDONLY),
        (1, "out", os.O_WRONLY),
        (2, "err", os.O_WRONLY),
    ):
        opened = os.open(launch[name], flags | os.O_APPEND)
        os.dup2(opened, file)  # below Python too
        os.close(opened)
    os.chdir(launch["folder"])
    code = 1
    try:
        sys.argv = [launch["script"], f"--local_rank={number}", *launch["words"]]
        runpy.run_path(launch["script"], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  the top level of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_ranks(launch: dict) -> NoReturn:
    """As a launcher: start the ranks and wait for them; the first that fails ends the others, and
    its exit code is that of this process, which no other launch shares."""
    signal_when_parent_ends(signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if launch["machine"]:
        mount("none", "/proc", "proc")
    ranks, failed = [], 0
    for number in range(len(launch["ranks"])):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            run_rank(number, launch)
    while ranks:
        ended, status = os.wait()
        if ended not in ranks:
            continue  # a process that a rank left behind
        ranks.remove(ended)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            for rank in ranks:
                os.kill(rank, launch["end"])
    os._exit(failed % 256)


def run_launch(launch: dict) -> NoReturn:
    """Lead a group for the ranks, and write the exit code."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_when_parent_ends(signal.SIGKILL)
    if launch["machine"]:
        enter(launch["machine"])
    first = os.fork()
    if first == 0:
        run_ranks(launch)
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    draft = Path(launch["code"] + ".draft")
    draft.write_text(str(code))
    draft.rename(launch["code"])
    os._exit(0)


def import_libraries() -> TextIO:
    """Import what the ranks need, and return the file for answers."""
    signal_when_parent_ends(signal.SIGKILL)  # the tests are interrupted
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for name in IMPORTED:
        importlib.import_module(name)
    for module in pkgutil.walk_packages(dschat_ppo.__path__, "dschat_ppo."):
        if not module.name.startswith(NOT_IMPORTED):
            importlib.import_module(module.name)
    importlib.import_module("dschat_ppo.engine.build_engine")._import_muon()
    # transformers builds its table of renamed weights when it loads the first model
    get_checkpoint_conversion_mapping("llama")
    use_bf16_by_default()
    gc.collect()
    gc.freeze()  # the ranks share these pages
    return answers


def main() -> None:
    answers = import_libraries()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the launches
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            run_launch(json.loads(line))
        print(process, file=answers, flush=True)


if __name__ == "__main__":
    main()
