"""Freed memory goes back to the system inside the block, and is kept for later use outside of it."""

import os
import subprocess
import sys

import pytest

from dschat_ppo.common.heap import _glibc

CODE = """
import sys
from contextlib import nullcontext
import psutil
import torch
from dschat_ppo.common.heap import freed_memory_returned

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
