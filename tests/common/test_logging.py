"""Log lines: which ranks print them, and tables."""

import io
import logging
import os
import sys

import pytest

from dschat_ppo.common.logging import _print_once, logger, print_line, quiet_prints


@pytest.fixture
def fresh_logger():
    """Handlers depend on the rank: they are made again for this test, and for those after it."""
    logger().handlers.clear()
    yield
    logger().handlers.clear()


@pytest.mark.parametrize(("rank", "printed"), [("0", "info\nwarning: odd\nerror\n"), ("1", "error\n")])
def test_rank_0_prints_info_and_other_ranks_print_errors(fresh_logger, monkeypatch, capsys, rank, printed):
    monkeypatch.setenv("RANK", rank)
    logger().info("info")
    logger().debug("debug")
    logger().warning("odd")
    logger().error("error")
    assert capsys.readouterr().out == printed


def test_a_line_that_nobody_reads_does_not_end_the_run(monkeypatch):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with quiet_prints():
            print("of a library")
            print_line("read")
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)  # the ssh connection has ended
        print_line("not read")
        print_line("not read")


@pytest.fixture
def library():
    """A logger as DeepSpeed sets it up, after `set_verbose`, in place of the real one."""
    log = logging.Logger("library")
    log.addHandler(logging.StreamHandler(stream := io.StringIO()))
    return log, stream


@pytest.mark.parametrize(("rank", "printed"), [("0", "slow\nbroken\n"), ("1", "broken\n")])
def test_rank_0_prints_a_warning_of_a_library_once_and_other_ranks_print_errors(library, monkeypatch, rank, printed):
    monkeypatch.setenv("RANK", rank)
    log, stream = library
    _print_once(log)
    _print_once(log)  # of a second step in the process
    for _ in range(2):
        log.info("made")
        log.warning("slow")
        log.error("broken")
        log.warning("a LOAD REPORT from: folder")
    assert stream.getvalue() == printed
    assert len(log.handlers[0].filters) == 1
