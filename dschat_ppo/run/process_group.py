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


def init_process_group(folder: str = "") -> torch.device:
    """Join the process group that the launcher's environment describes (plain `python`: a group of
    one rank on a free port), and return this rank's device. Collective. The output `folder` helps
    to distinguish launches on one port."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        require_usable_gpu()
    else:
        let_segments_grow()
        if dist.local_rank() >= accelerator.device_count():
            raise UserError(
                f"rank {dist.rank()} is number {dist.local_rank()} on its machine, from 0 on, and"
                f" sees {accelerator.device_count()} GPUs: start as many ranks as GPUs, and let"
                " each see all of them (srun --gpus-per-node N, without --gpus-per-task)"
            )
        accelerator.set_device(dist.local_rank())
        # cuDNN's attention builds a plan for every new shape, up to a second, and here most shapes
        # are new
        torch.backends.cuda.enable_cudnn_sdp(False)
    # Else DeepSpeed would compile its all-reduce in shared memory, for the layers of its tensor
    # parallelism.
    deepspeed.ops.__compatible_ops__ = {}
    try:
        with subprocesses_may_stop("joined the ranks"), quiet_prints():
            backend = accelerator.communication_backend_name()
            rank = dist.rank()
            size = dist.world_size()
            if not torch_dist.is_initialized():  # by a run before it in this process
                store = _store_of_this_launch(folder)
                torch_dist.init_process_group(
                    backend, store=store, rank=rank, world_size=size, timeout=dist.TIMEOUT
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
    jobs = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    launch = [os.environ["WORLD_SIZE"], folder, *(os.environ.get(name, "") for name in jobs)]
    if dist.machines() == 1 and (launcher := ancestor("deepspeed.launcher.launch")) is not None:
        launch.append(str(launcher))
    if dist.rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = open_store(address, port)
    else:
        store = connect(address, port)
    store.set_timeout(dist.TIMEOUT)
    own = PrefixStore("/".join(launch), store)
    wait_for_all_ranks(own)
    return own


def open_store(address: str, port: int) -> TCPStore:
    """Open the store, on rank 0. It does not wait for the ranks: those of another launch would be
    counted."""
    limit = timedelta(seconds=_TRY_SECONDS)
    try:
        return TCPStore(address, port, None, True, limit, wait_for_workers=False, multi_tenant=True)
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
    plain connection: torch, which tries to connect again and again, would print stack traces of
    C++."""
    place = f"rank 0 at {address}, port {port}"
    cause = None
    for _ in _tries(lambda: place):
        try:
            socket.create_connection((address, port), _PROBE_SECONDS).close()
            return TCPStore(
                address, port, None, False, timedelta(seconds=_TRY_SECONDS), wait_for_workers=False
            )
        except (OSError, DistNetworkError) as problem:
            cause = problem
    if isinstance(cause, OSError):
        reason = f" ({cause.strerror or cause})"
    else:
        reason = ""
    raise UserError(
        f"rank {ranks.rank()} on {socket.gethostname()} cannot reach {place}{reason}: start the"
        " other machines, check that --master_addr is the address of the first one, and that no"
        " firewall closes the port"
    ) from cause


def wait_for_all_ranks(store: Store) -> None:
    """Return when every rank has called this; `UserError` after `JOIN_SECONDS`."""
    names = [f"rank/{rank}" for rank in range(ranks.world_size())]
    store.set(names[ranks.rank()], "here")

    def missing() -> str:
        left = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
        return f"rank{'s' * (len(left) > 1)} {', '.join(left)} of {len(names)}"

    for _ in _tries(missing):  # another launch may hold the port, and these ranks wait alone
        if store.check(names):
            return
    raise UserError(
        f"{missing()} did not start within {JOIN_SECONDS:.0f} s; see the output of that machine"
    )


def _tries(waits_for: Callable[[], str]) -> Iterator[None]:
    """Once every `_POLL_SECONDS`, for `JOIN_SECONDS`. A line says now and then what the ranks of
    this machine wait for; a stop request ends it."""
    began = logged = time.monotonic()
    while (now := time.monotonic()) - began <= JOIN_SECONDS:
        raise_if_stop_requested("waited for the other ranks")
        if now - logged >= _LOG_SECONDS and ranks.local_rank() == 0:
            logged = now
            print_line(f"rank {ranks.rank()} waits for {waits_for()}")
        yield
        time.sleep(_POLL_SECONDS)
