"""Processes, read from /proc."""

import os
import shutil
import subprocess
import time

from dschat_ppo.common.processes import command_line, find_process


def test_a_process_is_found_by_number(tmp_path):
    program = tmp_path / "a) Z (b"
    shutil.copy(shutil.which("sleep"), program)
    process = subprocess.Popen([str(program), "60"], cwd=tmp_path)
    try:
        found = find_process(process.pid)
        assert (found.parent, found.ended) == (os.getpid(), False)
        assert found.started >= find_process(os.getpid()).started > 0
        deadline = time.monotonic() + 10
        while command_line(process.pid) != [str(program), "60"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert command_line(process.pid) == [str(program), "60"]
    finally:
        process.kill()
        process.wait()
    assert find_process(process.pid) is None
    assert command_line(process.pid) == []
