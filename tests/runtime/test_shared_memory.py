"""Too little shared memory is found before a rank takes some of it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from launch import environment

from dschat_ppo.errors import UserError
from dschat_ppo.runtime import shared_memory
from dschat_ppo.runtime.shared_memory import CPU_RANK_BYTES, MIB, lacks_shared_memory, require_shared_memory


@pytest.fixture
def free_mib(monkeypatch, tmp_path):
    """`free_mib(n)`: a file system with so many MiB free, in pages of 4 KiB, of which the superuser may use more."""

    def set_free(mib: int) -> None:
        found = SimpleNamespace(f_bavail=mib * 256, f_bfree=mib * 512, f_frsize=4096)
        monkeypatch.setattr(shared_memory.os, "statvfs", lambda folder: found)

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
from dschat_ppo.runtime.shared_memory import CPU_RANK_BYTES, require_shared_memory
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
