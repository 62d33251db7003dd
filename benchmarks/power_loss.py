"""Power losses: the file system of a run loses, at one instant, everything that is not synced.

The disk is an ext4 image, mounted through a loop device. `FS_IOC_SHUTDOWN` without a flush of the journal stops it at
once: content that is only in the page cache is lost, as in a power loss. When it is mounted again it replays its
journal. ext4's own repair of programs that forget to sync (`auto_da_alloc`) is off.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
from fault_outcomes import finished, left_over, resumed_at, same_outputs, saved_steps
from measure import markdown

MARKS = ("<!-- power -->", "<!-- /power -->")
FS_IOC_SHUTDOWN, WITHOUT_A_FLUSH = 0x8004587D, 2
IMAGE_BYTES = 2**29
MODES = ("data=ordered", "data=writeback", "data=ordered,nodelalloc", "data=writeback,nodelalloc")
EVENTS = {  # files that appear on the disk, in this order; a cut follows one of them after some time
    "the prepared data": "**/*.arrow",
    "config.yaml": "output/config.yaml",
    "metrics.jsonl": "output/metrics.jsonl",
    "the first checkpoint": "output/checkpoints/step_000001",
    "the third checkpoint": "output/checkpoints/step_000003",
    "the exported model": "output/**/model.safetensors*",
    "result.json": "output/result.json",
}
LONGEST_DELAY = 2.5


class Starter(Protocol):
    """Starts the runs: `Bench`."""

    work: Path

    def start_step(self, step: int, output: Path, env: dict[str, str], log: Path) -> subprocess.Popen[str]:
        """Start a run of a step with these environment variables; `log` receives its output."""


@dataclass(frozen=True)
class Moment:
    """`delay` seconds after the files of `event` exist."""

    event: str
    delay: float

    def __str__(self) -> str:
        return f"{self.delay:.1f} s after {self.event}"


@dataclass(frozen=True)
class Cuts:
    """A run of a step that loses power at each of these moments, one start after another."""

    step: int
    moments: tuple[Moment, ...]
    mode: str
    commit: int  # seconds after which ext4 commits names to its journal

    def __str__(self) -> str:
        return f"step {self.step}, {', then '.join(map(str, self.moments))}"


@dataclass(frozen=True)
class Loss:
    """The result of the cuts of a run. `files`: number of files that lost bytes; `code`: of the last start."""

    cuts: Cuts
    files: int
    steps_lost: int
    code: int
    equal: bool

    @property
    def survived(self) -> bool:
        return self.code == 0 and self.steps_lost == 0 and self.equal


class Disk:
    """An ext4 file system in a file.

    Args:
        image: the file; it is overwritten.
        place: where it is mounted.
        options: of `mount`.
    """

    def __init__(self, image: Path, place: Path, options: str):
        self.image, self.place, self.options = image, place, options
        place.mkdir(exist_ok=True)
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
        self.mount()

    def mount(self) -> None:
        options = f"loop,noauto_da_alloc,{self.options}"
        subprocess.run(["mount", "-o", options, str(self.image), str(self.place)], check=True, capture_output=True)

    def unmount(self) -> None:
        """Wait until no process uses it, then unmount."""
        for _ in range(100):
            if subprocess.run(["umount", str(self.place)], check=False, capture_output=True).returncode == 0:
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

    def has_new(self, pattern: str, begun: float) -> bool:
        """Whether a file that matches the pattern was written since then."""
        with suppress(OSError):  # it is renamed just now
            return any(path.stat().st_mtime >= begun for path in self.place.glob(pattern))
        return False

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
    """Whether file systems can be mounted and shut down here."""
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


def draw(seed: int, count: int) -> list[Cuts]:
    """Runs of step 3 and step 1 by turns, with `count` cuts in all; every fifth run loses power twice."""
    drawn, runs, left = random.Random(seed), list[Cuts](), count
    while left:
        number = len(runs)
        events = drawn.sample(list(EVENTS), min(left, 2 if number % 5 == 4 else 1))
        events = [list(EVENTS)[number % len(EVENTS)]] if len(events) == 1 else sorted(events, key=list(EVENTS).index)
        moments = tuple(Moment(event, drawn.uniform(0, LONGEST_DELAY)) for event in events)
        runs.append(Cuts(1 if number % 2 else 3, moments, drawn.choice(MODES), drawn.choice((1, 5))))
        left -= len(moments)
    return runs


def end(process: subprocess.Popen[str]) -> None:
    """Kill every process of the run: the machine is off."""
    for one in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            one.send_signal(signal.SIGKILL)
    process.wait()


def run_until(process: subprocess.Popen[str], moment: Moment, disk: Disk) -> None:
    """Wait for the moment, or for the end of the run, then cut."""
    begun = time.time()
    while process.poll() is None and not disk.has_new(EVENTS[moment.event], begun):
        time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        process.wait(moment.delay)


def meet(bench: Starter, cuts: Cuts, whole: Path, number: int) -> Loss:
    """Cut the power of the run at each moment, run the same command to its end, and compare.

    Args:
        bench: starts the runs.
        cuts: the moments.
        whole: outputs of the same step without a cut.
        number: of the run, for its files.
    """
    log = bench.work / f"power_{number:02d}.log"
    # A new image for each run: a loop device that still holds the last image would be mounted instead.
    disk = Disk(bench.work / f"image_{number:02d}", bench.work / "disk", f"{cuts.mode},commit={cuts.commit}")
    output, env = disk.place / "output", {"HF_HOME": str(disk.place / "hf"), "TMPDIR": str(disk.place / "tmp")}
    files = lost = 0
    try:
        (disk.place / "tmp").mkdir()
        os.sync()
        for moment in cuts.moments:
            process = bench.start_step(cuts.step, output, env, log)
            run_until(process, moment, disk)
            done, before = finished(output), disk.content()
            disk.cut()
            end(process)
            left_over(str(disk.place), timeout=0)
            disk.unmount()
            disk.mount()
            after = disk.content()
            files += sum(not after.get(path, b"").startswith(was or b"?") for path, was in before.items())
            saved = saved_steps(_read(log)) if not done else 0
            with log.open("a", encoding="utf-8") as said:
                said.write(f"--- power cut {moment} ---\n")
            (disk.place / "tmp").mkdir(exist_ok=True)
        code = bench.start_step(cuts.step, output, env, log).wait()
        lost = 0 if done else max(0, saved - resumed_at(_read(log)))
        return Loss(cuts, files, lost, code, code == 0 and same_outputs(whole, output))
    finally:
        disk.unmount()
        disk.image.unlink()


def _read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def table(losses: Sequence[Loss]) -> str:
    """Markdown: a row for each run."""
    rows = [
        [str(loss.cuts), f"{loss.cuts.mode}, commit={loss.cuts.commit}", str(loss.files), str(loss.code),
         str(loss.steps_lost), "yes" if loss.equal else "no"]
        for loss in losses
    ]  # fmt: skip
    header = [
        "power cut", "ext4", "files that lost bytes", "exit code of the next start", "saved steps lost",
        "metrics and weights equal",
    ]  # fmt: skip
    return markdown(header, rows)


def summary(losses: Sequence[Loss]) -> dict[str, Any]:
    """The content of `--json`."""
    return {
        "injected": sum(len(loss.cuts.moments) for loss in losses),
        "survived": sum(len(loss.cuts.moments) for loss in losses if loss.survived),
        "steps_lost": sum(loss.steps_lost for loss in losses),
        "trajectories_equal": all(loss.equal for loss in losses),
    }
