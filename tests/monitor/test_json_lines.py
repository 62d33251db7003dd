"""Growing files of JSON lines: content, cutting back on resume, durability, errors."""

import errno
import json
import math
import os

import pytest

from dschat_ppo.errors import StorageError
from dschat_ppo.monitor import writers
from dschat_ppo.monitor.writers import JsonLines


def no_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_each_object_is_one_line_without_nan_and_infinity(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append([{"step": 1, "text": "two\nlines \u2028", "scores": {"a": math.nan, "b": 0.5}}])
    lines.append([{"step": 2, "many": [1.0, -math.inf, [math.inf]], "none": None, "yes": True}, {"step": 3}])
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
    assert path.read_text() == '{"step": 1}\n{"step": 2, "run": 2}\n', "a file that lost lines stays as it is"
    path.write_text('{"step": 1}\n{"st')
    resumed.begin()
    resumed.append([{"step": 2}])
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    JsonLines(path).begin()  # from scratch
    assert path.read_bytes() == b""


def test_lines_are_synced_by_saved_offset(tmp_path, monkeypatch):
    path, synced, entries = tmp_path / "a.jsonl", [], []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    monkeypatch.setattr(writers, "sync_entries", entries.append)
    lines = JsonLines(path)
    for count in (1, 2):
        lines.append([{"step": count}])
        assert lines.saved_offset() == path.stat().st_size == synced[-1]
    assert entries == [tmp_path], "the name of the new file, once"


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
    with pytest.raises(StorageError, match=r"a\.jsonl: cannot be written \(No such file or directory\); free space"):
        lines.append([{"step": 1}])
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append([{"step": 1}])

    def full(number):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"a\.jsonl: cannot be written \(Disk quota exceeded\)"):
        lines.saved_offset()
