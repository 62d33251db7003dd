"""Ranks and the few collectives that the project needs. Every rank calls them in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor

from dschat_ppo.common.heartbeat import watchdog_paused
from dschat_ppo.common.ranks import (  # noqa: F401  `dist.rank()`
    is_main,
    local_rank,
    local_world_size,
    machines,
    rank,
    world_size,
)
from dschat_ppo.errors import StopRequested, UserError

Result = TypeVar("Result")

# Of every process group: the other ranks wait at a barrier while the first one prepares the data.
# NCCL's own limit is ten minutes.
TIMEOUT = timedelta(hours=6)
# a `torch.distributed.ProcessGroup`, which builds without distributed support do not have
Group = Any

_SHARING = [1]  # ranks that share their rows
# number of ranks that share rows -> this rank's process group of that size
_ROW_GROUPS: dict[int, Any] = {}


def share_rows(ranks: int) -> None:
    """Let each `ranks` neighbouring ranks share their rows, each with a part of the columns.
    Collective, after `init_process_group`; `ranks` divides the number of ranks. Until the first
    call no ranks share rows."""
    if ranks not in _ROW_GROUPS and ranks > 1:
        _ROW_GROUPS[ranks] = group_of(ranks)
    _SHARING[0] = ranks


def ranks_of_row() -> int:
    """Number of ranks that share their rows, each with a part of the columns; usually 1."""
    return _SHARING[0]


def rank_in_row() -> int:
    """The number of this process among the ranks with which it shares its rows."""
    return rank() % ranks_of_row()


def row_group() -> Any:
    """The process group of the ranks with which this process shares its rows; only where these are
    several."""
    return _ROW_GROUPS[ranks_of_row()]


def data_ranks() -> int:
    """Number of ranks with rows that differ: of all ranks, or of their groups where ranks share
    rows."""
    return world_size() // ranks_of_row()


def data_rank() -> int:
    """The number of this process's rows among those of `data_ranks`."""
    return rank() // ranks_of_row()


def device() -> torch.device:
    """This rank's device, after `init_process_group`."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def on_gpu() -> bool:
    """Whether this run computes on GPUs. With `DS_ACCELERATOR=cpu` it does not, and must not touch
    those that torch could use: each process would take memory of one."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cuda")


def shutdown() -> None:
    """Leave the process group, if this process has joined one."""
    _SHARING[0] = 1
    _ROW_GROUPS.clear()
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def barrier() -> None:
    """Wait until all ranks are here."""
    if not torch_dist.is_initialized():
        return
    device_ids = None
    if torch_dist.get_backend() == "nccl":  # it would guess the device, and warn
        device_ids = [torch.cuda.current_device()]
    torch_dist.barrier(device_ids=device_ids)


def group_of(size: int) -> Group:
    """The group of this rank, if all ranks are divided into groups of `size` consecutive ones.
    Collective."""
    firsts = range(0, world_size(), size)
    groups = [torch_dist.new_group(range(first, first + size), timeout=TIMEOUT) for first in firsts]
    return groups[rank() // size]


def all_reduce(value: Tensor, op: str = "sum", group: Group | None = None) -> Tensor:
    """`value` reduced over a group, or all ranks, by "sum" or "max". A new tensor of the same shape
    and dtype."""
    result = value.clone()
    if torch_dist.is_initialized() and world_size() > 1:
        torch_dist.all_reduce(result, op=getattr(torch_dist.ReduceOp, op.upper()), group=group)
    return result


def gather_cat(value: Tensor, group: Group | None = None) -> Tensor:
    """The tensors of a group, or of all ranks, of one shape and dtype, concatenated along dimension
    0 in rank order."""
    if not torch_dist.is_initialized() or world_size() == 1:
        return value
    gathered = [torch.empty_like(value) for _ in range(torch_dist.get_world_size(group))]
    torch_dist.all_gather(gathered, value.contiguous(), group=group)
    return torch.cat(gathered)


def gather_together(values: Sequence[Tensor], group: Group | None = None) -> list[Tensor]:
    """`gather_cat` of each of several tensors, of any dtypes on one device, in a single
    collective."""
    if not torch_dist.is_initialized() or world_size() == 1:
        return list(values)
    packed = torch.cat([value.contiguous().view(-1).view(torch.uint8) for value in values])
    ranks = gather_cat(packed, group).view(-1, packed.numel())  # (ranks, bytes)
    columns = ranks.split([value.nbytes for value in values], dim=1)
    gathered = []
    for value, column in zip(values, columns, strict=True):
        # copied, because bytes in the middle of others may begin where no element of the dtype may
        copy = column.clone(memory_format=torch.contiguous_format).view(-1)
        shape = (len(ranks) * len(value), *value.shape[1:])
        gathered.append(copy.view(value.dtype).view(shape))
    return gathered


def gather_data_cat(value: Tensor) -> Tensor:
    """`gather_cat` of one rank of each group that shares rows, so that each row occurs once."""
    return torch.cat(gather_cat(value).chunk(world_size())[:: ranks_of_row()])


def gather_row_cat(value: Tensor) -> Tensor:
    """`gather_cat` of the ranks with which this process shares its rows."""
    if ranks_of_row() == 1:
        return value
    return gather_cat(value, row_group())


def broadcast(value: Tensor, source: int) -> Tensor:
    """The tensor of rank `source`, in fp32 and host memory, on every rank; of the other ranks only
    the shape counts."""
    if not torch_dist.is_initialized() or world_size() == 1:
        return value.float().cpu()
    result = value.to(device(), torch.float32, copy=True).contiguous()
    torch_dist.broadcast(result, src=source)
    return result.cpu()


def broadcast_object(value: Any, source: int = 0) -> Any:
    """The picklable `value` of rank `source`, on every rank."""
    if not torch_dist.is_initialized() or world_size() == 1:
        return value
    box = [value]
    torch_dist.broadcast_object_list(box, src=source)
    return box[0]


def on_main(work: Callable[[], Result]) -> Result:
    """`on_rank` 0."""
    return on_rank(0, work)


def on_rank(source: int, work: Callable[[], Result]) -> Result:
    """What `work` returns on rank `source`, picklable, on every rank; all ranks raise its
    `UserError` or `StopRequested`. Collective."""
    outcome: tuple[Any, Exception | None] = (None, None)
    if rank() == source:
        try:
            outcome = (work(), None)
        except (UserError, StopRequested) as raised:
            outcome = (None, raised)
    result, problem = broadcast_object(outcome, source)
    if problem is not None:
        raise problem
    return result


def is_partitioned(weight: Any) -> bool:
    """Whether ZeRO-3 divides a parameter among the ranks."""
    return hasattr(weight, "ds_id")


def rank_shard(weight: Any) -> tuple[int, Tensor]:
    """(index of its first element, a flat view) of this rank's elements of a parameter, without
    ZeRO-3's uninitialised padding; all elements if it is not partitioned."""
    if not is_partitioned(weight):
        return 0, weight.detach().view(-1)
    shard = weight.ds_tensor.detach().view(-1)
    first = min(rank() * shard.numel(), weight.ds_numel)
    return first, shard[: weight.ds_numel - first]


def gather_objects(value: Any, group: Group | None = None) -> list[Any]:
    """The picklable `value` of each rank of a group, or of all ranks, in rank order."""
    if not torch_dist.is_initialized() or world_size() == 1:
        return [value]
    box: list[Any] = [None] * torch_dist.get_world_size(group)
    torch_dist.all_gather_object(box, value, group=group)
    return box


def first_problem(problem: str | None) -> str | None:
    """The problem of the first rank that has one, on every rank; None if no rank has one.
    Collective."""
    problems = filter(None, gather_objects(problem))
    return next(problems, None)


@contextmanager
def main_rank_of_node_first() -> Iterator[None]:
    """Run the block on the first rank of each machine, then on its other ranks, which find the
    files of the first. If the first rank fails, the others still run the block, so that all fail in
    the same way and none waits forever. The watchdog is paused for all of it; `TIMEOUT` is the
    limit."""
    with watchdog_paused():
        if local_rank() != 0:
            barrier()
        try:
            yield
        finally:
            if local_rank() == 0:
                barrier()
