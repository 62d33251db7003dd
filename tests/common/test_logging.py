"""Log lines and tables; the command that installs a missing extra; short names of folders, and
processes read from /proc."""

import io
import logging
import os
import shutil
import subprocess
import sys
import time

import pytest
from packaging.requirements import Requirement
from test_dependencies import OPTIONAL, declared

from dschat_ppo.common.extras import EXTRAS, how_to_install, is_installed, require_extra
from dschat_ppo.common.logging import _print_once, logger, print_line, quiet_prints
from dschat_ppo.common.paths import shown_path
from dschat_ppo.common.processes import command_line, find_process
from dschat_ppo.errors import UserError
from dschat_ppo.html_report.run_folder import short_names


def test_names_are_the_shortest_ends_that_differ(tmp_path):
    paths = [
        tmp_path / "a" / "1" / "ppo",
        tmp_path / "b" / "1" / "ppo",
        tmp_path / "b" / "2" / "ppo",
    ]
    assert short_names(paths[:1]) == ["ppo"]
    assert short_names(paths[:2]) == ["a", "b"]
    assert short_names(paths) == ["a/1", "b/1", "b/2"]
    assert short_names([tmp_path / "sft", tmp_path / "ppo"]) == ["sft", "ppo"]


def test_a_path_in_the_working_directory_is_shown_relative_to_it(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(tmp_path / "here/out/sft") == "out/sft"
    assert shown_path(f"{tmp_path}/here/data.jsonl:0.5") == "data.jsonl:0.5"
    for other in (
        f"{tmp_path}/hereafter/x",
        f"{tmp_path}/here",
        "out/sft",
        "--model",
        str(tmp_path),
    ):
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


@pytest.mark.parametrize("module", sorted(EXTRAS))
def test_a_missing_package_is_answered_by_the_command_that_installs_it(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert not is_installed(module)
    with pytest.raises(UserError) as problem:
        require_extra(module, "--some_flag")
    package, command = EXTRAS[module][0], how_to_install(module)
    assert str(problem.value) == f"--some_flag needs the package {package}: {command}"
    extra, (required, optional) = command.partition("[")[2].partition("]")[0], declared()
    installed = {Requirement(text).name for text in (optional[extra] if extra else required)}
    assert package in installed, f"{command} does not install {package}"
    assert set(EXTRAS) >= OPTIONAL


@pytest.fixture
def fresh_logger():
    """Handlers depend on the rank: they are made again for this test, and for those after it."""
    logger().handlers.clear()
    yield
    logger().handlers.clear()


@pytest.mark.parametrize(
    ("rank", "printed"), [("0", "info\nwarning: odd\nerror\n"), ("1", "error\n")]
)
def test_rank_0_prints_info_and_other_ranks_print_errors(
    fresh_logger, monkeypatch, capsys, rank, printed
):
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
def test_rank_0_prints_a_warning_of_a_library_once_and_other_ranks_print_errors(
    library, monkeypatch, rank, printed
):
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
