"""`metrics.jsonl` and `result.json`: content, durability, and errors when they cannot be written."""

import errno
import json
import math
import os
import sys
import time
from types import SimpleNamespace

import pytest

from dschat_ppo.common.logging import logger
from dschat_ppo.errors import StorageError
from dschat_ppo.monitor import writers
from dschat_ppo.monitor.writers import MetricsWriter, write_result


def no_constant(name):
    raise AssertionError(f"{name} is not JSON")


def fails(number):
    def act(*_):
        raise OSError(number, os.strerror(number))

    return act


def test_nan_and_infinity_are_written_as_null(tmp_path):
    before = time.time()
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
        writer.write(2, {"loss": 2.0})
    first, second = (json.loads(line, parse_constant=no_constant) for line in (tmp_path / "metrics.jsonl").open())
    assert (first["step"], first["loss"], first["grad_norm"], first["lr"]) == (1, None, None, 0.5)
    assert (second["step"], second["loss"]) == (2, 2.0)
    assert before - 0.01 < first["time"] <= second["time"] < time.time() + 0.01


def test_a_metrics_file_with_lost_lines_is_reported(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(logger(), "warning", warnings.append)
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(1, {"loss": 2.0})
        offset = writer.saved_offset()
        writer.write(2, {"loss": 1.0})
    for resumed in ((offset, 2), (0, 2)):
        with MetricsWriter(tmp_path, None, resumed):
            pass
    assert warnings == []
    (tmp_path / "metrics.jsonl").write_bytes(b'{}\n{"step": 1')
    with MetricsWriter(tmp_path, None, (offset, 2)):
        pass
    assert len(warnings) == 1
    assert f"{tmp_path}/metrics.jsonl: has 13 bytes, but {offset} when" in warnings[0]
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"{}\n"


def test_a_failed_sync_is_a_storage_error(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path, None) as writer:
        monkeypatch.setattr(os, "fsync", fails(errno.EDQUOT))
        with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written \(Disk quota exceeded\)"):
            writer.saved_offset()


def test_the_result_is_json_without_partial_files(tmp_path):
    write_result(tmp_path, {"grad_norm_after": math.inf, "steps": 3})
    assert json.loads((tmp_path / "result.json").read_text(), parse_constant=no_constant) == {
        "grad_norm_after": None,
        "steps": 3,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_lines_are_written_at_once_and_synced_by_saved_offset(tmp_path, monkeypatch):
    place, synced = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    monkeypatch.setattr(writers, "sync_entries", lambda folder: None)
    with MetricsWriter(tmp_path, None) as writer:
        for step in (1, 2):
            writer.write(step, {"a": 1.0})
            assert len(place.read_bytes().splitlines()) == step
            assert writer.saved_offset() == place.stat().st_size == synced[-1]
    with MetricsWriter(tmp_path, None, (synced[0], 2)) as writer:
        assert writer.saved_offset() == place.stat().st_size == synced[0]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with MetricsWriter(tmp_path, tmp_path / "board") as writer:
        writer.write(1, {"a": 1.0})
        assert writer.saved_offset() == 0
    write_result(tmp_path, {"a": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_a_storage_error(tmp_path):
    def refuse(line):
        raise OSError(28, "No space left on device")

    with MetricsWriter(tmp_path, None) as writer:
        writer._file = SimpleNamespace(name="metrics.jsonl", write=refuse, close=writer._file.close)
        with pytest.raises(StorageError, match="metrics.jsonl: cannot be written .No space left"):
            writer.write(1, {"a": 1.0})


class Board:
    """Replaces TensorBoard's writer."""

    made: list["Board"] = []

    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
        Board.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def close(self):
        self.closed = True


def test_tensorboard_purges_the_steps_that_run_again(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Board))
    for resumed in (None, (0, 4)):
        with MetricsWriter(tmp_path, tmp_path / "board", resumed) as writer:
            writer.write(4, {"a": 1.0, "b": 2.0})
    assert [board.purge_step for board in Board.made] == [None, 4]
    for board in Board.made:
        assert (board.folder, board.closed) == (str(tmp_path / "board"), True)
        assert board.scalars == [("a", 1.0, 4), ("b", 2.0, 4)]


def test_a_result_is_replaced_atomically(tmp_path):
    (tmp_path / "result.json").write_text("the old one")
    os.link(tmp_path / "result.json", tmp_path / "kept")
    write_result(tmp_path, {"a": 1})
    assert (tmp_path / "kept").read_text() == "the old one", "a new file took its place"


def test_the_result_is_synced_before_its_rename_and_the_folder_after(tmp_path, monkeypatch):
    calls, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (calls.append(os.readlink(f"/proc/self/fd/{number}")), sync(number))
    )
    monkeypatch.setattr(os, "replace", lambda one, other: (calls.append("replace"), replace(one, other)))
    write_result(tmp_path, {"steps": 3})
    assert calls == [f"{tmp_path}/result.json.partial", "replace", str(tmp_path)]


def test_a_failed_result_is_an_error_on_every_rank(tmp_path, monkeypatch):
    (tmp_path / "result.json").write_text("old")
    sent = []
    monkeypatch.setattr(writers, "broadcast_object", lambda value: sent.append(value) or value)
    monkeypatch.setattr(os, "fsync", fails(errno.ENOSPC))
    with pytest.raises(StorageError, match=r"result\.json: cannot be written \(No space left on device\); free space"):
        write_result(tmp_path, {"steps": 3})
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    monkeypatch.setattr(writers, "is_main", lambda: False)
    monkeypatch.setattr(writers, "broadcast_object", lambda value: sent[0])
    with pytest.raises(StorageError, match="No space left"):
        write_result(tmp_path, {"steps": 3})
