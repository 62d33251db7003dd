"""Conversion in a child process: success, crashes, and stop requests."""

import os
import signal
import threading
import time

import pytest

from dschat_ppo.data import conversion
from dschat_ppo.data.conversion import EMPTY, conversion_error, load_table
from dschat_ppo.errors import StopRequested
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime.processes import children


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return {"data_files": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache")}


@pytest.fixture(autouse=True)
def own_signals():
    yield
    stop_requests.restore()


def test_load_table_finds_the_converted_table_in_the_cache(settings, monkeypatch):
    assert conversion_error("json", settings) is None
    monkeypatch.setattr("datasets.builder.DatasetBuilder._download_and_prepare", None)  # a conversion would call it
    assert load_table("json", settings)["prompt"][:] == ["a", "b"]


def test_a_file_without_rows_is_not_an_unreadable_file(settings, tmp_path):
    (tmp_path / "rows.jsonl").write_text("[]")
    assert conversion_error("json", settings) == EMPTY


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_crashed_child_is_an_error_of_the_file(settings, monkeypatch, capfd, number):
    monkeypatch.setattr(conversion, "load_table", lambda *_: os.kill(os.getpid(), number))
    fault = conversion_error("json", settings)
    assert fault.startswith(f"its reader ended with {number.name}: ")
    assert capfd.readouterr().err == ""


def test_a_child_killed_after_a_stop_request_is_not_an_error_of_the_file(settings, monkeypatch):
    monkeypatch.setattr(conversion, "load_table", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    stop_requests.install()
    stop_requests.set_flag()
    with pytest.raises((EOFError, StopRequested)):  # depends on which one is noticed first
        conversion_error("json", settings)


def test_a_stop_request_does_not_wait_for_a_long_conversion(settings, monkeypatch):
    monkeypatch.setattr(conversion, "load_table", lambda *_: time.sleep(60))
    before, began = set(children()), time.monotonic()
    stop_requests.install()
    threading.Timer(0.2, stop_requests.set_flag).start()
    with pytest.raises(StopRequested, match="while it prepared the data"):
        conversion_error("json", settings)
    assert time.monotonic() - began < 30
    assert set(children()) <= before


def test_a_second_interrupt_does_not_wait_for_the_child(settings, monkeypatch):
    def interrupt(*_):
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(conversion, "load_table", interrupt)
    before, began = set(children()), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        conversion_error("json", settings)
    assert time.monotonic() - began < 30
    assert set(children()) <= before
