"""A GPU that is there and that torch cannot use: a run would take the CPU, at a hundredth of the speed.

python -m dschat_ppo.run.unused_gpu        exit code 2 and one line if there is such a GPU; needs torch alone
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from dschat_ppo.errors import UserError

DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")  # a container sees the driver of its host, but only the devices that it was given


def require_usable_gpu(driver: Path = DRIVER, devices: Path = DEVICES) -> None:
    """Check that torch can use the NVIDIA GPUs of this machine, if it has any, unless the user asks for the CPU.
    `DS_ACCELERATOR=cpu`, DeepSpeed's choice of the device, and an empty `CUDA_VISIBLE_DEVICES` ask for it. `driver` is
    the file in which the driver writes its version; `devices` has the devices `nvidia0`, `nvidia1`, ..."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    if not driver.exists() or not any(devices.glob("nvidia[0-9]*")):
        return
    import torch

    if torch.cuda.is_available():
        return
    found = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", driver.read_text(encoding="utf-8", errors="replace"))
    version = found[1] if found else "of unknown version"
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
    raise UserError(
        f"this machine has a GPU with driver {version}, and torch {torch.__version__} is built {built} and cannot use "
        "it: install a build of torch for this driver (setup_venv.sh with TORCH_INDEX_URL, after .venv is removed), or "
        "set DS_ACCELERATOR=cpu to run on the CPU"
    )


if __name__ == "__main__":
    try:
        require_usable_gpu()
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
