"""Timing, memory and limits for the benchmarks. Contenders alternate in one run, so a busy minute hits them alike."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from dschat_ppo.common.phases import PhaseClock


@dataclass(frozen=True)
class Cost:
    """Medians: `wall` seconds with all threads, `cpu` seconds of the process with one thread."""

    wall: float
    cpu: float


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, PyTorch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wait() -> None:
    """Until a GPU has done what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def costs(contenders: Mapping[str, Callable[[], object]], repeats: int, most_threads: int) -> dict[str, Cost]:
    """Run every contender `repeats` times with one thread and with `most_threads`, by turns; medians.

    Wall seconds of each go to stderr: a sign of life.
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
    """Most GiB that a run holds beyond what the process (or the GPU) held before."""
    gc.collect()
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # give back what earlier runs freed, or it would hide this one's
        before = psutil.Process().memory_info().rss
    clock = PhaseClock()
    with clock.phase("run"):
        run()
    return clock.peak_gib["run"] - before / 2**30


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second at which memory can be read: the best of five sums over a large tensor."""
    tensor = torch.ones(2**27 if device.type == "cpu" else 2**30, device=device)
    return tensor.nbytes / _best(tensor.sum)


def matmul_rate(device: torch.device, width: int) -> float:
    """Floating point operations per second of a large bf16 product with inner dimension `width`."""
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
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
