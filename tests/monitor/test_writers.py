"""`metrics.jsonl` and `result.json`: content, durability, errors when they cannot be written; what trackers get."""

import errno
import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dschat_ppo.common import dist
from dschat_ppo.errors import StopRequested, StorageError
from dschat_ppo.monitor import writers
from dschat_ppo.monitor.trackers import Answer, Start, Tracking
from dschat_ppo.monitor.writers import MetricsWriter, write_result


def fails(number):
    def act(*_):
        raise OSError(number, os.strerror(number))

    return act


class Recorded:
    """A tracker that records what it receives."""

    failures, name = (OSError,), "recorded"

    def __init__(self, tracking, start):
        self.tracking, self.start, self.written, self.succeeded = tracking, start, [], None

    def write(self, step, metrics, figures):
        self.written.append((step, metrics, figures))

    def close(self, succeeded):
        self.succeeded = succeeded


TRACKING = Tracking(("one", "two"), Path("out"), Path("board"), None, None, {"seed": 3})


@pytest.fixture
def opened(monkeypatch):
    """Trackers that a `MetricsWriter` has opened."""
    made = []

    def open_recorded(tracking, start):
        made.extend(Recorded(tracking, start) for _ in tracking.libraries)
        return made[-len(tracking.libraries) :]

    monkeypatch.setattr(writers, "open_trackers", open_recorded)
    return made


def test_every_tracker_receives_each_step(tmp_path, opened):
    answers = [Answer("p", "a", 1.0, 1)]
    with MetricsWriter(tmp_path, TRACKING) as writer:
        writer.write(4, {"loss": 1.0, "eval_loss": math.nan})
        writer.write(5, {"reward/score_mean": 2.0}, answers)
    assert len(opened) == 2
    for tracker in opened:
        (_, first, none), second = tracker.written
        assert first["loss"] == 1.0 and math.isnan(first["eval_loss"]) and none == ()
        assert second == (5, {"reward/score_mean": 2.0}, answers)
        assert tracker.tracking is TRACKING and tracker.start == Start(None, -1)
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert (first["step"], first["loss"], first["eval_loss"]) == (4, 1.0, None) and abs(first["time"] - time.time()) < 9


def test_a_resumed_run_tells_trackers_which_steps_run_again(tmp_path, opened):
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(1, {"a": 1.0})
        offset = writer.saved_offset()
        writer.write(2, {"a": 1.0})
        writer.write(3, {"a": 1.0})
    with MetricsWriter(tmp_path, TRACKING, (offset, 2)):
        pass
    assert opened[0].start == Start(2, 3)
    with MetricsWriter(tmp_path, TRACKING, (offset, 2)):
        pass
    assert opened[2].start == Start(2, 1), "nothing was written after the checkpoint"
    with MetricsWriter(tmp_path, TRACKING, (0, 7)):
        pass
    assert opened[4].start == Start(7, 1)
    for line in (b"# by hand\n", bytes(20) + b'"a": 1.0}\n', b"[1]\n"):
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 4}\n' + line)
        with MetricsWriter(tmp_path, TRACKING, (12, 2)):
            pass
        assert opened[-2].start == Start(2, 4)


@pytest.mark.parametrize(
    ("problem", "succeeded"), [(None, True), (StopRequested("saved"), True), (ValueError("no"), False)]
)
def test_trackers_are_closed_as_failed_unless_the_run_ends_or_stops_as_asked(tmp_path, opened, problem, succeeded):
    with suppress(ValueError, StopRequested), MetricsWriter(tmp_path, TRACKING):
        if problem is not None:
            raise problem
    assert [tracker.succeeded for tracker in opened] == [succeeded, succeeded]


def test_a_tracker_that_fails_is_left_out_and_ends_no_run(tmp_path, opened, said):
    with MetricsWriter(tmp_path, TRACKING) as writer:
        broken, whole = opened
        broken.write = fails(errno.ECONNREFUSED)
        writer.write(1, {"a": 1.0})
        writer.write(2, {"a": 2.0})
        whole.close = fails(errno.ECONNREFUSED)
    assert [step for step, _, _ in whole.written] == [1, 2] and broken.succeeded is None
    assert [line.split(" cannot write")[0] for line in said] == ["recorded"] * 2 and "refused" in said[0]


def test_a_failed_result_is_an_error_on_every_rank(tmp_path, monkeypatch):
    (tmp_path / "result.json").write_text("old")
    sent = []
    monkeypatch.setattr(dist, "broadcast_object", lambda value, _: sent.append(value) or value)
    monkeypatch.setattr(os, "fsync", fails(errno.ENOSPC))
    with pytest.raises(StorageError, match=r"result\.json: cannot be written \(No space left on device\); free space"):
        write_result(tmp_path, {"steps": 3})
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    monkeypatch.setattr(dist, "is_main", lambda: False)
    monkeypatch.setattr(dist, "broadcast_object", lambda value, _: sent[0])
    with pytest.raises(StorageError, match="No space left"):
        write_result(tmp_path, {"steps": 3})
