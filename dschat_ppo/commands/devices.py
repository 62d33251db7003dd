"""The devices of this machine, counted without torch, whose import takes a second."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

AMD = Path("/dev/kfd")
DRIVER = "libcuda.so.1"


def count_gpus() -> int:
    """GPUs that a run may use: `CUDA_VISIBLE_DEVICES` limits them, and `DS_ACCELERATOR=cpu` asks for the CPU."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0
    if AMD.exists():
        import torch

        return torch.cuda.device_count()
    count = ctypes.c_int()
    with suppress(OSError):  # there is no NVIDIA driver
        cuda = ctypes.CDLL(DRIVER)
        if cuda.cuInit(0) == 0:
            cuda.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def visible_devices(ranks: int) -> list[int | str]:
    """The first `ranks` devices, as DeepSpeed's launcher names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names: list[int | str] = [name.strip() for name in named.split(",")] if named not in ("", "-1") else []
    return names[:ranks] if len(names) >= ranks else list(range(ranks))
