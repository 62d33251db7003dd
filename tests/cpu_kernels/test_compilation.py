"""Building the kernels: once, whole or not at all, and a warning where a machine cannot."""

import logging
import os
import stat

import pytest

from dschat_ppo.common import stop_requests
from dschat_ppo.cpu_kernels import operations


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for compiled files."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path / "dschat_ppo_kernels"


@pytest.fixture
def fresh():
    """Nothing is loaded in this process, before and after the test."""
    operations.kernels.cache_clear()
    yield
    operations.kernels.cache_clear()


def a_compiler(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A file of compiled kernels, by a compiler that does not optimise: seconds less."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        patch.setenv("CXX", a_compiler(folder / "cxx", 'exec c++ "$@" -O0'))
        return operations.build(operations.cache_folder())


def test_it_is_compiled_once(library, monkeypatch):
    folder = library.parent
    assert folder.name == "dschat_ppo_kernels" and list(folder.iterdir()) == [library], "no temporary folder stays"
    assert operations.load(library).swiglu.restype is None
    monkeypatch.setenv("CXX", str(folder.parent / "cxx"))
    monkeypatch.setattr(operations, "_compile", lambda command: pytest.fail("compiled again"))
    assert operations.build(folder) == library


def test_another_processor_source_header_or_flag_gets_a_file_of_its_own(monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.write_text("// changed")
    names = [operations._fingerprint(command) for command in (["/bin/sh"], ["/bin/sh", "-g"], ["/bin/cat"])]
    for attribute, value in (("_processor", lambda: ["flags: none"]), ("HEADERS", [other]), ("SOURCES", [other])):
        with monkeypatch.context() as patch:
            patch.setattr(operations, attribute, value)
            names.append(operations._fingerprint(["/bin/sh"]))
    assert len(set(names)) == 6


@pytest.mark.parametrize(("compiler", "reason"), [
    (None, "there is no C++ compiler: install g++, or name a compiler by CXX"),
    ("missing", "CXX names 'no-such-compiler', which is not there: install g++"),
    (
        "echo 'In file x' >&2; echo 'bf16.h:1: error: no such thing' >&2; echo '  | ^~~' >&2; exit 1",
        "failed: bf16.h:1: error: no such thing",
    ),
    ("exit 3", "failed: exit code 3"),
    ('for last; do :; done; echo nothing >"$last"', "file too short"),  # loading fails
], ids=["none", "missing", "fails", "silent", "not a library"])  # fmt: skip
def test_a_machine_that_cannot_compile_is_told_once(folder, fresh, monkeypatch, tmp_path, caplog, compiler, reason):
    monkeypatch.delenv("CXX", raising=False)
    if compiler is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        made = a_compiler(tmp_path / "cxx", compiler)
        monkeypatch.setenv("CXX", "no-such-compiler" if compiler == "missing" else made)
    with caplog.at_level(logging.WARNING):
        assert operations.kernels() is None and operations.kernels() is None
    [record] = [r for r in caplog.records if "kernels" in r.message]
    assert reason in record.message and "slower" in record.message


@pytest.mark.parametrize("home", [pytest.param(True, marks=pytest.mark.release), False])
def test_without_a_folder_each_process_compiles_for_itself(fresh, library, home, monkeypatch, tmp_path, caplog):
    """A file is in the place of the folder, or the home is unknown."""
    monkeypatch.setattr(operations.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CXX", a_compiler(tmp_path / "cxx", f'for last; do :; done; cp "{library}" "$last"'))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file") if home else "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert operations.kernels() is not None and not caplog.text
    assert sorted(tmp_path.iterdir()) == before


def test_a_stop_ends_the_compilation_and_the_run(folder, fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", a_compiler(tmp_path / "cxx", "exit 1"))
    monkeypatch.setattr(stop_requests, "requested", lambda: True)
    with pytest.raises(stop_requests.StopRequested):
        operations.kernels()
