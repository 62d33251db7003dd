"""What was compiled is loaded while it is as it was, and compiled again otherwise."""

import errno
import fcntl
import os
from types import SimpleNamespace

import pytest
from power_loss_model import PowerLoss

from dschat_ppo.runtime import op_builds
from dschat_ppo.runtime.op_builds import OWN_LOCK, _guarded


@pytest.fixture
def operator(tmp_path, monkeypatch):
    """Loads an operator that is compiled where it is not there; gives how often it was compiled."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(op_builds, "POLL_SECONDS", 0.01)
    folder, compiled = tmp_path / "toy", []

    def jit_load(builder):
        if not (folder / "toy.so").exists():
            assert [path.name for path in folder.iterdir()] == [OWN_LOCK], "nothing of before is linked"
            (folder / "toy.o").write_bytes(b"object" * 50)
            (folder / "toy.so").write_bytes(b"library" * 50)
            compiled.append(builder.name)
        return (folder / "toy.so").read_bytes()

    def load():
        assert _guarded(jit_load)(SimpleNamespace(name="toy")) == b"library" * 50
        return len(compiled)

    load.folder = folder
    return load


def test_what_was_compiled_is_compiled_once_and_on_the_disk(operator, tmp_path, monkeypatch):
    power = PowerLoss(monkeypatch)
    assert [operator(), operator()] == [1, 1]
    names = power.names[operator.folder.stat().st_ino]
    for name in ("toy.o", "toy.so", "dschat_ppo.whole"):
        assert power.content[names[name]] == (operator.folder / name).read_bytes()
    assert power.too_early == []


@pytest.mark.parametrize("content", [b"", b"libr", bytes(350), None])
def test_a_library_that_lost_its_content_is_compiled_again(operator, content):
    operator()
    if content is None:
        os.unlink(operator.folder / "dschat_ppo.whole")  # the power went before it was there
    else:
        (operator.folder / "toy.so").write_bytes(content)
    assert [operator(), operator()] == [2, 2]


def test_objects_of_a_compilation_that_was_cut_are_not_linked(operator):
    operator.folder.mkdir()
    (operator.folder / "toy.o").write_bytes(b"")
    (operator.folder / "sub").mkdir()
    assert operator() == 1


def test_without_locks_what_another_process_compiles_is_left_alone(operator, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", fail)
    operator.folder.mkdir()
    (operator.folder / "toy.so").write_bytes(b"library" * 50)
    (operator.folder / "toy.o").write_bytes(b"half")  # of a process that is still at work
    assert operator() == 0
    assert sorted(path.name for path in operator.folder.iterdir()) == [OWN_LOCK, "toy.o", "toy.so"]
