"""The command of the report: how its server begins and ends, and wrong flags."""

import signal
import socket
import subprocess
import sys

import pytest
from report_runs import ppo_lines, write_run

from dschat_ppo.tools.report import main


def test_ctrl_c_ends_the_server(tmp_path):
    run = write_run(tmp_path / "a", ppo_lines(1))
    command = [sys.executable, "-m", "dschat_ppo.tools.report", run, "--serve", "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell may start it with SIGINT ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline().startswith("1 run at http://127.0.0.1:")
    assert "ssh -L" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (output.strip(), errors, process.returncode) == ("stopped; the runs go on", "", 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "8765"], "--port needs --serve"),
        (["--serve", "--out", "x.html"], "--serve writes no file"),
        (["--serve", "--port", "70000"], "--port 0"),
    ],
)
def test_wrong_flags(tmp_path, capsys, words, message):
    assert main([str(write_run(tmp_path / "a", ppo_lines(1))), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_one_line_with_a_way_out(tmp_path, capsys):
    run = write_run(tmp_path / "a", ppo_lines(1))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([str(run), "--serve", "--port", str(port)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--port {port}" in line
    assert "--port 0" in line
