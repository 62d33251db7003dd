"""Where the time of a device goes: the kernels that ran, by group, and how long none ran; and what
runs without Triton's kernels."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measure import wait
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dschat_ppo.models import fast_layers, head_kernels
from dschat_ppo.rollout import decode_kernels

# a group of kernels, and what its names contain; the first that fits counts
KERNEL_GROUPS = {
    "ours": r"^_\w+_kernel",
    "communication": r"nccl",
    "attention": r"flash|fmha|attention",
    "products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|linear|::(add|b)?mm\b",
    "optimizer": r"adam|multi_tensor|foreach",
    "sort and index": r"sort|index|gather|scatter|embedding|nonzero|scan|cumsum",
    "copies": r"memcpy|memset|copy|catarray|::cat\b|fill|zero",
    "sums": r"reduce|softmax|norm|::sum|::max|::mean|::amax",
    "elementwise": r"elementwise|::(add|sub|mul|div|exp|log|where|silu|neg|pow|rsqrt)_?\b",
}
LISTED = 12


def kernel_group(name: str) -> str:
    """The group of a kernel, or of an operation of PyTorch where there is no GPU."""
    for group, pattern in KERNEL_GROUPS.items():
        if re.search(pattern, name.lower()):
            return group
    return "other"


def busy_us(intervals: list[tuple[float, float]]) -> float:
    """Microseconds in which something runs, from the (start, end) of each kernel; two at once count
    once."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class KernelProfile:
    """The kernels that run in `with` blocks of it; on a CPU, PyTorch's operations."""

    def __init__(self) -> None:
        self.wall_us = 0.0
        self.intervals: list[tuple[float, float]] = []
        self.time_us: Counter[str] = Counter()  # by name
        self.launches: Counter[str] = Counter()  # likewise

    def __enter__(self) -> KernelProfile:
        on_gpu = torch.cuda.is_available()
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        self._profile = profile(activities=[activity])
        wait()
        self._profile.__enter__()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *problem: Any) -> None:
        wait()
        self.wall_us += 1e6 * (time.perf_counter() - self._start)
        self._profile.__exit__(*problem)
        device = DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
        for event in self._profile.events():
            if event.device_type != device or event.is_user_annotation:
                continue
            span = event.time_range
            self.intervals.append((span.start, span.end))
            self.launches[event.name] += 1
            if device == DeviceType.CPU:
                self.time_us[event.name] += event.self_cpu_time_total
            else:
                self.time_us[event.name] += span.end - span.start

    def summary(self, launches_per: dict[str, int] | None = None) -> dict[str, Any]:
        """Milliseconds and launches by group, the share of the time in which nothing ran, and the
        names that took longest. `launches_per`: what to divide the launches by, by name."""
        by_group: dict[str, dict[str, float]] = {}
        for name, spent in self.time_us.items():
            group = by_group.setdefault(kernel_group(name), {"ms": 0.0, "launches": 0})
            group["ms"] += spent / 1e3
            group["launches"] += self.launches[name]
        count = self.launches.total()
        summary: dict[str, Any] = {
            "wall_ms": self.wall_us / 1e3,
            "idle_share": 1 - busy_us(self.intervals) / max(1.0, self.wall_us),
            "launches": count,
            "groups": dict(sorted(by_group.items(), key=lambda entry: -entry[1]["ms"])),
            "longest": {
                name[:100]: spent / 1e3 for name, spent in self.time_us.most_common(LISTED)
            },
        }
        for name, times in (launches_per or {}).items():
            summary[f"launches_per_{name}"] = count / max(1, times)
        return summary


@contextmanager
def without_kernels() -> Iterator[None]:
    """In the block, models run without Triton's kernels, as where their comparison fails. What is
    recorded in CUDA graphs before runs as it was recorded."""
    choices = [
        (fast_layers, "_triton_kernels"),
        (head_kernels, "_triton_head_kernels"),
        (decode_kernels, "_triton_decode_kernels"),
    ]
    originals = [getattr(module, name) for module, name in choices]
    for module, name in choices:
        setattr(module, name, lambda *_: None)
    try:
        yield
    finally:
        for (module, name), original in zip(choices, originals, strict=True):
            setattr(module, name, original)
