"""Timing, memory and hardware limits for the benchmarks, the commands that they run, and where
their results go.

Contenders alternate within one run, so other load on the machine affects them alike.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from dschat_ppo.common.phases import PhaseClock

ROOT = Path(__file__).resolve().parent.parent
# "seconds": of result.json
MEASURED = ("time", "seconds", "memory/", "agent/own_seconds", "agent/idle_share")


@dataclass(frozen=True)
class Cost:
    """Medians: `wall` seconds with all threads, and `cpu` seconds of the process with one
    thread."""

    wall: float
    cpu: float


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of PyTorch threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wait() -> None:
    """Wait until the GPU, if there is one, is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def costs(
    contenders: Mapping[str, Callable[[], object]], repeats: int, most_threads: int
) -> dict[str, Cost]:
    """Run every contender in turn, `repeats` times each with one thread and with `most_threads`;
    medians.

    Wall seconds of each run go to stderr, to show progress.
    """
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(1, repeats + 1):
        for name, run in contenders.items():
            with threads(1):
                start = time.process_time()
                run()
                cpu[name].append(time.process_time() - start)
            with threads(most_threads):
                start = time.perf_counter()
                run()
                wait()
                wall[name].append(time.perf_counter() - start)
            print(
                f"  {name}: run {number} of {repeats}, {wall[name][-1]:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    return {
        name: Cost(statistics.median(wall[name]), statistics.median(cpu[name]))
        for name in contenders
    }


def peak_memory(run: Callable[[], object]) -> float:
    """Peak memory of a run in GiB, without the memory in use before it."""
    gc.collect()
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
    else:
        # return freed memory to the system: it would hide the peak of this run
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = psutil.Process().memory_info().rss
    clock = PhaseClock()
    with clock.phase("run"):
        run()
    return clock.peak_gib["run"] - before / 2**30


def seconds(run: Callable[[], object]) -> float:
    """Wall time until the device is idle."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def read_bandwidth(device: torch.device) -> float:
    """Memory read bandwidth in bytes per second: the best of five sums over a large tensor."""
    tensor = torch.ones(2**27 if device.type == "cpu" else 2**30, device=device)
    return tensor.nbytes / min(seconds(tensor.sum) for _ in range(5))


def matmul_rate(
    device: torch.device,
    rows: int,
    width: int,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Floating-point operations per second of a product (rows, width) x (width, columns) of random
    numbers: the best of six."""
    left = torch.randn((rows, width), device=device).to(dtype)
    right = torch.randn((width, columns), device=device).to(dtype)
    return 2 * rows * width * columns / min(seconds(lambda: left @ right) for _ in range(6))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_docs(file: Path, text: str, marks: tuple[str, str]) -> None:
    """Put a table between the marks of a file."""
    before, rest = file.read_text(encoding="utf-8").split(marks[0])
    after = rest.split(marks[1])[1]
    file.write_text(f"{before}{marks[0]}\n\n{text}\n\n{marks[1]}{after}", encoding="utf-8")


def publish(
    found: object, text: str, marks: tuple[str, str], json_file: Path | None, docs: Path | None
) -> None:
    """Print the results as JSON and as a table, and write them to files if these are given."""
    print(json.dumps(found))
    print(text)
    if json_file:
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    if docs:
        write_docs(docs, text, marks)


def free_port() -> int:
    """A port below those that systems give to connections, so that no other launch takes it
    meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def launcher(ranks: int) -> list[str]:
    """The command that starts ranks, before the script; each has a port of its own."""
    words = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks)]
    return [*words, "--master_port", str(free_port())]


def environment(tree: Path = ROOT, **more: str) -> dict[str, str]:
    """Variables of a command that runs the code of `tree` with one thread a process."""
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    paths["PYTHONPATH"] = f"{tree}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, **paths, "OMP_NUM_THREADS": "1", **more}


def logged(command: list[str], log: Path, folder: Path, env: dict[str, str]) -> str:
    """Run a command in `folder`, its output in `log`; returns that. `SystemExit` with its end if it
    fails."""
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    said = log.read_text(encoding="utf-8", errors="replace")
    if code:
        end = "\n".join(said.splitlines()[-25:])
        raise SystemExit(f"{end}\nexit code {code}; the whole log is {log}")
    return said


def metrics_of(output: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` without what measures the machine."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [without_times(json.loads(line)) for line in lines]


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    """A line without what measures the machine."""
    return {name: value for name, value in line.items() if not name.startswith(MEASURED)}
