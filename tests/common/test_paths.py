"""Short names of folders, pipes told from files, and processes read from /proc."""

import os
import shutil
import subprocess
import time

from dschat_ppo.common.paths import shown_path
from dschat_ppo.common.processes import command_line, find_process
from dschat_ppo.html_report.run_folder import short_names


def test_names_are_the_shortest_ends_that_differ(tmp_path):
    paths = [tmp_path / "a" / "1" / "ppo", tmp_path / "b" / "1" / "ppo", tmp_path / "b" / "2" / "ppo"]
    assert short_names(paths[:1]) == ["ppo"]
    assert short_names(paths[:2]) == ["a", "b"]
    assert short_names(paths) == ["a/1", "b/1", "b/2"]
    assert short_names([tmp_path / "sft", tmp_path / "ppo"]) == ["sft", "ppo"]


def test_a_path_in_the_working_directory_is_shown_relative_to_it(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(tmp_path / "here/out/sft") == "out/sft"
    assert shown_path(f"{tmp_path}/here/data.jsonl:0.5") == "data.jsonl:0.5"
    for other in (f"{tmp_path}/hereafter/x", f"{tmp_path}/here", "out/sft", "--model", str(tmp_path)):
        assert shown_path(other) == other


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
