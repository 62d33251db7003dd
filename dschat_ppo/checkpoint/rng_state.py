"""The RNG state of this process: every global random stream, for a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from dschat_ppo.common.dist import on_gpu


def capture_rng_state() -> dict[str, Any]:
    """The state of the global streams of Python, numpy and torch (CPU and GPUs), in the form of `save_state`."""
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
        "gpus": torch.cuda.get_rng_state_all() if on_gpu() else [],
        "gpu": torch.cuda.current_device() if on_gpu() else 0,
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set the global streams to the state of `capture_rng_state`.

    With another number of GPUs only this rank's own GPU gets its stream back. If only the state or only the machine has
    GPUs, their streams stay.
    """
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["normal"]))
    words = legacy["words"].numpy().astype(np.uint32)
    np.random.set_state((legacy["kind"], words, legacy["position"], legacy["has_normal"], legacy["normal"]))
    torch.set_rng_state(state["torch"])
    if not state["gpus"] or not on_gpu():
        return
    if len(state["gpus"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["gpus"])
    else:
        torch.cuda.set_rng_state(state["gpus"][state["gpu"]])
