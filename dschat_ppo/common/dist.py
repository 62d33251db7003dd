"""Ranks and the few collectives that the project needs. Every rank calls them in the same order."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from dschat_ppo.common.progress import patient
from dschat_ppo.common.rendezvous import address_of
from dschat_ppo.common.stopping import helpers_may_end
from dschat_ppo.errors import UserError

TIMEOUT = timedelta(hours=6)  # the other ranks wait at a barrier while the first one prepares the data


def world_size() -> int:
    """Number of ranks: known before `init` too, from the launcher's environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process among all ranks."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process among the ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of ranks on this machine."""
    return int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")))


def is_main() -> bool:
    """True on rank 0, the one that writes and prints."""
    return rank() == 0


def init(folder: str = "") -> torch.device:
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

    from dschat_ppo.common.op_builds import guard_builds  # which logs, and so needs the rank

    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(local_rank())
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
    return device()


def _unlink_shared_memory() -> None:
    """Take the name of this rank's all-reduce buffer away, once every rank has mapped it.

    DeepSpeed makes one of 66 MiB in /dev/shm for each rank on a CPU and leaves it there when the process ends; memory
    without a name is given back by the kernel, however the process ends.
    """
    barrier()
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank()}").unlink(missing_ok=True)


def device() -> torch.device:
    """This rank's device, once `init` has run."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def shutdown() -> None:
    """Leave the process group, if one was joined."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def barrier() -> None:
    """Wait for all ranks."""
    if torch_dist.is_initialized():
        torch_dist.barrier()


def all_reduce(value: Tensor, op: str = "sum") -> Tensor:
    """`value` reduced over all ranks by "sum" or "max". A new tensor of the same shape and dtype."""
    result = value.clone()
    if torch_dist.is_initialized() and world_size() > 1:
        torch_dist.all_reduce(result, op=getattr(torch_dist.ReduceOp, op.upper()))
    return result


def gather_cat(value: Tensor) -> Tensor:
    """All ranks' tensors, of one shape and dtype, concatenated along dimension 0 in rank order."""
    if not torch_dist.is_initialized() or world_size() == 1:
        return value
    parts = [torch.empty_like(value) for _ in range(world_size())]
    torch_dist.all_gather(parts, value.contiguous())
    return torch.cat(parts)


def broadcast_object(value: Any) -> Any:
    """Rank 0's picklable `value`, on every rank."""
    if not torch_dist.is_initialized() or world_size() == 1:
        return value
    box = [value]
    torch_dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's picklable `value`, in rank order, on every rank."""
    if not torch_dist.is_initialized() or world_size() == 1:
        return [value]
    box: list[Any] = [None] * world_size()
    torch_dist.all_gather_object(box, value)
    return box


def first_problem(problem: str | None) -> str | None:
    """What the first rank that has a problem says of it, on every rank; None if no rank has one. Collective."""
    return next((found for found in gather_objects(problem) if found), None)


@contextmanager
def main_rank_of_node_first() -> Iterator[None]:
    """The block runs on each machine's first rank, then on its others, which find its files.

    If the first rank fails, the others still run the block, so that all fail alike and none waits for ever. The
    watchdog has patience with all of it; `TIMEOUT` is the limit.
    """
    with patient():
        if local_rank() != 0:
            barrier()
        try:
            yield
        finally:
            if local_rank() == 0:
                barrier()
