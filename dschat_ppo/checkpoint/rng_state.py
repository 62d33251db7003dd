"""The state of every random stream of this process, for a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Where the global streams of Python, numpy and torch (the CPU and every GPU) stand, as `save_state` takes it."""
    version, words, python_normal = random.getstate()
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "normal": python_normal},
        "numpy": {
            "kind": str(legacy["bit_generator"]),
            "words": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
            "position": int(legacy["state"]["pos"]),
            "has_normal": int(legacy["has_gauss"]),
            "normal": float(legacy["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "gpus": torch.cuda.get_rng_state_all(),
        "gpu": torch.cuda.current_device() if torch.cuda.is_available() else 0,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the global streams to where `random_state` found them.

    On a machine with another number of GPUs only this rank's own gets its stream back. Where one state has GPUs and
    the other has none, their streams stay as they are.
    """
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["normal"]))
    words = legacy["words"].numpy().astype(np.uint32)
    np.random.set_state((legacy["kind"], words, legacy["position"], legacy["has_normal"], legacy["normal"]))
    torch.set_rng_state(state["torch"])
    if not state["gpus"] or not torch.cuda.is_available():
        return
    if len(state["gpus"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["gpus"])
    else:
        torch.cuda.set_rng_state(state["gpus"][state["gpu"]])
