"""Join the process group of this launch, and only ranks of this launch with it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as torch_dist
from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore

from dschat_ppo.common import dist, ranks
from dschat_ppo.common.logging import print_line, quiet_prints
from dschat_ppo.common.processes import ancestor
from dschat_ppo.common.stop_requests import raise_if_stop_requested, subprocesses_may_stop
from dschat_ppo.errors import UserError
from dschat_ppo.run.unused_gpu import require_usable_gpu

SHARED_MEMORY = Path("/dev/shm")  # Docker gives a container 64 MiB of it
MORE = (
    "give the container more (docker run --shm-size 8g, or --ipc host), or remount it: mount -o"
    " remount,size=8g"
)
_NCCL_MESSAGE = "shared memory segment"
ALLOCATOR = "expandable_segments:True"  # of torch's memory on a GPU
JOIN_SECONDS = 1800.0  # machines that are started by hand
_TRY_SECONDS = 20.0
_PROBE_SECONDS = 3.0  # for rank 0 to accept a connection
_POLL_SECONDS = 0.1
_LOG_SECONDS = 20.0


def let_segments_grow() -> None:
    """Rows and micro-batches differ in shape, which breaks fixed segments of a GPU's memory to
    pieces. torch reads the variables once, when anything first asks for a GPU; before version 2.9
    the second one, and with it no warning."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if dist.on_gpu() and not set(names) & set(os.environ):
        os.environ.update(dict.fromkeys(names, ALLOCATOR))


def take_device() -> None:
    """Make one GPU the device of this rank, the one of its number on its machine; on a CPU check
    that no GPU is left unused."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        require_usable_gpu()
        return
    let_segments_grow()
    if dist.local_rank() >= accelerator.device_count():
        raise UserError(
            f"rank {dist.rank()} is number {dist.local_rank()} on its machine, from 0 on, and"
            f" sees {accelerator.device_count()} GPUs: start as many ranks as GPUs, and let"
            " each see all of them (srun --gpus-per-node N, without --gpus-per-task)"
        )
    accelerator.set_device(dist.local_rank())
    # cuDNN's attention builds a plan for every new shape, up to a second, and here most shapes are
    # new
    torch.backends.cuda.enable_cudnn_sdp(False)


def init_process_group(folder: str = "") -> torch.device:
    """Join the process group that the launcher's variables describe (plain `python`: a group of
    one rank on a free port), and return this rank's device. Collective. The output `folder` helps
    to distinguish launches on one port."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(ranks.free_port())
    take_device()
    # Else DeepSpeed would compile its all-reduce in shared memory, for the layers of its tensor
    # parallelism.
    deepspeed.ops.__compatible_ops__ = {}
    try:
        with subprocesses_may_stop("joined the ranks"), quiet_prints():
            backend = get_accelerator().communication_backend_name()
            if not torch_dist.is_initialized():  # by a run before it in this process
                torch_dist.init_process_group(
                    backend,
                    store=_store_of_this_launch(folder),
                    rank=dist.rank(),
                    world_size=dist.world_size(),
                    timeout=dist.TIMEOUT,
                )
            deepspeed.init_distributed(dist_backend=backend, timeout=dist.TIMEOUT)
        # ZeRO's group of all ranks, and later groups of DeepSpeed, get this project's timeout: NCCL
        # would abort ranks that wait ten minutes for one that loads a model
        comm.cdb.new_group = partial(torch_dist.new_group, timeout=dist.TIMEOUT)
        groups._WORLD_GROUP = comm.new_group(range(dist.world_size()))
        dist.barrier()  # the first collective: NCCL connects the ranks
    except RuntimeError as problem:
        if _NCCL_MESSAGE not in str(problem):
            raise
        raise UserError(
            f"NCCL lacks shared memory in {SHARED_MEMORY}: {MORE} {SHARED_MEMORY}"
        ) from problem
    return dist.device()


def _store_of_this_launch(folder: str) -> Store:
    """The store through which the ranks of this launch meet; rank 0, or torchrun, opens it. The
    names in it begin with what identifies the launch, so that a rank of another launch on this port
    changes nothing in it."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    launch = [os.environ["WORLD_SIZE"], folder]
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        launch.append(os.environ.get(name, ""))
    if dist.machines() == 1:
        launcher = ancestor("deepspeed.launcher.launch")
        if launcher is not None:
            launch.append(str(launcher))
    if dist.rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = open_store(address, port)
    else:
        store = connect(address, port)
    store.set_timeout(dist.TIMEOUT)
    launch_store = PrefixStore("/".join(launch), store)
    wait_for_all_ranks(launch_store)
    return launch_store


def open_store(address: str, port: int) -> TCPStore:
    """Open the store, on rank 0. It does not wait for the ranks: those of another launch would be
    counted."""
    limit = timedelta(seconds=_TRY_SECONDS)
    try:
        return TCPStore(
            address, port, is_master=True, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
    except DistNetworkError as problem:
        text = (
            f"rank 0 cannot listen at {address}, port {port}: give --master_addr an address of its"
            " machine"
        )
        if "EADDRINUSE" in str(problem):
            text = (
                f"port {port} of this machine is in use, perhaps by another run: choose another"
                " port by deepspeed --master_port N (with srun: export MASTER_PORT=N)"
            )
        raise UserError(text) from problem


def connect(address: str, port: int) -> TCPStore:
    """The store that rank 0 has opened, for which this waits up to `JOIN_SECONDS`, with probes by a
    plain connection: torch alone would try to connect again and again, and print stack traces of
    C++."""
    main_rank = f"rank 0 at {address}, port {port}"
    limit = timedelta(seconds=_TRY_SECONDS)
    cause = None
    for _ in _tries(lambda: main_rank):
        try:
            socket.create_connection((address, port), _PROBE_SECONDS).close()
            return TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
        except (OSError, DistNetworkError) as problem:
            cause = problem
    reason = ""
    if isinstance(cause, OSError):
        reason = f" ({cause.strerror or cause})"
    raise UserError(
        f"rank {ranks.rank()} on {socket.gethostname()} cannot reach {main_rank}{reason}: start the"
        " other machines, check that --master_addr is the address of the first one, and that no"
        " firewall closes the port"
    ) from cause


def wait_for_all_ranks(store: Store) -> None:
    """Return when every rank has called this; `UserError` after `JOIN_SECONDS`."""
    names = [f"rank/{rank}" for rank in range(ranks.world_size())]
    store.set(names[ranks.rank()], "here")

    def missing() -> str:
        missing_ranks = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
        noun = "ranks" if len(missing_ranks) > 1 else "rank"
        return f"{noun} {', '.join(missing_ranks)} of {len(names)}"

    for _ in _tries(missing):  # another launch may hold the port, and these ranks wait alone
        if store.check(names):
            return
    raise UserError(
        f"{missing()} did not start within {JOIN_SECONDS:.0f} s; see the output of that machine"
    )


def _tries(waits_for: Callable[[], str]) -> Iterator[None]:
    """Once every `_POLL_SECONDS`, for `JOIN_SECONDS`. A line says now and then what the ranks of
    this machine wait for; a stop request ends it."""
    began = time.monotonic()
    logged = began
    while True:
        now = time.monotonic()
        if now - began > JOIN_SECONDS:
            return
        raise_if_stop_requested("waited for the other ranks")
        if now - logged >= _LOG_SECONDS and ranks.local_rank() == 0:
            logged = now
            print_line(f"rank {ranks.rank()} waits for {waits_for()}")
        yield
        time.sleep(_POLL_SECONDS)
