"""Files and folders are written completely or not at all, and are on the disk before they get their names."""

import os
import resource
from pathlib import Path

import pytest

from dschat_ppo.common.atomic_files import make_folder, move_files_up, replace_folder, write_file


@pytest.fixture
def calls(monkeypatch):
    """The syncs and renames in order, by file name."""
    seen = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(number):
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{number}")).name))
        fsync(number)

    def recorded_replace(source, target):
        seen.append(("rename", Path(source).name, Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return seen


def test_the_file_is_synced_before_it_is_renamed_and_its_folder_after(tmp_path, calls):
    folder = tmp_path / "a" / "here"
    make_folder(folder)
    assert sorted(calls) == sorted([("sync", "a"), ("sync", tmp_path.name)]), "the names of new folders"
    calls.clear()
    write_file(folder / "latest", "step_000012 é".encode())
    assert (folder / "latest").read_bytes() == "step_000012 é".encode()
    assert calls == [("sync", "latest.partial"), ("rename", "latest.partial", "latest"), ("sync", "here")]
    assert os.listdir(folder) == ["latest"]


def test_a_full_disk_leaves_the_old_file_and_no_partial_one(tmp_path):
    """The kernel refuses for real: a limit on the size of files."""
    write_file(tmp_path / "latest", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write_file(tmp_path / "latest", b"x" * 30_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "latest").read_text() == "old" and os.listdir(tmp_path) == ["latest"]


def test_a_finished_folder_replaces_the_old_one_after_it_is_synced(tmp_path, monkeypatch):
    order = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda number: (order.append("sync"), fsync(number)))
    monkeypatch.setattr(os, "rename", lambda a, b: (order.append(f"{Path(a).name} -> {Path(b).name}"), rename(a, b)))
    for name in ("best", "best.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    replace_folder(tmp_path / "best", tmp_path / "best.partial")
    assert (tmp_path / "best/weights").read_text() == "best.partial" and os.listdir(tmp_path) == ["best"]
    assert order == ["sync", "sync", "best -> best.old", "best.partial -> best", "sync"]


def test_weights_are_moved_up_last(tmp_path, calls):
    partial = tmp_path / "partial"
    partial.mkdir()
    for name in ("a.safetensors", "config.json"):
        (partial / name).write_text(name)
    move_files_up(partial)
    renames = [call[1] for call in calls if call[0] == "rename"]
    assert renames == ["config.json", "a.safetensors"] and sorted(os.listdir(tmp_path)) == sorted(renames)
