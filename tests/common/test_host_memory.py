"""Host memory: limits of cgroups in a made-up root, and freed memory that goes back."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from dschat_ppo.common.host_memory import _glibc, available_memory, host_memory

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """A machine of 512 GiB, 400 of which are free."""
    memory = SimpleNamespace(total=512 * GIB, available=400 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def root_with(folder, membership, files):
    """A root folder: the lines of /proc/self/cgroup, and the files below /sys/fs/cgroup."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": 8 * GIB}, 8),
        (
            "0::/a/b\n",
            {"a/b/memory.max": "max", "a/memory.max": 6 * GIB},
            6,
        ),  # that of a job around it
        ("0::/a/b\n", {"a/b/memory.max": 8 * GIB, "a/memory.max": 16 * GIB}, 8),
        ("0::/\n", {"memory.max": 4 * GIB}, 4),  # a container that sees its own cgroup as the root
        ("0::/docker/123\n", {"memory.max": 4 * GIB}, 4),  # and one that knows its path outside
        (
            "0::/../other\n",
            {"memory.max": 4 * GIB, "../other/memory.max": 2 * GIB},
            4,
        ),  # outside of what it sees
        ("0::/a\n", {"b/memory.max": 4 * GIB}, 512),  # of another cgroup
        ("0::/a\n", {"a/memory.max": 1024 * GIB}, 512),
        (
            "4:devices:/b\n0::/a\n",
            {"b/memory.max": GIB, "a/memory.max": 3 * GIB},
            3,
        ),  # of another hierarchy
    ],
)
def test_host_memory_is_the_lowest_limit(machine, tmp_path, membership, files, limit):
    assert host_memory(root_with(tmp_path, membership, files)) == limit * GIB


def test_available_memory_is_what_the_limit_leaves_and_pages_of_files(machine, tmp_path):
    stat = f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}"
    files = {"a/memory.max": 8 * GIB, "a/memory.current": 5 * GIB, "a/memory.stat": stat}
    assert available_memory(root_with(tmp_path / "2", "0::/a\n", files)) == (8 - 5 + 2) * GIB
    del files["a/memory.stat"]
    assert available_memory(root_with(tmp_path / "plain", "0::/a\n", files)) == 3 * GIB
    files["a/memory.current"] = 9 * GIB
    assert available_memory(root_with(tmp_path / "full", "0::/a\n", files)) == 0
    files |= {"a/memory.max": 500 * GIB, "a/memory.current": GIB}
    assert available_memory(root_with(tmp_path / "machine", "0::/a\n", files)) == 400 * GIB, (
        "the machine has less"
    )


CODE = """
import os
from contextlib import nullcontext
import psutil
import torch
from dschat_ppo.common.host_memory import freed_memory_returned

MIB = 2**20
first = os.fork()
where = "after" if first else "in"
if first:
    os.wait()
del_first = torch.ones(30 * MIB // 4)  # freeing it makes glibc keep blocks of up to this size
del del_first
process = psutil.Process()
before = process.memory_info().rss
pins = []
if where == "after":
    with freed_memory_returned():
        pass
with freed_memory_returned() if where == "in" else nullcontext():
    for _ in range(4):
        tensors = []
        for _ in range(12):
            tensors.append(torch.ones(4 * MIB // 4))
            # small tensors between them, so that the heap cannot shrink
            pins.append(torch.ones(64))
        del tensors
    # inside: the exit trims the heap in any case
    print((process.memory_info().rss - before) // MIB, flush=True)
"""


@pytest.mark.skipif(_glibc() is None, reason="needs glibc")
@pytest.mark.slow
def test_freed_tensors_leave_the_process():
    """MiB that a process holds after it has freed 48 MiB four times."""
    said = subprocess.run(
        [sys.executable, "-c", CODE], check=True, capture_output=True, text=True
    ).stdout
    inside, after = map(int, said.split())
    assert inside < 8
    assert after > 30, "training allocates the same sizes again and again"
