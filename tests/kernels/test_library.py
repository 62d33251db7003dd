"""Building the kernels: once, whole or not at all, and a warning where a machine cannot."""

import logging
import os
import stat

import pytest

from dschat_ppo.kernels import library


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for compiled files."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path / "dschat_ppo_kernels"


@pytest.fixture
def fresh():
    """Nothing is loaded in this process, before and after the test."""
    library.kernels.cache_clear()
    yield
    library.kernels.cache_clear()


def a_compiler(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_it_is_compiled_once(folder, monkeypatch):
    made = library.build()
    assert made.parent == folder and list(folder.iterdir()) == [made], "no temporary folder stays"
    assert library.load(made).swiglu.restype is None
    monkeypatch.setattr(library, "_compile", lambda command: pytest.fail("compiled again"))
    assert library.build() == made


def test_another_processor_source_or_flag_gets_a_file_of_its_own(folder, monkeypatch, tmp_path):
    names = {library._fingerprint("/bin/sh")}
    with monkeypatch.context() as patch:
        patch.setattr(library, "_processor", lambda: ["flags: none"])
        names.add(library._fingerprint("/bin/sh"))
    with monkeypatch.context() as patch:
        patch.setattr(library, "FLAGS", (*library.FLAGS, "-g"))
        names.add(library._fingerprint("/bin/sh"))
    other = tmp_path / "bf16.h"
    other.write_text("// changed")
    with monkeypatch.context() as patch:
        patch.setattr(library, "HEADERS", [other])
        names.add(library._fingerprint("/bin/sh"))
    names.add(library._fingerprint("/bin/cat"))
    assert len(names) == 5


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (None, "no C++ compiler: install g++, or name a compiler by CXX"),
        ("echo 'bf16.h:1: error: no such thing' >&2; exit 1", "failed: bf16.h:1: error: no such thing"),
        ("exit 3", "failed: exit code 3"),
        ('for last; do :; done; echo nothing >"$last"', "file too short"),  # loading fails
    ],
    ids=["none", "fails", "silent", "not a library"],
)
def test_a_machine_that_cannot_compile_is_told_once(folder, fresh, monkeypatch, tmp_path, caplog, compiler, reason):
    monkeypatch.setenv("PATH", str(tmp_path) if compiler is None else os.environ["PATH"])
    monkeypatch.setenv("CXX", "no-such-compiler" if compiler is None else a_compiler(tmp_path / "cxx", compiler))
    with caplog.at_level(logging.WARNING):
        assert library.kernels() is None and library.kernels() is None
    [record] = [r for r in caplog.records if "kernels" in r.message]
    assert reason in record.message and "slower" in record.message


def test_a_folder_that_cannot_be_written_is_named(fresh, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert library.kernels() is None
    assert str(tmp_path / "file") in caplog.text
