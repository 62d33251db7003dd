"""The list of broken lines is well-formed, and before a release a test notices each
(`tests/break_lines.py`)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from break_lines import ROOT, exit_code_within, read_lines

SCRIPT = Path(__file__).with_name("break_lines.py")


def test_each_entry_changes_a_text_of_the_package_and_names_a_test_that_exists():
    lines = read_lines()
    assert len(lines) == len(set(lines))
    for line in lines:
        assert line.before.strip() and line.before != line.after, line
        assert line.applies(), f"the text before stands in the file once no more: {line}"
        file, _, test = line.test.partition("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        if test:
            assert f"def {test.partition('[')[0]}(" in source, line


@pytest.mark.parametrize(("lasts", "seconds", "code"), [(0, 30, 3), (30, 0.1, None)])
def test_a_test_has_so_many_seconds(lasts, seconds, code):
    child = os.fork()
    if child == 0:
        time.sleep(lasts)
        os._exit(3)
    assert exit_code_within(child, seconds) == code
    if code is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.slow
@pytest.mark.release
def test_every_broken_line_is_noticed():
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
