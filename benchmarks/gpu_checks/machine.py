"""What this machine can do, and what attention costs at shapes it has not seen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import transformers
from measure import read_bandwidth, wait

from dschat_ppo.run.process_group import init_process_group
from gpu_checks.run_part import Findings

LENGTHS, ROWS = range(700, 1070, 37), 8


def limits(found: Findings, tiny: bool) -> None:
    """Versions, bandwidth, matrix products and attention, with the settings of a run."""
    device = init_process_group()
    found.add("versions", {
        "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "transformers": transformers.__version__, "deepspeed": deepspeed.__version__,
    })  # fmt: skip
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found.add("device", {
            "name": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability(),
            "gib": total / 2**30, "free_gib": free / 2**30,
        })  # fmt: skip
    found.measure("read_tb_s", lambda: read_bandwidth(device) / 1e12)
    found.measure("matmul_tflop_s", lambda: matmul_rate(device, tiny) / 1e12)
    found.measure("attention", lambda: attention(device, [length // 16 for length in LENGTHS] if tiny else LENGTHS))


def matmul_rate(device: torch.device, tiny: bool) -> float:
    """Floating-point operations per second of a bf16 matrix product of random numbers: the best of five."""
    width = 128 if tiny else 8192
    left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))

    def seconds() -> float:
        return _seconds(lambda _: left @ right, 0)

    seconds()
    return 2 * width**3 / min(seconds() for _ in range(5))


def attention(device: torch.device, lengths: Any) -> dict[str, Any]:
    """Milliseconds of forward and backward (8 rows, 14 heads over 2, width 64, bf16), and the kernels that ran."""

    def run(length: int) -> None:
        query = torch.randn(ROWS, 14, length, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        key, value = (torch.randn(ROWS, 2, length, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out.sum().backward()

    run(64)
    times = {name: statistics.median(_seconds(run, n) for n in lengths) for name in ("new_shape", "known_shape")}
    with torch.profiler.profile() as profiler:
        run(lengths[0])
        wait()
    names = {event.key[:80] for event in profiler.key_averages()}
    kernels = sorted(name for name in names if any(word in name.lower() for word in ("flash", "cudnn", "fmha")))
    return {f"{name}_ms": 1e3 * seconds for name, seconds in times.items()} | {"kernels": kernels[:8]}


def _seconds(run: Callable[[int], object], length: int) -> float:
    wait()
    start = time.perf_counter()
    run(length)
    wait()
    return time.perf_counter() - start
