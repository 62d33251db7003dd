"""The lock of a compilation that was killed."""

import sys
import threading
import time

import pytest
from torch.utils import cpp_extension

from dschat_ppo.common import op_builds, progress


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(op_builds.logger(), "warning", lines.append)
    return lines


def seconds_of(**words):
    start = time.monotonic()
    free = op_builds.wait_for_build("cpu_adam", poll=0.01, **words)
    assert free is not bool(op_builds.held_locks("cpu_adam"))
    return time.monotonic() - start


def test_without_a_lock_there_is_nothing_to_wait_for(place, said):
    assert seconds_of(patience=5) < 1
    assert said == []


def test_a_compilation_to_come_is_said_once(place, monkeypatch):
    lines = []
    monkeypatch.setattr(op_builds.logger(), "info", lines.append)
    op_builds.wait_for_build("cpu_adam")
    assert [("cpu_adam" in line, "minutes" in line) for line in lines] == [(True, True)]
    place.with_name("cpu_adam.so").touch()
    op_builds.wait_for_build("cpu_adam")
    assert len(lines) == 1


def test_a_lock_that_nobody_holds_is_named(place, said, monkeypatch):
    monkeypatch.setattr(op_builds, "own_names", lambda: ["python", "bash"])
    place.touch()
    assert 0.1 <= seconds_of(patience=0.1) < 2
    assert len(said) == 1
    assert f"rm {place}" in said[0]
    assert "cpu_adam" in said[0]


def test_a_compiler_at_work_is_waited_for(place, said, monkeypatch):
    began = time.monotonic()
    monkeypatch.setattr(op_builds, "own_names", lambda: ["ninja"] if time.monotonic() - began < 0.5 else ["bash"])
    place.touch()
    beats = []
    progress.heed(beats.append)
    assert seconds_of(patience=0.2) >= 0.65
    progress.heed(None)
    assert len(said) == 1
    assert began + 0.3 < max(beats) < began + 0.65  # the compiler's end, not that of the waiting


def test_a_lock_that_goes_away_is_no_fault(place, said, monkeypatch):
    monkeypatch.setattr(op_builds, "own_names", list)
    place.touch()
    threading.Timer(0.2, place.unlink).start()
    assert seconds_of(patience=30) < 5
    assert said == []


def test_the_lock_is_where_torch_has_it(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cpp_extension._get_build_directory("cpu_adam", verbose=False)
    assert folder.startswith(str(tmp_path))
    assert op_builds.held_locks("cpu_adam") == []
    lock = tmp_path / folder / "lock"
    lock.touch()
    other = lock.parent.parent.parent / f"py{sys.version_info.major}{sys.version_info.minor + 1}_cpu" / "cpu_adam"
    other.mkdir(parents=True)
    (other / "lock").touch()
    assert op_builds.held_locks("cpu_adam") == [lock]
    assert op_builds.held_locks("fused_adam") == []
