"""Join the process group of this launch, and only ranks of this launch with it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlparse

import torch
import torch.distributed as torch_dist
from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
    register_rendezvous_handler,
)

from dschat_ppo.common import dist, ranks
from dschat_ppo.common.heartbeat import running_clock
from dschat_ppo.common.logging import print_line, quiet_prints
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.op_builds import guard_builds, offer_all_reduce
from dschat_ppo.runtime.processes import ancestor
from dschat_ppo.runtime.stop_requests import raise_if_stop_requested, subprocesses_may_stop
from dschat_ppo.runtime.unused_gpu import require_usable_gpu

SHARED_MEMORY = Path("/dev/shm")  # Docker gives a container 64 MiB of it
MIB = 2**20
CPU_RANK_BYTES = 66 * MIB  # DeepSpeed's buffer for all-reduce on a CPU
MORE = "give the container more (docker run --shm-size 8g, or --ipc host), or remount it: mount -o remount,size=8g"
_NCCL_MESSAGE = "shared memory segment"
ALLOCATOR = "expandable_segments:True"  # of torch's memory on a GPU
_SCHEME = "dschat-ppo"
_OWNER = "dschat_ppo/launch"
_OTHER_PORT = "choose another port by deepspeed --master_port N (with srun: export MASTER_PORT=N)"
JOIN_SECONDS = 1800.0  # machines that are started by hand
_TRY_SECONDS = 20.0
_PROBE_SECONDS = 3.0  # for rank 0 to accept a connection
_POLL_SECONDS = 0.1
_LOG_SECONDS = 20.0
_DOING = "waited for the other machines"
_ANSWER_SECONDS = 120.0  # rank 0 writes as soon as its store is open


def init_process_group(folder: str = "") -> torch.device:
    """Join the process group that the launcher's environment describes, and return this rank's device. Collective.

    A process started by plain `python` becomes a group of one rank on a free port. The output `folder`, as given by the
    flags, helps to distinguish launches on one port.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        require_usable_gpu()
    else:
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
            # Rows and micro-batches differ in shape, which breaks fixed segments to pieces. torch reads the second name
            # before version 2.9, and with the first one no warning; it does when it first allocates on a GPU.
            os.environ.update(dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), ALLOCATOR))
        if dist.local_rank() >= accelerator.device_count():
            raise UserError(
                f"rank {dist.rank()} is number {dist.local_rank()} on its machine, from 0 on, and sees "
                f"{accelerator.device_count()} GPUs: start as many ranks as GPUs, and let each see all of them (srun "
                "--gpus-per-node N, without --gpus-per-task)"
            )
        accelerator.set_device(dist.local_rank())
        # cuDNN's attention builds a plan for every new shape, up to a second, and here most shapes are new
        torch.backends.cuda.enable_cudnn_sdp(False)
    guard_builds()
    if offer_all_reduce():
        require_shared_memory(CPU_RANK_BYTES)
    try:
        with subprocesses_may_stop("joined the ranks"), quiet_prints():  # on a CPU this compiles an operator
            backend, address = accelerator.communication_backend_name(), address_of(folder)
            deepspeed.init_distributed(dist_backend=backend, timeout=dist.TIMEOUT, init_method=address)
        _give_deepspeeds_groups_the_timeout()
        _unlink_all_reduce_buffer()  # the first collective: NCCL connects the ranks
    except RuntimeError as problem:  # DistNetworkError in newer versions of torch
        if lacks_shared_memory(problem):
            raise UserError(f"NCCL lacks shared memory in {SHARED_MEMORY}: {MORE} {SHARED_MEMORY}") from problem
        if "EADDRINUSE" not in str(problem):
            raise
        port = os.environ.get("MASTER_PORT")
        raise UserError(f"port {port} of this machine is in use, perhaps by another run: {_OTHER_PORT}") from None
    return dist.device()


def _give_deepspeeds_groups_the_timeout() -> None:
    """Make ZeRO's group of all ranks, and give it and later groups of DeepSpeed this project's timeout. Collective.
    Theirs would be the backend's own, ten minutes for NCCL, after which ranks that wait for one that loads a model are
    aborted."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb.new_group = partial(torch_dist.new_group, timeout=dist.TIMEOUT)
    groups._WORLD_GROUP = comm.new_group(range(dist.world_size()))


def _unlink_all_reduce_buffer() -> None:
    """Unlink this rank's all-reduce buffer in shared memory, once every rank has mapped it. Collective. On a CPU
    DeepSpeed makes a buffer of 66 MiB in /dev/shm for each rank and leaves it there when the process ends. The kernel
    frees unlinked memory, however the process ends."""
    dist.barrier()
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{dist.rank()}").unlink(missing_ok=True)


def address_of(folder: str) -> str:
    """The `init_method` of torch's `init_process_group` for a launch that writes to this output folder."""
    return f"{_SCHEME}:///{quote(folder, safe='')}"


def launch_of_this_rank(folder: str) -> dict[str, str]:
    """What identifies the launch of this rank. On one machine that is DeepSpeed's launcher, by host, process number and
    start time. Ranks of different machines compare the number of ranks, the output folder, and the job of Slurm or
    torchrun."""
    known = {"number of ranks": os.environ["WORLD_SIZE"], "output folder": folder}
    known |= {name: os.environ[name] for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID") if name in os.environ}
    if (found := ancestor("deepspeed.launcher.launch")) is not None:
        launcher = f"process {found[0]} on host {socket.gethostname()}, started at tick {found[1].started}"
        known[f"launcher of machine {os.environ.get('CROSS_RANK', '0')}"] = launcher
    return known


def differences(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """The names of what both launches know and what differs."""
    return [name for name, value in mine.items() if theirs.get(name, value) != value]


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """torch's rendezvous handler for `address_of`: the store of this launch, this rank, and the number of ranks. Rank 0
    opens the store and writes the identity of its launch. Every other rank reads that first, and writes nothing into
    the store of another launch."""
    address, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    torchrun_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    mine = launch_of_this_rank(unquote(urlparse(url).path.removeprefix("/")))
    store = connect(address, port, rank == 0 and not torchrun_hosts, timeout)
    other = f"the process group at {address}, port {port}, belongs to another run"
    if rank == 0:
        store.set(_OWNER, json.dumps(mine))
    try:
        store.wait([_OWNER], timeout if torchrun_hosts else timedelta(seconds=_ANSWER_SECONDS))
    except DistStoreError:
        raise UserError(f"{other}, or to another program; {_OTHER_PORT}") from None
    theirs = json.loads(store.get(_OWNER))
    if found := differences(mine, theirs):
        raise UserError(f"{other} (output folder {theirs['output folder']}; other {', '.join(found)}); {_OTHER_PORT}")
    if dist.machines() > 1:
        wait_for_all_ranks(store)
    yield PrefixStore("dschat_ppo", store), rank, int(os.environ["WORLD_SIZE"])


def connect(address: str, port: int, is_master: bool, timeout: timedelta) -> TCPStore:
    """The store of rank 0 (`is_master`: this process opens it; the others wait up to `JOIN_SECONDS` until it is open).
    They probe it by a plain connection: torch, which tries to connect again and again, would print stack traces of C++.
    `timeout` is that of later operations."""
    began = logged = running_clock()
    while True:
        raise_if_stop_requested(_DOING)
        try:
            if not is_master:
                socket.create_connection((address, port), _PROBE_SECONDS).close()
            store = TCPStore(  # it does not wait for its workers: ranks of another launch would be counted
                address, port, None, is_master, timedelta(seconds=_TRY_SECONDS), wait_for_workers=False,
                multi_tenant=True,
            )  # fmt: skip
        except (OSError, DistNetworkError) as problem:
            if is_master and "EADDRINUSE" in str(problem):
                raise
            if is_master:
                raise UserError(
                    f"rank 0 on {socket.gethostname()} cannot reach itself at MASTER_ADDR {address}, port {port}: give "
                    "--master_addr an address of this machine"
                ) from problem
            now = running_clock()
            if now - began > JOIN_SECONDS:
                reason = f" ({problem.strerror or problem})" if isinstance(problem, OSError) else ""
                raise UserError(
                    f"rank {ranks.rank()} on {socket.gethostname()} cannot reach rank 0 at {address}, port "
                    f"{port}{reason}: start the other machines, check that --master_addr is the address of the first "
                    "one, and that no firewall closes the port"
                ) from problem
            if now - logged >= _LOG_SECONDS and ranks.local_rank() == 0:
                logged = now
                print_line(f"rank {ranks.rank()} waits for rank 0 at {address}, port {port}")
            time.sleep(_POLL_SECONDS)
        else:
            store.set_timeout(timeout)
            return store


def wait_for_all_ranks(store: Store) -> None:
    """Return when every rank has called this. `UserError`: `JOIN_SECONDS` passed, or machines differ in ranks."""
    size, mine = ranks.world_size(), ranks.local_world_size()
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store when it restarts the ranks
    store.set(f"ranks_of_machine/{start}/{ranks.rank()}", str(mine))
    joined, began = store.add(f"joined/{start}", 1), running_clock()
    logged = began
    while joined < size:
        time.sleep(_POLL_SECONDS)
        raise_if_stop_requested(_DOING)
        joined, now = store.add(f"joined/{start}", 0), running_clock()
        if joined >= size or now - logged < _LOG_SECONDS:
            continue
        logged = now
        missing = [rank for rank in range(size) if not store.check([f"ranks_of_machine/{start}/{rank}"])]
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        if now - began > JOIN_SECONDS:
            raise UserError(
                f"{names} of {size} did not start within {JOIN_SECONDS:.0f} s; see the output of that machine"
            )
        if ranks.is_main():
            print_line(f"waiting for {names} of {size}")
    sizes = {int(store.get(f"ranks_of_machine/{start}/{rank}")) for rank in range(size)}
    if len(sizes) > 1:
        raise UserError(
            f"the machines have different numbers of ranks ({', '.join(map(str, sorted(sizes)))}): each must have the "
            "same number (hostfile: the same slots)"
        )


def require_shared_memory(rank_bytes: int, folder: Path = SHARED_MEMORY) -> None:
    """Check that shared memory has `rank_bytes` for each rank of this machine; they take them once all have joined. The
    system reserves no memory for a file there. A rank that writes to a page for which there is none ends with a bus
    error, without a message."""
    if not folder.is_dir():
        return
    needed, space = ranks.local_world_size() * rank_bytes, os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < needed:
        raise UserError(
            f"{folder} has {free // MIB} MiB free, and the {ranks.local_world_size()} ranks of this machine need "
            f"{-(-needed // MIB)} MiB of shared memory: {MORE} {folder}"
        )


def lacks_shared_memory(problem: BaseException) -> bool:
    """Whether NCCL could not make a segment of shared memory, judged by its message."""
    return isinstance(problem, RuntimeError) and _NCCL_MESSAGE in str(problem)


register_rendezvous_handler(_SCHEME, _rendezvous)
