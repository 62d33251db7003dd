"""A process that prepares data is killed: the run ends, and says so."""

import os
import subprocess
import sys
import time

import pytest
from datasets import Dataset

from dschat_ppo.data.workers import data_workers
from dschat_ppo.errors import UserError

HANGS = """
import sys, threading, time
from datasets import Dataset
from dschat_ppo.data import workers

workers.IDLE_SECONDS = 3.0

def kill_the_first():
    import psutil
    while not psutil.Process().children():
        time.sleep(0.01)
    psutil.Process().children()[0].kill()

rows = Dataset.from_dict({"x": list(range(40))})
threading.Thread(target=kill_the_first, daemon=True).start()
try:
    with workers.data_workers(2):
        rows.map(lambda row: {"y": row["x"]}, num_proc=2, load_from_cache_file=False)
except workers.UserError as problem:
    print(problem, file=sys.stderr)
    sys.exit(2)
sys.exit(9)
"""


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_run_whether_or_not_the_pool_notices():
    """The process is killed as soon as it is there, most often while it waits for work with the pool's lock held."""
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=100, env={**os.environ}, check=False
    )
    assert ended.returncode == 2, ended.stderr[-2000:]
    assert "--preprocessing_num_workers" in ended.stderr
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_map_that_is_whole_is_left_alone():
    rows = Dataset.from_dict({"x": list(range(40))})
    for _ in range(2):
        with data_workers(2):
            made = rows.map(lambda row: {"y": row["x"] + 1}, num_proc=2, load_from_cache_file=False)
        assert made["y"] == list(range(1, 41))
    with pytest.raises(RuntimeError, match="of its own"), data_workers(2):
        raise RuntimeError("of its own")
    with pytest.raises(UserError, match="was killed"), data_workers(2):
        raise RuntimeError("One of the subprocesses has abruptly died during map operation.")
    with pytest.raises(RuntimeError, match="abruptly died"), data_workers(1):
        raise RuntimeError("abruptly died")
