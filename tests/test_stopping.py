"""Requests to stop."""

import os
import signal

import pytest

from dschat_ppo.common import stopping


@pytest.fixture(autouse=True)
def handlers():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    stopping.restore()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_sigterm_is_noted():
    stopping.install()
    assert not stopping.requested()
    assert stopping.reason() is None
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.requested()
    assert stopping.reason() == "SIGTERM"
    stopping.install()  # a new run in this process
    assert not stopping.requested()


def test_a_person_may_insist():
    stopping.install()
    os.kill(os.getpid(), signal.SIGINT)
    assert stopping.reason() == "SIGINT"
    os.kill(os.getpid(), signal.SIGTERM)  # of the launcher
    assert stopping.reason() == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_after_the_launchers_signal_is_the_first():
    stopping.install()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert stopping.reason() == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_what_is_ignored_stays_ignored():
    own = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stopping.install()
        os.kill(os.getpid(), signal.SIGINT)
        assert not stopping.requested()
    finally:
        signal.signal(signal.SIGINT, own)


def test_forked_processes_do_not_take_part():
    stopping.install()
    child = os.fork()
    if not child:
        usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        os._exit(7 if usual else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stopping.restore()
    child = os.fork()
    if not child:
        os._exit(7 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_parent_that_is_no_launcher_may_end():
    """As with nohup: the shell goes, the run stays."""
    read, write = os.pipe()
    middle = os.fork()
    if not middle:
        child = os.fork()
        if child:
            os.waitpid(child, os.WNOHANG)
            os._exit(0)
        stopping.install()
        parent = os.getppid()
        while os.getppid() == parent and parent == os.getppid():
            if os.getppid() != os.getpgrp() and stopping.requested():
                break
            parent = 0
        os.write(write, b"stop" if stopping.requested() else b"go on")
        os._exit(0)
    os.waitpid(middle, 0)
    os.close(write)
    assert os.read(read, 10) == b"go on"
    os.close(read)
