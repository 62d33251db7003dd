"""Timing, memory and hardware limits for the benchmarks, and where their results go.

Contenders alternate within one run, so other load on the machine affects them alike.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from dschat_ppo.common.phases import PhaseClock


@dataclass(frozen=True)
class Cost:
    """Medians: `wall` seconds with all threads, and `cpu` seconds of the process with one thread."""

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


def costs(contenders: Mapping[str, Callable[[], object]], repeats: int, most_threads: int) -> dict[str, Cost]:
    """Run every contender in turn, `repeats` times each with one thread and with `most_threads`; medians.

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
            print(f"  {name}: run {number} of {repeats}, {wall[name][-1]:.1f} s", file=sys.stderr, flush=True)
    return {name: Cost(statistics.median(wall[name]), statistics.median(cpu[name])) for name in contenders}


def peak_memory(run: Callable[[], object]) -> float:
    """Peak memory of a run in GiB, without the memory in use before it."""
    gc.collect()
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # return freed memory to the system: it would hide the peak of this run
        before = psutil.Process().memory_info().rss
    clock = PhaseClock()
    with clock.phase("run"):
        run()
    return clock.peak_gib["run"] - before / 2**30


def read_bandwidth(device: torch.device) -> float:
    """Memory read bandwidth in bytes per second: the best of five sums over a large tensor."""
    tensor = torch.ones(2**27 if device.type == "cpu" else 2**30, device=device)
    return tensor.nbytes / _best(tensor.sum)


def matmul_rate(device: torch.device, width: int) -> float:
    """Floating-point operations per second of a large bf16 matrix product with inner dimension `width`."""
    left = torch.randn(4096, width, device=device).bfloat16()
    right = torch.randn(width, 2048, device=device).bfloat16()
    return 2 * 4096 * width * 2048 / _best(lambda: left @ right)


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_docs(file: Path, text: str, marks: tuple[str, str]) -> None:
    """Put a table between the marks of a file."""
    before, rest = file.read_text(encoding="utf-8").split(marks[0])
    after = rest.split(marks[1])[1]
    file.write_text(f"{before}{marks[0]}\n\n{text}\n\n{marks[1]}{after}", encoding="utf-8")


def publish(found: object, text: str, marks: tuple[str, str], json_file: Path | None, docs: Path | None) -> None:
    """Print the results as JSON and as a table, and write them to files if these are given."""
    print(json.dumps(found))
    print(text)
    if json_file:
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    if docs:
        write_docs(docs, text, marks)
