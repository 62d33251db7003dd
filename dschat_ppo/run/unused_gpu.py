"""A GPU that is there and that torch cannot use: a run would take the CPU, at a hundredth of the
speed.

python -m dschat_ppo.run.unused_gpu        exit code 2 and one line if there is such a GPU; needs
torch alone
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dschat_ppo.errors import UserError

DEVICES = Path("/dev")  # a container has the devices that it was given


def cpu_is_asked_for() -> bool:
    """By `DS_ACCELERATOR=cpu`, DeepSpeed's choice of the device, or by an empty
    `CUDA_VISIBLE_DEVICES`."""
    return os.environ.get("DS_ACCELERATOR") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in (
        "",
        "-1",
    )


def require_usable_gpu(devices: Path = DEVICES) -> None:
    """Check that torch can use the NVIDIA GPUs of this machine, if it has any (`devices` has
    `nvidia0`, ...), unless the CPU is asked for."""
    if cpu_is_asked_for() or not any(devices.glob("nvidia[0-9]*")):
        return
    import torch

    if torch.cuda.is_available():
        return
    built = "for CPUs only"
    if torch.version.cuda:
        built = f"for CUDA {torch.version.cuda}"
    raise UserError(
        f"this machine has a GPU, and torch {torch.__version__} is built {built} and cannot use it:"
        " install a build of torch for its driver, which nvidia-smi names (setup_venv.sh with"
        " TORCH_INDEX_URL, after .venv is removed), or set DS_ACCELERATOR=cpu to run on the CPU"
    )


if __name__ == "__main__":
    try:
        require_usable_gpu()
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
