"""Ranks join those of their own launch, even if another launch uses the same port at the same instant."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch import ROOT, deepspeed_command, environment, forked, succeed
from torch.distributed import DistNetworkError

from dschat_ppo.errors import UserError
from dschat_ppo.runtime import process_group
from dschat_ppo.runtime import processes as module
from dschat_ppo.runtime.process_group import (
    CPU_RANK_BYTES,
    MIB,
    differences,
    init_process_group,
    lacks_shared_memory,
    launch_of_this_rank,
    require_shared_memory,
)
from dschat_ppo.runtime.processes import Process


@pytest.fixture
def processes(monkeypatch):
    """Set the processes from this one upwards: (number, start, command line), this one first."""

    def of(*found: tuple[int, int, list[str]]) -> None:
        above = [number for number, _, _ in found[1:]] + [0]
        table = {number: Process(parent, start, False) for (number, start, _), parent in zip(found, above, strict=True)}
        monkeypatch.setattr(module.os, "getpid", lambda: found[0][0])
        monkeypatch.setattr(module, "find_process", table.get)
        monkeypatch.setattr(module, "command_line", {number: words for number, _, words in found}.__getitem__)

    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "CROSS_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    return of


ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
LAUNCH = ["python", "-m", "deepspeed.launcher.launch", "--master_port=1"]


def test_a_launch_is_identified_by_its_nearest_launcher(processes, monkeypatch):
    plain = {"number of ranks": "4", "output folder": "out"}
    processes((7, 70, ["python", "main.py"]), (1, 10, ["init"]))
    assert launch_of_this_rank("out") == plain
    words = f"process 5 on host {socket.gethostname()}, started at tick 50"
    processes(
        (7, 70, ["main.py"]), (6, 60, ["bash", "-c", "main.py"]), (5, 50, LAUNCH), (4, 40, ["bash"]), (3, 30, LAUNCH)
    )
    assert launch_of_this_rank("out") == plain | {"launcher of machine 0": words}
    monkeypatch.setenv("CROSS_RANK", "2")
    monkeypatch.setenv("SLURM_JOB_ID", "88")
    assert launch_of_this_rank("out") == plain | {"launcher of machine 2": words, "SLURM_JOB_ID": "88"}


def test_launches_are_compared_by_what_both_know():
    first = {"number of ranks": "4", "output folder": "a", "launcher of machine 0": "process 5"}
    assert differences(first, dict(first)) == []
    assert differences(first | {"output folder": "b"}, first) == ["output folder"]
    assert differences(first | {"launcher of machine 0": "process 6"}, first) == ["launcher of machine 0"]
    other_machine = {
        "number of ranks": "4",
        "output folder": "a",
        "launcher of machine 1": "process 5",
        "SLURM_JOB_ID": "8",
    }
    assert differences(other_machine, first) == []
    assert differences(other_machine, first | {"SLURM_JOB_ID": "9"}) == ["SLURM_JOB_ID"]


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


def test_other_network_errors_are_raised_unchanged(monkeypatch):
    def unreachable(**_):
        raise DistNetworkError("no route to host")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("deepspeed.init_distributed", unreachable)
    with pytest.raises(DistNetworkError, match="no route"):
        init_process_group()


RANK = """
import sys
import torch.distributed as torch_dist
from dschat_ppo.runtime import process_group
from dschat_ppo.errors import UserError

process_group._ANSWER_SECONDS = 3.0
try:
    torch_dist.init_process_group("gloo", init_method=process_group.address_of(sys.argv[1]))
except UserError as problem:
    sys.exit(f"error: {problem}")
group = torch_dist.new_group()
found = [None] * torch_dist.get_world_size()
torch_dist.all_gather_object(found, sys.argv[1], group=group)
print(*found, flush=True)
"""
PLAIN_STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("open", flush=True)
time.sleep(100)
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
def test_a_rank_of_another_launch_is_refused_and_the_launch_continues():
    port = free_port()
    with ExitStack() as stack:
        host = begin(stack, port, 0, "runs/a b")
        _, said = begin(stack, port, 1, "runs/c").communicate(timeout=100)
        assert said.splitlines()[-1] == (
            f"error: the process group at 127.0.0.1, port {port}, belongs to another run (output folder runs/a b; "
            "other output folder); choose another port by deepspeed --master_port N (with srun: export MASTER_PORT=N)"
        )
        assert host.poll() is None
        own = begin(stack, port, 1, "runs/a b")
        assert [process.communicate(timeout=100)[0] for process in (host, own)] == ["runs/a b runs/a b\n"] * 2


@pytest.mark.slow
def test_another_program_on_the_port_is_waited_for_a_limited_time():
    port = free_port()
    with ExitStack() as stack:
        command = [sys.executable, "-c", PLAIN_STORE, str(port)]
        other = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(other.kill)
        assert other.stdout.readline() == "open\n"
        _, said = begin(stack, port, 1, "runs/c").communicate(timeout=100)
        assert "belongs to another run, or to another program; choose another port" in said.splitlines()[-1]


def pair(folder: Path) -> list[subprocess.Popen[str]]:
    """Two launches at one instant on one port. The first opens its store at once, and its rank 1 comes last."""
    started, port = [], str(free_port())
    for number, delays in enumerate(([0.0, 2.0], [1.0, 0.5])):
        words = ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", folder / "a"]
        command = deepspeed_command(2, "tests/workers/meeting.py", *words)
        command[command.index("--master_port") + 1] = port
        env = environment() | {"TMPDIR": str(folder), "RANKS": "4", "DELAYS": json.dumps(delays)}
        with (folder / f"said_{number}").open("w") as said:
            started.append(
                subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said, start_new_session=True)
            )
    return started


@pytest.mark.ranks
@pytest.mark.slow
def test_of_two_launches_on_one_port_one_runs_with_its_own_ranks(tmp_path):
    """Rank 1 of the second launch comes to the first one's store before rank 1 of the first, with its output folder."""
    started = pair(tmp_path)
    try:
        codes = [process.wait(timeout=200) for process in started]
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
    said = [(tmp_path / f"said_{number}").read_text() for number in range(2)]
    assert codes == [0, 2], said
    told = [[line for line in text.splitlines() if line.startswith(("error", "rank "))] for text in said]
    assert [len(lines) for lines in told] == [0, 1], told
    # whichever of its ranks comes first; rank 0 meets the lock of the folder before the port
    assert "another run" in told[1][0] and any(flag in told[1][0] for flag in ("--master_port", "--output_dir"))
    met = [json.loads(path.read_text()) for path in tmp_path.glob("a/met_*")]
    assert len(met) == 2
    for members in met:
        assert [rank for rank, _ in members] == [0, 1]
        assert len({launcher for _, launcher in members}) == 1


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

    def joins(**_):
        raise DistNetworkError("enough")

    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    monkeypatch.setattr("deepspeed.init_distributed", joins)
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


@pytest.mark.parametrize(("kind", "cudnn", "devices"), [("cuda", False, [2]), ("cpu", True, [])])
def test_on_a_gpu_cudnn_computes_no_attention(monkeypatch, kind, cudnn, devices):
    """It would build a plan for each new shape."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    monkeypatch.setenv("LOCAL_RANK", "2")
    try:
        accelerator = join_as(kind, monkeypatch)
        assert torch.backends.cuda.cudnn_sdp_enabled() is cudnn
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert accelerator.devices == devices


@pytest.mark.parametrize(
    ("kind", "own", "expected"),
    [
        ("cuda", {}, dict.fromkeys(ALLOCATOR_NAMES, "expandable_segments:True")),
        ("cuda", {"PYTORCH_ALLOC_CONF": "x"}, {"PYTORCH_ALLOC_CONF": "x"}),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "y"}, {"PYTORCH_CUDA_ALLOC_CONF": "y"}),
        ("cpu", {}, {}),
    ],
)
def test_on_a_gpu_memory_is_in_segments_that_grow_unless_the_user_says_otherwise(monkeypatch, kind, own, expected):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for name in ALLOCATOR_NAMES:
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    try:
        join_as(kind, monkeypatch)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
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


@pytest.mark.parametrize(("ranks", "free", "fits"), [
    (2, 132, True), (2, 131, False), (1, 66, True), (8, 527, False), (8, 528, True),
])  # fmt: skip
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


def test_a_system_without_the_folder_passes(free_mib, tmp_path):
    free_mib(0)
    require_shared_memory(MIB, tmp_path / "none")


@pytest.mark.parametrize(("problem", "expected"), [
    (RuntimeError(
        "NCCL error in: NCCLUtils.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version "
        "2.26.2 ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "
        "Last error: Error while creating shared memory segment /dev/shm/nccl-uNQoTP (size 33030528), error: No space"
    ), True),
    (RuntimeError("ncclSystemError: Last error: socketProgress: Connection closed by remote peer"), False),
    (ValueError("shared memory segment"), False),
])  # fmt: skip
def test_a_lack_that_nccl_reports(problem, expected):
    assert lacks_shared_memory(problem) is expected


CHECK = """
from dschat_ppo.errors import UserError
from dschat_ppo.runtime.process_group import CPU_RANK_BYTES, require_shared_memory
try:
    require_shared_memory(CPU_RANK_BYTES)
except UserError as problem:
    print(problem)
"""


def test_a_real_file_system_that_is_too_small():
    """In a mount namespace of its own, /dev/shm has 64 MiB, as in a container of Docker."""
    words = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    if os.geteuid() != 0 or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    env = environment() | {"LOCAL_SIZE": "2"}
    done = subprocess.run([*words, sys.executable, "-c", CHECK], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("/dev/shm has 64 MiB free, and the 2 ranks of this machine need 132 MiB of shared")
