"""The first-failure record: ranks of a machine learn who failed first, who is lost, and who makes progress."""

import os
import shutil
import subprocess
import time

import pytest

from dschat_ppo.common.processes import find_process
from dschat_ppo.run import first_failure
from dschat_ppo.run.first_failure import NO_FOLDER, FirstFailureRecord, open_failure_record


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """`ranks(n)` makes this process rank n of two; all of them share a parent, as under a launcher."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(first_failure.tempfile, "gettempdir", lambda: str(tmp_path))

    def become(number: int) -> FirstFailureRecord:
        monkeypatch.setenv("RANK", str(number))
        return open_failure_record()

    return become


def test_the_first_failure_counts(ranks, tmp_path):
    first, second = ranks(0), ranks(1)
    assert first.folder == second.folder and first.folder.parent == tmp_path
    assert first.folder.stat().st_mode & 0o777 == 0o700 and first.read() is None
    mine = second.record(3, hung=True)
    assert (mine.rank, mine.code, mine.hung) == (1, 3, True)
    second.leave()
    assert first.lost_ranks() == []
    os.environ["RANK"] = "0"
    assert first.record(1) == first.read() == second.read() == mine
    first.leave()
    assert not first.folder.exists(), "the last one removes it"
    assert first.record(5) == mine, "a later failure of the same rank does not count"


def test_a_process_that_ends_without_leaving_is_lost(ranks):
    record = ranks(0)
    process = subprocess.Popen(["sleep", "60"])
    (record.folder / "rank_1").write_text(f"{process.pid} {find_process(process.pid).started}")
    assert record.lost_ranks() == []
    process.kill()
    deadline = time.monotonic() + 10
    while not record.lost_ranks() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert record.lost_ranks() == [1]  # a zombie: its parent has not waited for it
    process.wait()
    (record.folder / "rank_1").write_text(f"{os.getpid()} {find_process(os.getpid()).started + 1}")
    assert record.lost_ranks() == [1], "another process has its number now"
    record.leave()
    assert not record.folder.exists()  # nobody is there to wait for


def test_progress_of_any_rank_counts(ranks):
    record = ranks(0)
    ranks(1)
    for number, age in enumerate((50, 40)):
        os.utime(record.folder / f"rank_{number}", (time.time() - age,) * 2)
    assert 40 <= record.seconds_since_progress() < 45
    os.environ["RANK"] = "0"
    record.mark_progress()
    assert record.seconds_since_progress() < 5
    shutil.rmtree(record.folder)


def test_a_single_rank_or_no_folder_gives_a_record_without_folder(ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(first_failure.tempfile, "gettempdir", lambda: str(tmp_path / "nowhere"))
    record = ranks(0)
    assert record.folder is NO_FOLDER
    assert record.record(2) == record.record(5) == record.read() and record.read().code == 2
    assert record.lost_ranks() == [] and record.seconds_since_progress() == float("inf")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(first_failure.tempfile, "gettempdir", lambda: str(tmp_path))
    assert ranks(0).folder is NO_FOLDER
