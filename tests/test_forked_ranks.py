"""Ranks that are forked for tests: a test sees their output and how they end."""

import subprocess
import textwrap
import time

import pytest
from launch import forked

from dschat_ppo.common.processes import find_process


def worker(folder, body: str):
    """A script with the rank in `rank` and the words in `sys.argv`."""
    script = folder / "worker.py"
    script.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(body))
    return script


def test_each_rank_has_its_numbers_and_the_words(tmp_path):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR"
    script = worker(tmp_path, f"print(__name__, *map(os.environ.get, '{names}'.split()), *sys.argv[1:])")
    result = forked(2, script, "a b", 1)
    lines = [f"__main__ {rank} {rank} 2 2 127.0.0.1 --local_rank={rank} a b 1" for rank in range(2)]
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, lines)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise ValueError('of rank 1')", 1, "ValueError: of rank 1\n"),
        ("sys.exit(7)", 7, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", 247, ""),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_its_exit_code_is_the_launchs(tmp_path, end, code, said):
    result = forked(2, worker(tmp_path, f"if rank == 1: {end}\ntime.sleep(100)"), timeout=50)
    assert result.returncode == code and result.stderr.endswith(said)


def test_a_launch_that_takes_too_long_is_ended_and_the_next_one_starts(tmp_path):
    slow = worker(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(100)")
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        forked(1, slow, timeout=3)
    rank, deadline = int(raised.value.output), time.monotonic() + 20
    while (process := find_process(rank)) is not None and not process.ended:
        assert time.monotonic() < deadline, "the rank still runs"
        time.sleep(0.05)
    assert forked(1, worker(tmp_path, "print('well')")).stdout == "well\n"
