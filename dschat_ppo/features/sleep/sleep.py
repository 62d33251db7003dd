"""Sleep: what a rollout does not use waits in host memory (`--sleep_in_rollout`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from dschat_ppo.common.dist import device, on_gpu
from dschat_ppo.common.logging import logger
from dschat_ppo.types import Engine

# fp32 weights of DeepSpeed's optimizers: ZeRO 3, ZeRO 1 and 2, ZeRO 1 in bf16
_MASTER_WEIGHTS = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
)
# gradients: ZeRO 3, ZeRO 1 in bf16
_GRADIENTS = ("grad_partitions_flat_buffer", "fp32_groups_gradients_flat")
SMALLEST_LOCKED = 2**20  # bytes: registering less takes longer than its copy

# host memory of the tensors that sleep, by their index; kept for the next rollout
HostMemory = dict[int, torch.UntypedStorage]


def weights_of(engine: Engine) -> Iterator[Tensor]:
    """The parameters of an engine, and this rank's partitions of them."""
    for parameter in engine.module.parameters():
        yield parameter.data
        for name in ("ds_tensor", "ds_secondary_tensor"):  # the latter with hpZ
            partition = getattr(parameter, name, None)
            if partition is not None:
                yield partition


def training_states(engine: Engine) -> Iterator[Tensor]:
    """The optimizer states and fp32 weights of an engine that trains; empty for one that does
    not."""
    if engine.basic_optimizer is None:
        return
    for state in engine.basic_optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield value
    yield from _flat_buffers(engine, _MASTER_WEIGHTS)


def gradient_buffers(engine: Engine) -> Iterator[Tensor]:
    """The buffers of gradients, whose contents mean nothing between an update and the next backward
    pass."""
    for bucket in getattr(engine.optimizer, "ipg_buckets", {}).values():
        # ZeRO 1 and 2 have a list, which is empty between backward passes
        if isinstance(bucket.buffer, Tensor):
            yield bucket.buffer
    yield from _flat_buffers(engine, _GRADIENTS)


def _flat_buffers(engine: Engine, names: Sequence[str]) -> Iterator[Tensor]:
    """The tensors that the optimizer holds under these names: one tensor, a list, or none."""
    for name in names:
        buffers = getattr(engine.optimizer, name, None)
        if isinstance(buffers, Tensor):
            yield buffers
        elif buffers:
            yield from buffers


def is_in_device_memory(tensor: Tensor) -> bool:
    """Whether a tensor is in device memory; never on a CPU."""
    return tensor.device.type != "cpu"


def reused_memory(host: HostMemory, index: int, size: int) -> torch.UntypedStorage:
    """`size` bytes of the host for the tensor of this index: those of the last time, if they were
    as many."""
    if index in host and host[index].nbytes() != size:
        del host[index]  # freed before other memory is taken
    if index not in host:
        host[index] = allocate_on_host(size)
    return host[index]


def allocate_on_host(size: int) -> torch.UntypedStorage:
    """Host memory of `size` bytes, with a GPU page-locked, so that copies are several times faster.

    It is registered with CUDA instead of taken from torch's allocator, which rounds sizes up to a
    power of two.
    """
    memory = torch.UntypedStorage(size)
    if not on_gpu() or size < SMALLEST_LOCKED:
        return memory
    runtime = torch.cuda.cudart()
    address = memory.data_ptr()
    error = int(runtime.cudaHostRegister(address, size, 0))
    if error:
        # torch leaves the error behind, and the next kernel would be blamed for it
        with suppress(RuntimeError):
            torch.ones(1, device=device())
        logger().warning(
            f"--sleep_in_rollout: {size / 2**30:.2f} GiB of host memory cannot be page-locked (CUDA"
            f" error {error}), so rollouts begin and end more slowly; raise the limit of locked"
            " memory (ulimit -l)"
        )
        return memory
    # Before it is freed: CUDA would take other memory at this address for locked. The end of the
    # process needs no call.
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


@contextmanager
def asleep(
    tensors: Iterable[Tensor],
    awake: Iterable[Tensor] = (),
    scratch: Iterable[Tensor] = (),
    host: HostMemory | None = None,
) -> Iterator[int]:
    """Move the memory of `tensors`, which the block does not use, to the host.

    The memory is emptied and filled again, and no tensor is replaced, because DeepSpeed holds views
    of its flat buffers (such as `_hp_mapping`).

    Args:
        tensors: in the same order each time.
        awake: memory that these share with `tensors` is not moved.
        scratch: their memory is freed without a copy, and zero afterwards.
        host: host memory of the last time, to be used again.

    Yields:
        The bytes that leave the device.
    """
    if host is None:
        host = {}
    awake_addresses = {tensor.untyped_storage().data_ptr() for tensor in awake}
    storages = _storages_on_device(tensors)
    get_accelerator().synchronize()  # a stream other than the current one may still use the memory
    moved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
    for address, storage in storages.items():
        if storage.nbytes() and storage.resizable() and address not in awake_addresses:
            copy = reused_memory(host, len(moved), storage.nbytes())
            copy.copy_(storage, non_blocking=True)
            moved.append((storage, copy))
    freed = [(storage, storage.nbytes()) for storage in _storages_on_device(scratch).values()]
    get_accelerator().synchronize()  # the copies are complete
    try:
        for storage, _ in (*freed, *moved):
            storage.resize_(0)
        yield sum(copy.nbytes() for _, copy in moved) + sum(size for _, size in freed)
    finally:
        for storage, size in freed:
            storage.resize_(size)
            storage.fill_(0)  # type: ignore[attr-defined]
        for storage, copy in moved:
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=True)
        get_accelerator().synchronize()  # the next rollout writes to the host memory


def _storages_on_device(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Address -> device memory of the tensors; memory that several of them share once."""
    storages = {}
    for tensor in tensors:
        if is_in_device_memory(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
    return storages
