"""The files of a run that grow, `metrics.jsonl` and `starts.jsonl`, and `result.json`: content,
cutting back on resume, durability, errors when they cannot be written; what trackers get."""

import errno
import json
import math
import os
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from dschat_ppo.common import dist
from dschat_ppo.common.atomic_files import storage_errors
from dschat_ppo.common.paths import STARTS
from dschat_ppo.errors import StopRequested, StorageError
from dschat_ppo.monitor import writers
from dschat_ppo.monitor.trackers import SampledResponse, Start, Tracking
from dschat_ppo.monitor.writers import JsonLines, MetricsWriter, record_start, write_result


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
    answers = [SampledResponse("p", "a", 1.0, 1)]
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
    assert (first["step"], first["loss"], first["eval_loss"]) == (4, 1.0, None) and abs(
        first["time"] - time.time()
    ) < 9


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
    ("problem", "succeeded"),
    [(None, True), (StopRequested("saved"), True), (ValueError("no"), False)],
)
def test_trackers_are_closed_as_failed_unless_the_run_ends_or_stops_as_asked(
    tmp_path, opened, problem, succeeded
):
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
    assert [line.split(" cannot write")[0] for line in said] == [
        "recorded"
    ] * 2 and "refused" in said[0]


def test_a_failed_result_is_an_error_on_every_rank(tmp_path, monkeypatch):
    (tmp_path / "result.json").write_text("old")
    sent = []
    monkeypatch.setattr(dist, "broadcast_object", lambda value, _: sent.append(value) or value)
    monkeypatch.setattr(os, "fsync", fails(errno.ENOSPC))
    with pytest.raises(
        StorageError,
        match=r"result\.json: cannot be written \(No space left on device\); free space",
    ):
        write_result(tmp_path, {"steps": 3})
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    monkeypatch.setattr(dist, "is_main", lambda: False)
    monkeypatch.setattr(dist, "broadcast_object", lambda value, _: sent[0])
    with pytest.raises(StorageError, match="No space left"):
        write_result(tmp_path, {"steps": 3})


def no_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_each_object_is_one_line_without_nan_and_infinity(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append([{"step": 1, "text": "two\nlines \u2028", "scores": {"a": math.nan, "b": 0.5}}])
    lines.append(
        [{"step": 2, "many": [1.0, -math.inf, [math.inf]], "none": None, "yes": True}, {"step": 3}]
    )
    content = (tmp_path / "a.jsonl").read_bytes()
    assert content.endswith(b"\n") and content.count(b"\n") == 3
    assert [json.loads(line, parse_constant=no_constant) for line in content.splitlines()] == [
        {"step": 1, "text": "two\nlines \u2028", "scores": {"a": None, "b": 0.5}},
        {"step": 2, "many": [1.0, None, [None]], "none": None, "yes": True},
        {"step": 3},
    ]


def test_a_resumed_run_continues_after_the_lines_of_the_checkpoint(tmp_path):
    path = tmp_path / "a.jsonl"
    first = JsonLines(path)
    first.begin()
    assert not path.exists() and first.saved_offset() == 0
    first.append([{"step": 1}])
    offset = first.saved_offset()
    first.append([{"step": 2, "run": 1}])
    resumed = JsonLines(path)
    resumed.offset = offset
    resumed.begin()
    resumed.append([{"step": 2, "run": 2}])
    assert path.read_text() == '{"step": 1}\n{"step": 2, "run": 2}\n'
    resumed.offset = 999
    resumed.begin()
    assert path.read_text() == '{"step": 1}\n{"step": 2, "run": 2}\n', (
        "a file that lost lines stays as it is"
    )
    path.write_text('{"step": 1}\n{"st')
    resumed.begin()
    resumed.append([{"step": 2}])
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    JsonLines(path).begin()  # from scratch
    assert path.read_bytes() == b""


def test_other_ranks_neither_write_nor_cut(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "a.jsonl").write_text('{"step": 1}\n')
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.begin()
    lines.append([{"step": 2}])
    assert lines.saved_offset() == 0
    assert (tmp_path / "a.jsonl").read_text() == '{"step": 1}\n'


def test_a_failure_is_a_storage_error_that_names_the_file(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "missing" / "a.jsonl")
    with pytest.raises(
        StorageError,
        match=r"a\.jsonl: cannot be written \(No such file or directory\); .* removed a folder",
    ):
        lines.append([{"step": 1}])
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append([{"step": 1}])

    def full(number):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"a\.jsonl: cannot be written \(Disk quota exceeded\)"):
        lines.saved_offset()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EFBIG, "ulimit -f"),
        (errno.ENOENT, "removed a folder"),
        (errno.EROFS, "let this user write"),
        (errno.EACCES, "let this user write"),
        (errno.EIO, "correct that"),
    ],
)
def test_the_way_out_is_that_of_the_cause(number, words, tmp_path):
    with pytest.raises(StorageError, match=f"{words}.*, then run the same") as refused:
        with storage_errors(tmp_path):
            raise OSError(number, os.strerror(number))
    assert ("free space" in str(refused.value)) == (number == errno.ENOSPC)


def test_a_line_has_the_first_step_the_ranks_and_the_versions_or_is_a_storage_error(tmp_path):
    record_start(tmp_path, 7, 2)
    line = json.loads((tmp_path / STARTS).read_text())
    assert (line["step"], line["world_size"]) == (7, 2)
    assert line["versions"]["torch"] == version("torch") and "bitsandbytes" not in line["versions"]
    (tmp_path / STARTS).unlink()
    (tmp_path / STARTS).mkdir()
    with pytest.raises(
        StorageError, match=r"starts.jsonl: cannot be written \(Is a directory\); correct that"
    ):
        record_start(tmp_path, 1, 1)
