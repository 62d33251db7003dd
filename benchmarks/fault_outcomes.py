"""What a fault cost a run: processes left over, saved steps lost, different numbers; and power
losses.

In a power loss the file system of a run loses, at one instant, everything that is not synced. The
disk is an ext4 image, mounted through a loop device. `FS_IOC_SHUTDOWN` without a flush of the
journal stops it at once: content that is only in the page cache is lost. When it is mounted again
it replays its journal. ext4's own repair of programs that forget to sync (`auto_da_alloc`) is off.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import re
import signal
import struct
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from measure import markdown, metrics_of
from safetensors.torch import load_file

if TYPE_CHECKING:
    from faults import Bench

POWER_MARKS = ("<!-- power -->", "<!-- /power -->")
CLONE_NEWNS = 0x20000
FS_IOC_SHUTDOWN, WITHOUT_A_FLUSH = 0x8004587D, 2
IMAGE_BYTES = 2**29
MODES = ("data=ordered", "data=writeback", "data=ordered,nodelalloc", "data=writeback,nodelalloc")
RUNS = ("PPO", "SFT, packed")
# files that appear on the disk, in this order; a cut follows one of them after some time
EVENTS = {
    "the prepared data": "**/*.arrow",
    "config.yaml": "output/config.yaml",
    "metrics.jsonl": "output/metrics.jsonl",
    "the first checkpoint": "output/checkpoints/step_000001",
    "the third checkpoint": "output/checkpoints/step_000003",
    "the exported model": "output/**/model.safetensors*",
    "result.json": "output/result.json",
}
LONGEST_DELAY = 2.5


@dataclass(frozen=True)
class Outcome:
    """How the first start of a run ended, and how its second start did.

    `met`: the fault came before the end; `code`: of the first start; `left`: processes and segments
    of shared memory; `steps_lost`: saved, and computed again; `equal`: metrics and weights are
    those of the run without a fault. Of runs with agents: `agents` had ended in the steps that were
    not saved, by the journal; `played_again`: agents that began again beyond those that had to;
    `difference`: the greatest one of weights from those of the run without a fault.
    """

    name: str
    met: bool
    code: int
    left: int
    steps_lost: int
    equal: bool
    agents: int = 0
    played_again: int = 0
    difference: float = 0.0

    @property
    def survived(self) -> bool:
        nothing_again = self.steps_lost == 0 and self.played_again == 0
        return self.left == 0 and nothing_again and self.equal


def left_over(word: str, timeout: float = 40.0) -> int:
    """Processes that still have `word` in their command line or environment after a while; they are
    killed."""
    deadline = time.monotonic() + timeout
    while True:
        found = [process for process in psutil.process_iter() if mentions(process, word)]
        if not found or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    for process in found:
        process.kill()
    return len(found)


def mentions(process: psutil.Process, word: str) -> bool:
    """Whether the command line or the environment of a process has `word`."""
    with suppress(psutil.Error):
        texts = [*process.cmdline(), *process.environ().values()]
        return any(word in text for text in texts)
    return False


def comes_in_time(process: subprocess.Popen[str], folder: Path, pattern: str, delay: float) -> bool:
    """Wait for files and then `delay` seconds; whether the process still runs."""
    while process.poll() is None and not any(folder.glob(pattern)):
        time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        process.wait(delay)
    return process.poll() is None


def is_finished(output: Path) -> bool:
    """Whether the run in this output folder is finished."""
    return (output / "result.json").exists()


def lost_steps(first: str, both: str) -> int:
    """Steps that the first start saved and the second computed again, from the log of the first and
    that of both."""
    saved = re.findall(r"checkpoint step_(\d+)\S*: saved", first)
    resumed = re.findall(r"resuming from .*step_(\d+)", both)
    return max(0, max(map(int, saved), default=0) - (int(resumed[-1]) if resumed else 0))


def same_outputs(one: Path, other: Path) -> bool:
    """Whether metrics and saved weights are equal to the last bit."""
    if metrics_of(one) != metrics_of(other):
        return False
    models, others = (
        {path.relative_to(output) for path in output.rglob("*.safetensors")}
        for output in (one, other)
    )
    if models != others or not models:
        return False
    for model in models:
        first, second = load_file(one / model), load_file(other / model)
        if first.keys() != second.keys() or not all(
            torch.equal(first[name], second[name]) for name in first
        ):
            return False
    return True


def table(outcomes: list[Outcome]) -> str:
    """Markdown: a row for each fault."""
    rows = [
        [
            o.name,
            str(o.code) if o.met else "0 (it had ended)",
            str(o.left),
            str(o.steps_lost),
            "yes" if o.equal else "no",
        ]
        for o in outcomes
    ]
    return markdown(
        ["fault", "exit code", "processes left", "saved steps lost", "equal after resuming"], rows
    )


@dataclass(frozen=True)
class Cut:
    """A run loses power `delay` seconds after the files of `event` exist."""

    run: str
    event: str
    delay: float
    mode: str
    commit: int  # seconds after which ext4 commits names to its journal

    def __str__(self) -> str:
        return (
            f"{self.run}, {self.delay:.1f} s after {self.event} ({self.mode}, commit={self.commit})"
        )


class Disk:
    """An ext4 file system in the file `image`, mounted at `place` with `options` of `mount`."""

    def __init__(self, image: Path, place: Path, options: str):
        self.image, self.place, self.options = image, place, options
        place.mkdir(exist_ok=True)
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
        self.mount()

    def mount(self) -> None:
        options = f"loop,noauto_da_alloc,{self.options}"
        subprocess.run(
            ["mount", "-o", options, str(self.image), str(self.place)],
            check=True,
            capture_output=True,
        )

    def unmount(self) -> None:
        """Wait until no process uses it, then unmount."""
        for _ in range(100):
            if (
                subprocess.run(
                    ["umount", str(self.place)], check=False, capture_output=True
                ).returncode
                == 0
            ):
                return
            time.sleep(0.1)
        subprocess.run(["umount", str(self.place)], check=True)

    def cut(self) -> None:
        """Cut the power: nothing more reaches the disk."""
        number = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(number, FS_IOC_SHUTDOWN, struct.pack("I", WITHOUT_A_FLUSH))
        finally:
            os.close(number)

    def content(self) -> dict[str, bytes]:
        """Path -> content of each file; they are small."""
        found = {}
        for place, _, names in os.walk(self.place):
            for name in names:
                path = Path(place) / name
                with suppress(OSError):  # a run is active, and has sockets
                    found[str(path)] = path.read_bytes()
        return found


def may_cut() -> bool:
    """Whether file systems can be mounted and shut down here. From here on, this process has a
    table of mounts of its own: another process that copied the one of the machine would keep the
    disk mounted, and so shut down, when it is to be mounted again."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0:
        return False
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            disk = Disk(Path(folder) / "image", Path(folder) / "disk", "data=ordered")
        except (OSError, subprocess.CalledProcessError):
            return False
        try:
            disk.cut()
        except OSError:
            return False
        finally:
            disk.unmount()
    return True


def draw_cuts(seed: int, count: int) -> list[Cut]:
    """Cuts after each event by turns, of each run by turns."""
    drawn, events = random.Random(seed), list(EVENTS)
    return [
        Cut(
            RUNS[number % len(RUNS)],
            events[number % len(events)],
            drawn.uniform(0, LONGEST_DELAY),
            drawn.choice(MODES),
            drawn.choice((1, 5)),
        )
        for number in range(count)
    ]


def end(process: subprocess.Popen[str]) -> None:
    """Kill every process of the run: the machine is off."""
    for one in (
        [*psutil.Process(process.pid).children(recursive=True), process]
        if process.poll() is None
        else []
    ):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            one.send_signal(signal.SIGKILL)
    process.wait()


def meet_cut(bench: Bench, cut: Cut, number: int) -> Outcome:
    """Cut the power of the run, run the same command to its end, and compare; `number` names its
    files."""
    whole, log = bench.whole(cut.run), bench.work / f"power_{number:02d}.log"
    # A new image for each run: a loop device that still holds the last image would be mounted
    # instead.
    disk = Disk(
        bench.work / f"image_{number:02d}", bench.work / "disk", f"{cut.mode},commit={cut.commit}"
    )
    output, env = (
        disk.place / "output",
        {"HF_HOME": str(disk.place / "hf"), "TMPDIR": str(disk.place / "tmp")},
    )
    try:
        (disk.place / "tmp").mkdir()
        os.sync()
        process = bench.start(cut.run, output, env, log)
        met = comes_in_time(process, disk.place, EVENTS[cut.event], cut.delay)
        done, before = is_finished(output), disk.content()
        disk.cut()
        end(process)
        left_over(str(disk.place), timeout=0)
        disk.unmount()
        disk.mount()
        after, first = disk.content(), log.read_text(encoding="utf-8", errors="replace")
        files = sum(
            not after.get(path, b"").startswith(was or b"?") for path, was in before.items()
        )
        (disk.place / "tmp").mkdir(exist_ok=True)
        code = bench.start(cut.run, output, env, log).wait()
        lost = 0 if done else lost_steps(first, log.read_text(encoding="utf-8", errors="replace"))
        name = f"{cut}: {files} files lost bytes"
        return Outcome(
            name, met, process.returncode, 0, lost, code == 0 and same_outputs(whole, output)
        )
    finally:
        disk.unmount()
        disk.image.unlink()
