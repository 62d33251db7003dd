"""Files and folders are written completely or not at all; heartbeats while a disk is slow: one per
block, and a paused watchdog where a library or the kernel does the work."""

import os
import resource
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from dschat_ppo.checkpoint import state_files
from dschat_ppo.checkpoint.state_files import BackgroundWriter
from dschat_ppo.checkpoint.store import CheckpointFolder
from dschat_ppo.common import atomic_files, heartbeat
from dschat_ppo.common.atomic_files import make_folder, move_files_up, replace_folder, write_file
from dschat_ppo.config.cli import parse
from dschat_ppo.models import loading
from dschat_ppo.run.output_folder import remove_earlier_outputs


@pytest.fixture
def heartbeats(monkeypatch):
    """Grows by each heartbeat, which alone asks for the time here."""
    found = []
    clock = SimpleNamespace(monotonic=lambda: found.append(1) or time.monotonic())
    monkeypatch.setattr(heartbeat, "time", clock)
    return found


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(atomic_files, "_BLOCK_BYTES", 10)


def noting(paused, act):
    """`act`, which notes whether the watchdog is paused."""

    def noted(*args, **kwargs):
        paused.append(heartbeat.watchdog_is_paused())
        return act(*args, **kwargs)

    return noted


def test_each_block_that_is_read_sends_a_heartbeat(tmp_path, heartbeats, small_blocks):
    (tmp_path / "file").write_bytes(bytes(range(35)))
    assert b"".join(atomic_files.read_blocks(tmp_path / "file")) == bytes(range(35))
    assert len(heartbeats) == 4
    atomic_files.checksum(tmp_path / "file")
    assert len(heartbeats) == 8


def test_the_watchdog_is_paused_for_syncs_and_removals(tmp_path, monkeypatch):
    paused = []
    monkeypatch.setattr(shutil, "rmtree", noting(paused, shutil.rmtree))
    monkeypatch.setattr(os, "fsync", noting(paused, os.fsync))
    CheckpointFolder(tmp_path).make_partial("step_000001")
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    atomic_files.replace_folder(tmp_path / "old", tmp_path / "new")
    assert paused == [True] * 3  # folder, the folder above, what was there
    config = parse(
        "sft", ["--model_name_or_path", "m", "--data_path", "d", "--output_dir", str(tmp_path)]
    )
    remove_earlier_outputs(tmp_path, config.run)
    assert paused == [True] * 4 and not (tmp_path / "checkpoints").exists()
    assert not heartbeat.watchdog_is_paused()


def test_the_background_writer_sends_no_heartbeats_and_wait_pauses_the_watchdog(
    tmp_path, monkeypatch, heartbeats
):
    """The writing thread sends no heartbeat; the thread that waits for it pauses the watchdog."""
    paused, begun, gate = [], threading.Event(), threading.Event()

    def write(state, path):
        begun.set()
        gate.wait(10)
        return whole(state, path)

    whole = state_files._write_and_describe
    monkeypatch.setattr(state_files, "_write_and_describe", write)
    monkeypatch.setattr(os, "fsync", noting(paused, os.fsync))
    writer = BackgroundWriter()
    writer.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    begun.wait(10)
    assert len(heartbeats) == 1 and not heartbeat.watchdog_is_paused()  # of the copy
    gate.set()
    while not writer.done():
        pass
    assert len(heartbeats) == 1 and paused == [False]
    gate.clear()
    begun.clear()
    writer.save({"a": torch.ones(2)}, tmp_path / "b.pt")
    begun.wait(10)
    threading.Timer(0.2, gate.set).start()
    assert len(writer.wait()) == 2
    assert paused == [False, True]
    assert not heartbeat.watchdog_is_paused()


@pytest.mark.parametrize(("stage", "watchdog_paused"), [(None, True), (2, True), (3, False)])
def test_weights_are_read_before_ranks_wait_for_each_other(
    tmp_path, heartbeats, small_blocks, monkeypatch, stage, watchdog_paused
):
    monkeypatch.setattr(
        "transformers.integrations.deepspeed.HfDeepSpeedConfig", lambda config: SimpleNamespace()
    )
    save_file({"w": torch.ones(8)}, tmp_path / "model.safetensors")
    # it is not read if there are safetensors
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    blocks = -(-(tmp_path / "model.safetensors").stat().st_size // 10)
    config = None if stage is None else {"zero_optimization": {"stage": stage}}
    for _ in range(2):  # once
        with loading._prepared_loading(str(tmp_path), config):
            assert heartbeat.watchdog_is_paused() is watchdog_paused
    assert len(heartbeats) == blocks + (4 if watchdog_paused else 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    loading._read_through.cache_clear()
    with loading._prepared_loading(str(tmp_path), {"zero_optimization": {"stage": 3}}):
        assert len(heartbeats) == blocks + (4 if watchdog_paused else 0)


def test_pauses_of_the_watchdog_nest_and_end():
    with heartbeat.watchdog_paused():
        with heartbeat.watchdog_paused():
            pass
        assert heartbeat.watchdog_is_paused()
        time.sleep(0.02)
        assert heartbeat.idle_seconds() == 0
    assert not heartbeat.watchdog_is_paused()
    assert heartbeat.idle_seconds() < 0.02  # leaving sends a heartbeat
    time.sleep(0.02)
    assert heartbeat.idle_seconds() >= 0.02


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
    assert sorted(calls) == sorted([("sync", "a"), ("sync", tmp_path.name)]), (
        "the names of new folders"
    )
    calls.clear()
    write_file(folder / "latest", "step_000012 é".encode())
    assert (folder / "latest").read_bytes() == "step_000012 é".encode()
    assert calls == [
        ("sync", "latest.partial"),
        ("rename", "latest.partial", "latest"),
        ("sync", "here"),
    ]
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
    monkeypatch.setattr(
        os, "rename", lambda a, b: (order.append(f"{Path(a).name} -> {Path(b).name}"), rename(a, b))
    )
    for name in ("best", "best.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    replace_folder(tmp_path / "best", tmp_path / "best.partial")
    assert (tmp_path / "best/weights").read_text() == "best.partial" and os.listdir(tmp_path) == [
        "best"
    ]
    assert order == ["sync", "sync", "best -> best.old", "best.partial -> best", "sync"]


def test_weights_are_moved_up_last(tmp_path, calls):
    partial = tmp_path / "partial"
    partial.mkdir()
    for name in ("a.safetensors", "config.json"):
        (partial / name).write_text(name)
    move_files_up(partial)
    renames = [call[1] for call in calls if call[0] == "rename"]
    assert renames == ["config.json", "a.safetensors"] and sorted(os.listdir(tmp_path)) == sorted(
        renames
    )
