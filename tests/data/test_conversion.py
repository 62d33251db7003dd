"""Conversion in a child process: success, crashes, and stop requests."""

import os
import signal
import threading
import time

import pyarrow as pa
import pytest

from dschat_ppo.data.conversion import conversion_error
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.runtime import stop_requests
from dschat_ppo.runtime.processes import children


@pytest.fixture(autouse=True)
def own_signals():
    yield
    stop_requests.restore()


def test_a_conversion_without_errors_has_no_reason(tmp_path):
    assert conversion_error((tmp_path / "made").touch) is None
    assert (tmp_path / "made").exists()


def test_the_reason_is_that_of_the_user_error_or_of_the_library():
    def refuse():
        raise UserError("line 4 is not JSON")

    assert conversion_error(refuse) == "line 4 is not JSON"
    assert conversion_error(lambda: [][0]) == "cannot be read as a table: list index out of range"


def no_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("convert", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), ["ended with SIGSEGV", "damaged"]),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), ["memory", "--streaming"]),  # as Linux does when memory is short
        (no_memory, ["memory", "--streaming"]),
        (lambda: pa.allocate_buffer(2**60), ["memory", "--streaming"]),
    ],
)
def test_a_crashed_child_is_an_error_of_the_file(capfd, convert, said):
    fault = conversion_error(convert)
    assert all(part in fault for part in said) and ("damaged" in fault) is ("damaged" in said)
    assert capfd.readouterr().err == ""


def test_a_child_killed_after_a_stop_request_is_not_an_error_of_the_file():
    stop_requests.install()
    stop_requests.set_flag()
    with pytest.raises((EOFError, StopRequested)):  # depends on which one is noticed first
        conversion_error(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_stop_request_does_not_wait_for_a_long_conversion():
    before, began = set(children()), time.monotonic()
    stop_requests.install()
    threading.Timer(0.2, stop_requests.set_flag).start()
    with pytest.raises(StopRequested, match="while it prepared the data"):
        conversion_error(lambda: time.sleep(60))
    assert time.monotonic() - began < 30
    assert set(children()) <= before


def test_a_second_interrupt_does_not_wait_for_the_child():
    def interrupt():
        time.sleep(0.2)  # until the parent has left the handlers of a fork, which ignore exceptions
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    before, began = set(children()), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        conversion_error(interrupt)
    assert time.monotonic() - began < 30
    assert set(children()) <= before
