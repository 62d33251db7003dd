"""Host memory: limits of cgroups in a made-up root, freed memory that goes back, and objects that last."""

import gc
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace

import psutil
import pytest

from dschat_ppo.common.host_memory import _glibc, available_memory, host_memory, lasting_objects

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


@pytest.mark.parametrize(("membership", "files", "limit"), [
    ("0::/a/b\n", {"a/b/memory.max": 8 * GIB}, 8),
    ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": 6 * GIB}, 6),  # that of a job around it
    ("0::/a/b\n", {"a/b/memory.max": 8 * GIB, "a/memory.max": 6 * GIB}, 6),
    ("0::/a/b\n", {"a/b/memory.max": 8 * GIB, "a/memory.max": 16 * GIB}, 8),
    ("0::/\n", {"memory.max": 4 * GIB}, 4),  # a container that sees its own cgroup as the root
    ("0::/docker/123\n", {"memory.max": 4 * GIB}, 4),  # and one that knows its path outside
    ("0::/../other\n", {"memory.max": 4 * GIB, "../other/memory.max": 2 * GIB}, 4),  # outside of what it sees
    ("0::/a\n", {"b/memory.max": 4 * GIB}, 512),  # of another cgroup
    ("0::/a\n", {"a/memory.max": "max"}, 512),
    ("0::/a\n", {"a/memory.max": 1024 * GIB}, 512),
    ("0::/a\n", {}, 512),
    ("4:devices:/b\n0::/a\n", {"b/memory.max": GIB, "a/memory.max": 3 * GIB}, 3),  # of another hierarchy
])  # fmt: skip
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


def test_available_memory_is_that_of_the_machine_where_it_has_less(machine, tmp_path):
    files = {"a/memory.max": 500 * GIB, "a/memory.current": GIB}
    assert available_memory(root_with(tmp_path, "0::/a\n", files)) == 400 * GIB


CODE = """
import sys
from contextlib import nullcontext
import psutil
import torch
from dschat_ppo.common.host_memory import freed_memory_returned

MIB = 2**20
del_first = torch.ones(30 * MIB // 4)  # freeing it makes glibc keep blocks of up to this size
del del_first
process = psutil.Process()
before = process.memory_info().rss
pins = []
if sys.argv[1] == "after":
    with freed_memory_returned():
        pass
with freed_memory_returned() if sys.argv[1] == "in" else nullcontext():
    for _ in range(4):
        tensors = []
        for _ in range(12):
            tensors.append(torch.ones(4 * MIB // 4))
            pins.append(torch.ones(64))  # small tensors between them, so that the heap cannot shrink
        del tensors
    print((process.memory_info().rss - before) // MIB)  # inside: the exit trims the heap in any case
"""


def kept(where: str, **variables: str) -> int:
    """MiB that the process, with these environment variables, holds after it has freed 48 MiB four times."""
    env = {**os.environ, **variables}
    words = [sys.executable, "-c", CODE, where]
    return int(subprocess.run(words, check=True, capture_output=True, text=True, env=env).stdout)


@pytest.mark.skipif(_glibc() is None, reason="needs glibc")
def test_freed_tensors_leave_the_process():
    assert kept("in") < 8
    assert kept("out") > 30  # otherwise this test shows nothing


@pytest.mark.skipif(_glibc() is None, reason="needs glibc")
def test_afterwards_freed_tensors_are_kept_unless_the_user_set_glibcs_threshold():
    assert kept("after") > 30
    assert kept("after", MALLOC_MMAP_THRESHOLD_="65536") < 8


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture
def unfrozen():
    yield
    gc.enable()


def test_inside_the_block_nothing_is_collected_and_its_objects_are_not_searched_later(unfrozen):
    before = gc.get_freeze_count()
    with lasting_objects():
        assert not gc.isenabled()
        kept = weakref.ref(Cycle())
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    gc.collect()
    assert kept() is not None, "it is in the permanent generation"
