"""Join the process group of this launch."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as torch_dist

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.op_builds import guard_builds
from dschat_ppo.runtime.rendezvous import address_of
from dschat_ppo.runtime.stop_requests import helpers_may_end

TIMEOUT = timedelta(hours=6)  # the other ranks wait at a barrier while the first one prepares the data


def init_process_group(folder: str = "") -> torch.device:
    """Join the process group and return this rank's device.

    Under the deepspeed launcher the environment names the group; started by plain `python`, the process becomes a
    group of one on a free port.

    Args:
        folder: the output folder, as the flags name it; it helps to tell launches on one port apart.

    Raises:
        UserError: the port is in use, or another launch has a process group there.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(dist.local_rank())
    guard_builds()
    try:
        with helpers_may_end("joined the ranks"):  # which compiles on a CPU
            backend, address = accelerator.communication_backend_name(), address_of(folder)
            deepspeed.init_distributed(dist_backend=backend, timeout=TIMEOUT, init_method=address)
    except torch_dist.DistNetworkError as problem:
        if "EADDRINUSE" not in str(problem):
            raise
        port = os.environ.get("MASTER_PORT")
        raise UserError(
            f"port {port} of this machine is in use, by another run perhaps: deepspeed --master_port N takes another"
        ) from None
    _unlink_shared_memory()
    return dist.device()


def _unlink_shared_memory() -> None:
    """Take the name of this rank's all-reduce buffer away, once every rank has mapped it.

    DeepSpeed makes one of 66 MiB in /dev/shm for each rank on a CPU and leaves it there when the process ends; memory
    without a name is given back by the kernel, however the process ends.
    """
    dist.barrier()
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{dist.rank()}").unlink(missing_ok=True)
