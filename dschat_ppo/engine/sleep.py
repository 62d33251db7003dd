"""Move tensors that generation does not need to host memory, and back bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from dschat_ppo.common.dist import device, on_gpu
from dschat_ppo.common.logging import logger
from dschat_ppo.types import Engine

# fp32 weights and gradient buffers of DeepSpeed's optimizers: ZeRO 3, ZeRO 1 and 2, ZeRO 1 in bf16
_BUFFERS = (
    "fp32_partitioned_groups_flat", "grad_partitions_flat_buffer",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition", "fp32_groups_gradients_flat",
)  # fmt: skip
SMALLEST_LOCKED = 2**20  # bytes: registering less takes longer than its copy
_PARTITIONS = ("ds_tensor", "ds_secondary_tensor")  # this rank's part of a ZeRO-3 parameter; the second one with hpZ


def weights_of(engine: Engine) -> Iterator[Tensor]:
    """The parameters of an engine, and this rank's partitions of them."""
    for parameter in engine.module.parameters():
        yield parameter.data
        for name in _PARTITIONS:
            partition = getattr(parameter, name, None)
            if partition is not None:
                yield partition


def training_states(engine: Engine) -> Iterator[Tensor]:
    """The optimizer states, fp32 weights and gradient buffers of an engine that trains; empty for one that does not."""
    if engine.basic_optimizer is None:
        return
    for state in engine.basic_optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    for name in _BUFFERS:
        held = getattr(engine.optimizer, name, None)
        yield from [held] if isinstance(held, Tensor) else held or []


def gradient_buckets(engine: Engine) -> Iterator[Tensor]:
    """The buffers in which ZeRO-3 collects gradients during a backward pass. Their contents mean nothing afterwards."""
    for bucket in getattr(engine.optimizer, "ipg_buckets", {}).values():
        if isinstance(bucket.buffer, Tensor):  # ZeRO 1 and 2 have a list, which is empty between backward passes
            yield bucket.buffer


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor is in device memory; never on a CPU."""
    return tensor.device.type != "cpu"


class HostMemory:
    """Memory of the host for the tensors that sleep, kept from one rollout to the next."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.UntypedStorage] = {}

    def take(self, number: int, size: int) -> torch.UntypedStorage:
        """`size` bytes for the tensor of this number: those of the last time, if they were as many."""
        kept = self._kept.pop(number, None)
        if kept is not None and kept.nbytes() != size:
            kept = None  # freed before other memory is taken
        self._kept[number] = kept = host_memory(size) if kept is None else kept
        return kept


def host_memory(size: int) -> torch.UntypedStorage:
    """Host memory of `size` bytes, with a GPU page-locked, so that copies are several times faster.

    It is registered with CUDA instead of taken from torch's allocator, which rounds sizes up to a power of two.
    """
    memory = torch.UntypedStorage(size)
    if not on_gpu() or size < SMALLEST_LOCKED:
        return memory
    runtime, place = torch.cuda.cudart(), memory.data_ptr()
    if error := int(runtime.cudaHostRegister(place, size, 0)):
        with suppress(RuntimeError):  # torch leaves the error behind, and the next kernel would be blamed for it
            torch.ones(1, device=device())
        logger().warning(
            f"--sleep_in_rollout: {size / 2**30:.2f} GiB of host memory cannot be page-locked (CUDA error "
            f"{error}), so rollouts begin and end more slowly; raise the limit of locked memory (ulimit -l)"
        )
        return memory
    # Before it is freed: CUDA would take other memory at this address for locked. The end of the process needs no call.
    weakref.finalize(memory, runtime.cudaHostUnregister, place).atexit = False
    return memory


@contextmanager
def asleep(
    tensors: Iterable[Tensor], awake: Iterable[Tensor] = (), scratch: Iterable[Tensor] = (),
    host: HostMemory | None = None,
) -> Iterator[int]:  # fmt: skip
    """Move the memory of `tensors` to the host for the duration of the block; yields the bytes that leave the device.

    The memory behind the tensors is emptied and filled again, and no tensor is replaced: DeepSpeed holds views of its
    flat buffers (such as `_hp_mapping`), which would keep the memory in use, and would be stale afterwards.

    Args:
        tensors: not used in the block; those in host memory stay as they are.
        awake: tensors that are used in the block; memory that they share with `tensors` is not moved.
        scratch: tensors whose contents mean nothing; their memory is freed without a copy.
        host: where the memory goes, for the same tensors in the same order each time; None: memory for this block.
    """
    host = host or HostMemory()
    used = {tensor.untyped_storage().data_ptr() for tensor in awake}
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if on_device(tensor)}
    get_accelerator().synchronize()  # a stream other than the current one may still use the memory
    moved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
    for place, storage in memory.items():
        if storage.nbytes() and storage.resizable() and place not in used:
            copy = host.take(len(moved), storage.nbytes())
            copy.copy_(storage, non_blocking=True)
            moved.append((storage, copy))
    freed = [(tensor.untyped_storage(), tensor.untyped_storage().nbytes()) for tensor in scratch if on_device(tensor)]
    get_accelerator().synchronize()  # the copies are complete
    try:
        for storage, _ in (*freed, *moved):
            storage.resize_(0)
        yield sum(copy.nbytes() for _, copy in moved) + sum(size for _, size in freed)
    finally:
        for storage, size in freed:
            storage.resize_(size)
        for storage, copy in moved:
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=True)
        get_accelerator().synchronize()  # the next rollout writes to the host memory
