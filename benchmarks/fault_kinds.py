"""The kinds of faults that `faults.py` injects, and the functions that cause them from outside the run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil

from dschat_ppo.run.op_builds import TORCH_LOCK, folder_of_environment

STEPS, UPDATES = 4, 4
AWAY_SECONDS = 30


@dataclass(frozen=True)
class Fault:
    """`inject`: the parameters of `faulty_main.py`; `outside`, if any: causes the fault from outside, given the process
    of the command and the output folder; `mend`: repairs the output folder before the second start."""

    name: str
    inject: dict[str, Any] = field(default_factory=dict)
    outside: Callable[[subprocess.Popen[str], Path], None] | None = None
    mend: Callable[[Path], None] | None = None
    disk: str | None = None  # size of a small file system for the outputs
    may_survive: bool = False  # the run may also finish
    silent: bool = False  # the command returns 0 although the run is not finished (DeepSpeed's runner does)


class Service(BaseHTTPRequestHandler):
    """A reward service: the length of each text; nothing but 503 while it is away."""

    away_until = 0.0

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"rewards": [float(len(text)) for text in body["query"]]}).encode()
        self.send_response(503 if time.monotonic() < Service.away_until else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""


def mount(*words: str) -> None:
    """`mount` with these arguments.

    Raises:
        subprocess.CalledProcessError: it is not permitted.
    """
    subprocess.run(["mount", *words], check=True, capture_output=True)


def unmount(place: Path) -> None:
    """Unmount a file system, even if it is in use."""
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def may_mount() -> bool:
    """Whether small file systems can be mounted here."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False
        )
        if done.returncode == 0:
            subprocess.run(["umount", folder], check=False)
        return done.returncode == 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until the condition holds or the process has ended."""
    while not condition() and process.poll() is None:
        time.sleep(0.05)


def after_a_checkpoint(act: Callable[[subprocess.Popen[str], Path], None]) -> Callable[..., None]:
    """Call `act` once the first checkpoint exists."""

    def outside(process: subprocess.Popen[str], output: Path) -> None:
        wait_for((output / "checkpoints/latest").exists, process)
        act(process, output)

    return outside


def launcher_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The process that starts the ranks, below the command."""
    return psutil.Process(process.pid).children()[0]


def take_service_away(process: subprocess.Popen[str], output: Path) -> None:
    Service.away_until = time.monotonic() + AWAY_SECONDS


def wait_for_service(output: Path) -> None:
    time.sleep(max(0.0, Service.away_until - time.monotonic()))


def kill_launcher_of_workers(process: subprocess.Popen[str], output: Path) -> None:
    """SIGKILL of the launcher once a rank has forked a process that prepares data."""

    def prepares() -> bool:
        with suppress(psutil.Error):  # a compiler, say, that has ended meanwhile
            ranks = [rank for launcher in psutil.Process(process.pid).children() for rank in launcher.children()]
            return any(child.cmdline() == rank.cmdline() for rank in ranks for child in rank.children())
        return False

    wait_for(prepares, process)
    launcher_of(process).kill()


def leave_lock(process: subprocess.Popen[str], output: Path) -> None:
    """Leave torch's lock as a killed compilation does, before the ranks load the operator."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or folder_of_environment(), "deepspeed_shm_comm")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TORCH_LOCK).touch()


def start_rival(process: subprocess.Popen[str], output: Path) -> None:
    """Run the same command for another output folder on the same port, and wait for it.

    Raises:
        RuntimeError: it ended neither well nor with a user error.
    """
    words = [word.replace(str(output), f"{output}_rival") for word in psutil.Process(process.pid).cmdline()]
    env = psutil.Process(process.pid).environ()
    with open(f"{output}_rival.log", "w", encoding="utf-8") as log:
        code = subprocess.run(words, env=env, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code not in (0, 2) or code == process.wait():
        raise RuntimeError(f"of two launches on one port exactly one must run; see {log.name}")


def kills(seed: int, count: int) -> list[Fault]:
    """SIGKILL of a rank at places drawn from a seed."""
    draw = random.Random(seed)
    most = {
        "loading": 1, "rollout": STEPS, "scoring": STEPS, "update": STEPS * UPDATES, "saving": 3 * STEPS,
        "committing": STEPS, "pointing": STEPS, "exporting": 1,
    }  # fmt: skip
    found: dict[str, Fault] = {}
    turn = 0
    while len(found) < count:
        place = list(most)[turn % len(most)]
        turn += 1
        rank = 0 if place in ("committing", "pointing") else draw.randrange(2)
        inject = {"rank": rank, "place": place, "count": draw.randint(1, most[place]), "act": "kill"}
        name = f"SIGKILL of rank {rank}, {place} {inject['count']}"
        found[name] = Fault(name, inject)
    return list(found.values())


def others() -> list[Fault]:
    """All other kinds of faults."""
    remount = [
        Fault("disk full", disk="2m", mend=lambda output: mount("-o", "remount,size=64m", str(output))),
        Fault(
            "disk read-only",
            outside=after_a_checkpoint(lambda _, out: mount("-t", "tmpfs", "-o", "ro", "tmpfs", f"{out}/checkpoints")),
            mend=lambda output: unmount(output / "checkpoints"),
        ),
    ]  # fmt: skip
    if not may_mount():
        print("full and read-only disks are left out: file systems cannot be mounted without root", flush=True)
        remount = []
    return [
        Fault("rank 1 raises, update 6", {"rank": 1, "place": "update", "count": 6, "act": "raise"}),
        Fault("rank 0 raises, scoring 2", {"rank": 0, "place": "scoring", "count": 2, "act": "raise"}),
        Fault("rank 1 hangs, rollout 2", {"rank": 1, "place": "rollout", "count": 2, "act": "hang"}),
        Fault("rank 0 hangs, update 3", {"rank": 0, "place": "update", "count": 3, "act": "hang"}),
        *remount,
        Fault("a data worker out of memory", {"rank": 0, "place": "data worker"}),
        Fault(  # there is one such moment, on the rank that prepares for all: nothing to draw
            "SIGKILL of rank 0, preparing 1", {"rank": 0, "place": "preparing", "count": 1, "act": "kill"}
        ),
        Fault(
            f"reward service away for {AWAY_SECONDS} s", outside=after_a_checkpoint(take_service_away),
            mend=wait_for_service, may_survive=True,
        ),
        Fault(
            "SIGTERM to the launcher",
            outside=after_a_checkpoint(lambda process, _: launcher_of(process).send_signal(signal.SIGTERM)),
        ),
        Fault("SIGTERM to the command", outside=after_a_checkpoint(lambda process, _: process.terminate())),
        Fault(
            "SIGKILL of the launcher", outside=after_a_checkpoint(lambda process, _: launcher_of(process).kill()),
            silent=True,
        ),
        Fault(
            "SIGKILL of the launcher, preparing 1", {"rank": 0, "place": "preparing", "count": 1, "act": "hang"},
            outside=kill_launcher_of_workers, silent=True,
        ),
        Fault("a lock of a killed compilation", outside=leave_lock, may_survive=True),
        Fault("a second launch on its port", outside=start_rival, may_survive=True),
    ]  # fmt: skip
