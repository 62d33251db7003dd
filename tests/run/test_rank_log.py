"""The log file of each rank."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dschat_ppo.common import phases
from dschat_ppo.common.logging import logger
from dschat_ppo.errors import UserError
from dschat_ppo.run.rank_log import close_log, keep_early_lines, log_path, open_log, write_to_log


@pytest.fixture(autouse=True)
def fresh():
    phases.reset_phases()
    keep_early_lines()  # drops what the runs of other tests kept and never wrote
    yield
    close_log()
    phases.reset_phases()


def lines_of(folder):
    return (folder / "logs" / "rank_0.log").read_text().splitlines()


def test_the_log_holds_log_lines_warnings_and_texts(tmp_path, capsys):
    assert log_path() is None
    open_log(tmp_path)
    phases.announce("load models")
    logger().info("a note")
    logger().debug("too much")
    phases.announce_step(7)
    logging.getLogger("some.library").warning("a library's warning")
    write_to_log("one\nTraceback")
    logger().error("late")
    assert log_path() == tmp_path / "logs" / "rank_0.log"
    heading, *lines = lines_of(tmp_path)
    assert "rank 0 of 1, process " in heading
    assert [re.sub(r"^[-\d]+ [:,\d]+ ", "", line) for line in lines] == [
        "INFO [phase 'load models'] a note",
        "WARNING [phase 'load models', step 7] a library's warning",
        "rank 0 [phase 'load models', step 7] one",
        "Traceback",
        "ERROR [phase 'load models', step 7] late",
    ]
    out = capsys.readouterr().out
    assert "a note" in out and "late" in out and "one" not in out


def test_a_resumed_run_appends_to_the_same_file(tmp_path):
    open_log(tmp_path)
    logger().info("first run")
    close_log()
    logger().info("between")
    write_to_log("between")
    open_log(tmp_path)
    logger().info("second run")
    kinds = [
        re.sub(r"^-------- .*", "heading", line).rpartition("] ")[2] for line in lines_of(tmp_path)
    ]
    assert kinds == ["heading", "first run", "heading", "second run"]


def test_lines_from_before_the_folder_is_known_reach_the_log_once(tmp_path):
    for line in ("of a run that found no folder", "early"):
        keep_early_lines()
        logger().warning(line)
    open_log(tmp_path)
    logger().info("late")
    open_log(tmp_path / "other")
    assert [line.rpartition("] ")[2] for line in lines_of(tmp_path)[1:]] == ["early", "late"]
    assert len(lines_of(tmp_path / "other")) == 1


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(
        UserError, match=r"--output_dir .*out: .*rank_0.log cannot be written \(Not a directory\)"
    ):
        open_log(tmp_path / "out")
    assert log_path() is None


def test_a_disk_that_fills_up_is_reported_once(tmp_path, capsys):
    open_log(tmp_path)
    (handler,) = [handler for handler in logger().handlers if type(handler).__name__ == "_RankLog"]
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, handler.descriptor)
    os.close(full)
    logger().info("a note")
    write_to_log("another")
    logger().info("a third")
    errors = capsys.readouterr().err
    assert (
        errors.count("cannot be written (No space left on device); the run continues without it")
        == 1
    )
    assert "Traceback" not in errors


SEGFAULT = """
import ctypes, sys
from pathlib import Path
from dschat_ppo.run.rank_log import open_log
def crash():
    ctypes.string_at(0)
open_log(Path(sys.argv[1]))
crash()
"""


def test_a_crash_writes_its_stack_to_the_log(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SEGFAULT, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == -11
    log = Path(tmp_path, "logs", "rank_0.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert "in crash" in log
