"""Ranks join those of their own launch, even if another launch uses the same port at the same instant."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from launch import deepspeed_command, environment, forked, succeed
from torch.distributed import DistNetworkError

from dschat_ppo.errors import UserError
from dschat_ppo.run import process_group
from dschat_ppo.run.process_group import (
    CPU_RANK_BYTES,
    init_process_group,
    require_shared_memory,
)

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def test_a_port_in_use_is_a_user_error(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (group | {"MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"port {port} .* in use.*--master_port"):
            init_process_group()


RANK = """
import os, sys
import torch.distributed as torch_dist
from dschat_ppo.run import process_group

rank, store = int(os.environ["RANK"]), process_group._store_of_this_launch(sys.argv[1])
torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = torch_dist.new_group()
found = [None] * torch_dist.get_world_size()
torch_dist.all_gather_object(found, sys.argv[1], group=group)
print(*found, flush=True)
"""


def free_port() -> int:
    """As `launch.py` chooses."""
    return int(deepspeed_command(1, "x")[6])


def begin(stack: ExitStack, port: int, rank: int, folder: str) -> subprocess.Popen[str]:
    env = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = stack.enter_context(subprocess.Popen([sys.executable, "-c", RANK, folder], env=env, text=True, **pipes))
    stack.callback(process.kill)
    return process


@pytest.mark.slow
def test_a_rank_of_another_launch_changes_nothing():
    port = free_port()
    with ExitStack() as stack:
        host, other = begin(stack, port, 0, "runs/a b"), begin(stack, port, 1, "runs/c")
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=15)
        own = begin(stack, port, 1, "runs/a b")
        assert [process.communicate(timeout=100)[0] for process in (host, own)] == ["runs/a b runs/a b\n"] * 2
        assert other.poll() is None


class Accelerator:
    """Stands for the one that DeepSpeed chooses."""

    def __init__(self, kind: str):
        self.kind = kind
        self.devices: list[int] = []
        self.count = 8

    def device_count(self) -> int:
        return self.count

    def device_name(self) -> str:
        return self.kind

    def set_device(self, number: int) -> None:
        self.devices.append(number)

    def create_op_builder(self, _name: str) -> None:
        return None

    def communication_backend_name(self) -> str:
        return "gloo"


def join_as(kind: str, monkeypatch) -> Accelerator:
    """Join on devices of this kind, up to the meeting of the ranks, which does not take place."""
    accelerator = Accelerator(kind)

    def joins(_folder):
        raise DistNetworkError("enough")

    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    monkeypatch.setattr(process_group, "_store_of_this_launch", joins)
    monkeypatch.setattr(process_group, "require_usable_gpu", lambda: None)
    with pytest.raises(DistNetworkError, match="enough"):
        init_process_group()
    return accelerator


def test_a_rank_that_does_not_see_its_gpu_is_refused(monkeypatch):
    accelerator = Accelerator("cuda")
    accelerator.count = 1
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    with pytest.raises(
        UserError, match="rank 3 is number 1 on its machine, from 0 on, and sees 1 GPUs.*--gpus-per-node"
    ):
        init_process_group()
    assert accelerator.devices == []


@pytest.mark.parametrize(("kind", "own", "expected"), [
    ("cuda", {}, dict.fromkeys(ALLOCATOR_NAMES, "expandable_segments:True")),
    ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "y"}, {"PYTORCH_CUDA_ALLOC_CONF": "y"}), ("cpu", {}, {}),
])  # fmt: skip
def test_on_a_gpu_memory_grows_in_segments_and_cudnn_computes_no_attention(monkeypatch, kind, own, expected):
    """Unless the user says otherwise; cuDNN would build a plan for each new shape."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    for name in (*ALLOCATOR_NAMES, "LOCAL_RANK"):
        monkeypatch.setenv(name, "2")  # restored at the end
    for name in ALLOCATOR_NAMES:
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    try:
        accelerator = join_as(kind, monkeypatch)
        assert torch.backends.cuda.cudnn_sdp_enabled() is (kind == "cpu")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert accelerator.devices == ([2] if kind == "cuda" else [])
    assert {name: os.environ[name] for name in ALLOCATOR_NAMES if name in os.environ} == expected


@pytest.mark.ranks
def test_every_group_waits_as_long_as_data_may_take_also_that_of_deepspeed():
    said = succeed(forked(2, "tests/workers/group_timeouts.py", timeout=100)).stdout
    assert said.splitlines()[-1] == "zero 6 rows 6 all 6 hpz 6 local_0 6 sum 2"


@pytest.fixture
def free_mib(monkeypatch, tmp_path):
    """`free_mib(n)`: a file system with so many MiB free, in pages of 4 KiB, of which the superuser may use more."""

    def set_free(mib: int) -> None:
        found = SimpleNamespace(f_bavail=mib * 256, f_bfree=mib * 512, f_frsize=4096)
        monkeypatch.setattr(process_group.os, "statvfs", lambda folder: found)

    return set_free


@pytest.mark.parametrize(("ranks", "free", "fits"), [(2, 132, True), (2, 131, False), (8, 527, False)])
def test_each_rank_of_the_machine_needs_its_buffer(monkeypatch, free_mib, tmp_path, ranks, free, fits):
    monkeypatch.setenv("LOCAL_SIZE", str(ranks))
    free_mib(free)
    if fits:
        require_shared_memory(CPU_RANK_BYTES, tmp_path)
        return
    with pytest.raises(UserError) as problem:
        require_shared_memory(CPU_RANK_BYTES, tmp_path)
    assert str(problem.value).startswith(
        f"{tmp_path} has {free} MiB free, and the {ranks} ranks of this machine need {66 * ranks} MiB of shared memory"
    )
    assert "docker run --shm-size" in str(problem.value)


@pytest.mark.parametrize("lacks", [True, False])
def test_a_lack_that_nccl_reports(monkeypatch, lacks):
    reason = "creating shared memory segment /dev/shm/nccl-uNQoTP" if lacks else "Connection closed by remote peer"

    def fail(_folder):
        raise RuntimeError(f"NCCL error in: NCCLUtils.cpp:1, unhandled system error. Last error: {reason}")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(process_group, "_store_of_this_launch", fail)
    with pytest.raises(UserError if lacks else RuntimeError, match="--shm-size" if lacks else "Connection closed"):
        init_process_group()
