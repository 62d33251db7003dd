"""What stands in `metrics.jsonl` and `result.json`."""

import json
import math
import os
import sys
import time
from types import SimpleNamespace

import pytest

from dschat_ppo.common import dist
from dschat_ppo.errors import StorageError
from dschat_ppo.monitor.writers import MetricsWriter, write_result


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    before = time.time()
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
        writer.write(2, {"loss": 2.0})
    first, second = (json.loads(line, parse_constant=no_constant) for line in (tmp_path / "metrics.jsonl").open())
    assert (first["step"], first["loss"], first["grad_norm"], first["lr"]) == (1, None, None, 0.5)
    assert (second["step"], second["loss"]) == (2, 2.0)
    assert before - 0.01 < first["time"] <= second["time"] < time.time() + 0.01


def test_result_is_json_and_leaves_nothing_partial(tmp_path):
    write_result(tmp_path, {"grad_norm_after": math.inf, "steps": 3})
    assert json.loads((tmp_path / "result.json").read_text(), parse_constant=no_constant) == {
        "grad_norm_after": None,
        "steps": 3,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_line_is_there_at_once_and_on_the_disk_when_its_place_is_asked_for(tmp_path, monkeypatch):
    place, synced = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    with MetricsWriter(tmp_path, None) as writer:
        for step in (1, 2):
            writer.write(step, {"a": 1.0})
            assert len(place.read_bytes().splitlines()) == step
            assert writer.saved_offset() == place.stat().st_size == synced[-1]
    with MetricsWriter(tmp_path, None, (synced[0], 2)) as writer:
        assert writer.saved_offset() == place.stat().st_size == synced[0]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "rank", lambda: 1)
    with MetricsWriter(tmp_path, tmp_path / "board") as writer:
        writer.write(1, {"a": 1.0})
        assert writer.saved_offset() == 0
    write_result(tmp_path, {"a": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_a_line_is_told(tmp_path):
    def refuse(line):
        raise OSError(28, "No space left on device")

    with MetricsWriter(tmp_path, None) as writer:
        writer._file = SimpleNamespace(name="metrics.jsonl", write=refuse, close=writer._file.close)
        with pytest.raises(StorageError, match="metrics.jsonl: cannot be written .No space left"):
            writer.write(1, {"a": 1.0})


class Board:
    """Stands for TensorBoard's writer."""

    made: list["Board"] = []

    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.scalars, self.closed = folder, purge_step, [], False
        Board.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def close(self):
        self.closed = True


def test_tensorboard_forgets_the_steps_that_are_done_again(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Board))
    for resumed in (None, (0, 4)):
        with MetricsWriter(tmp_path, tmp_path / "board", resumed) as writer:
            writer.write(4, {"a": 1.0, "b": 2.0})
    assert [board.purge_step for board in Board.made] == [None, 4]
    for board in Board.made:
        assert (board.folder, board.closed) == (str(tmp_path / "board"), True)
        assert board.scalars == [("a", 1.0, 4), ("b", 2.0, 4)]


def test_a_result_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "result.json").write_text("the old one")
    os.link(tmp_path / "result.json", tmp_path / "kept")
    write_result(tmp_path, {"a": 1})
    assert (tmp_path / "kept").read_text() == "the old one", "a new file took its place"
