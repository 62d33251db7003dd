"""Signs of life while the disk is slow: one for each block, and patience where a library or the kernel holds it."""

import os
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file

from dschat_ppo.checkpoint import engine_state, state_file
from dschat_ppo.checkpoint.engine_state import BackgroundWriter
from dschat_ppo.checkpoint.folder import CheckpointFolder
from dschat_ppo.checkpoint.reshard import WEIGHTS, Fragment, Shard, gather
from dschat_ppo.common import atomic_files, heartbeat
from dschat_ppo.config.cli import parse
from dschat_ppo.data.fingerprint import fingerprint
from dschat_ppo.models import loading, saving
from dschat_ppo.models.fingerprint import BLOCK_BYTES, BLOCKS, model_fingerprint
from dschat_ppo.nonfinite.repro_bundle import FailureContext, ReproBundles
from dschat_ppo.session.begin_run import _remove_earlier


@pytest.fixture
def beats():
    found = []
    heartbeat.on_heartbeat(found.append)
    yield found
    heartbeat.on_heartbeat(None)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(atomic_files, "_BLOCK_BYTES", 10)


def noting(patience, act):
    """`act`, which notes whether the watchdog has patience with it."""

    def noted(*args, **kwargs):
        patience.append(heartbeat.is_patient())
        return act(*args, **kwargs)

    return noted


def test_a_beat_for_each_block_that_is_read(tmp_path, beats, small_blocks):
    (tmp_path / "file").write_bytes(bytes(range(35)))
    assert b"".join(atomic_files.blocks_of(tmp_path / "file")) == bytes(range(35))
    assert len(beats) == 4
    atomic_files.checksum(tmp_path / "file")
    assert len(beats) == 8


def test_a_beat_for_each_part_of_what_is_compared(tmp_path, beats):
    fingerprint(Dataset.from_dict({"ids": [[1]] * (2 * 4096 + 1)}))
    assert len(beats) == 3
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(BLOCKS * BLOCK_BYTES + 1))
    model_fingerprint(tmp_path)
    assert len(beats) == 3 + 1 + BLOCKS


def test_a_beat_for_each_block_that_is_written(tmp_path, beats, small_blocks):
    atomic_files.write_file(tmp_path / "file", memoryview(bytes(range(35))))
    assert (tmp_path / "file").read_bytes() == bytes(range(35))
    assert len(beats) == 4 + 2 + 2  # and around two calls that sync


def test_syncing_and_removing_are_waited_for(tmp_path, monkeypatch):
    patience = []
    monkeypatch.setattr(os, "fsync", noting(patience, os.fsync))
    monkeypatch.setattr(shutil, "rmtree", noting(patience, shutil.rmtree))
    (tmp_path / "new").mkdir()
    (tmp_path / "new/file").touch()
    (tmp_path / "old").mkdir()
    atomic_files.replace_folder(tmp_path / "old", tmp_path / "new")
    assert patience == [True] * 4  # file, folder, the folder above, what was there
    assert not heartbeat.is_patient()


def test_checkpoints_dumps_and_earlier_outputs_are_removed_with_patience(tmp_path, monkeypatch):
    patience = []
    monkeypatch.setattr(shutil, "rmtree", noting(patience, shutil.rmtree))
    checkpoints = CheckpointFolder(tmp_path)
    for _ in range(2):
        checkpoints.partial("step_000001")
    assert patience == [True]
    checkpoints.clear_partials()
    assert patience == [True] * 2
    words = [
        "--model_name_or_path",
        "m",
        "--data_path",
        "d",
        "--output_dir",
        str(tmp_path),
        "--max_nonfinite_skips",
        "1",
    ]
    config = parse("sft", words)
    for step in range(3):
        ReproBundles("sft", config, None).write(step, 0, FailureContext([], {}), {})
    assert patience == [True] * 3
    _remove_earlier(tmp_path, config.run)
    assert patience == [True] * 5 and sorted(tmp_path.iterdir()) == []


def test_states_are_read_with_patience(tmp_path, monkeypatch):
    patience = []
    state_file.save_state(tmp_path / "state.pt", {"a": torch.ones(2)})
    monkeypatch.setattr(torch, "load", noting(patience, torch.load))
    state_file.load_state(tmp_path / "state.pt")
    BackgroundWriter().load(str(tmp_path / "state.pt"))
    assert patience == [True, True]


def test_weights_are_copied_from_their_file_with_patience():
    patience = []

    class Engine:
        checkpoint_engine = None

        def load_module_state_dict(self, checkpoint, strict):
            patience.append((heartbeat.is_patient(), checkpoint, strict))

    engine = Engine()
    with engine_state._files_of(engine, BackgroundWriter()):
        engine.load_module_state_dict({"a": 1}, strict=True)
        assert not heartbeat.is_patient()  # the rest waits for other ranks
    engine.load_module_state_dict({"a": 1}, strict=False)
    assert patience == [(True, {"a": 1}, True), (False, {"a": 1}, False)]


def test_the_writer_is_waited_for_but_speaks_for_nobody(tmp_path, monkeypatch, beats):
    """It writes and syncs without a sign; the thread that waits for it has patience."""
    patience, begun, gate = [], threading.Event(), threading.Event()

    def write(state, path):
        begun.set()
        gate.wait(10)
        return whole(state, path)

    whole = engine_state._write
    monkeypatch.setattr(engine_state, "_write", write)
    monkeypatch.setattr(os, "fsync", noting(patience, os.fsync))
    writer = BackgroundWriter()
    writer.save({"a": torch.ones(2)}, str(tmp_path / "a.pt"))
    begun.wait(10)
    assert len(beats) == 1 and not heartbeat.is_patient()  # of the copy
    gate.set()
    while not writer.done():
        pass
    assert len(beats) == 1 and patience == [False]
    gate.clear()
    begun.clear()
    writer.save({"a": torch.ones(2)}, str(tmp_path / "b.pt"))
    begun.wait(10)
    threading.Timer(0.2, gate.set).start()
    assert len(writer.wait()) == 2
    assert patience == [False, True]
    assert not heartbeat.is_patient()


def test_a_beat_for_each_piece_of_other_ranks_states(beats):
    shards = [Shard([Fragment("w", 2 * rank, 2, 0, 0)], [{WEIGHTS: torch.ones(2)}], 0) for rank in range(2)]
    assert gather(shards, [Fragment("w", 1, 2, 0, 0)], [2])[0][WEIGHTS].tolist() == [1, 1]
    assert len(beats) == 2


@pytest.mark.parametrize(("stage", "watchdog_paused"), [(None, True), (2, True), (3, False)])
def test_weights_are_read_before_ranks_wait_for_each_other(
    tmp_path, beats, small_blocks, monkeypatch, stage, watchdog_paused
):
    monkeypatch.setattr("transformers.integrations.deepspeed.HfDeepSpeedConfig", lambda config: SimpleNamespace())
    save_file({"w": torch.ones(8)}, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))  # nobody reads it beside the other
    blocks = -(-(tmp_path / "model.safetensors").stat().st_size // 10)
    config = None if stage is None else {"zero_optimization": {"stage": stage}}
    for _ in range(2):  # once
        with loading._loading(str(tmp_path), config):
            assert heartbeat.is_patient() is watchdog_paused
    assert len(beats) == blocks + (4 if watchdog_paused else 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    loading._read_through.cache_clear()
    with loading._loading(str(tmp_path), {"zero_optimization": {"stage": 3}}):
        assert len(beats) == blocks + (4 if watchdog_paused else 0)


def test_models_are_saved_with_patience(tmp_path):
    patience = []
    part = SimpleNamespace(save_pretrained=lambda *_, **__: patience.append(heartbeat.is_patient()))
    assert saving._write(part, {}, part, tmp_path / "model") is None
    assert patience == [True, True]
