"""The report is cheap, without large libraries, and never the end of a finished run."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
from report_runs import ppo_lines, write_run

from dschat_ppo.errors import NonFiniteError, StopRequested, UnhealthyRun, UserError
from dschat_ppo.html_report.page import report_run, reporting, write_report

LARGE = ("torch", "numpy", "transformers", "deepspeed", "datasets", "pandas")


def test_a_report_of_200_steps_takes_less_than_a_second_of_cpu_and_imports_no_large_library(tmp_path):
    wide = [line | {f"other/{number}": 0.1 * number for number in range(70)} for line in ppo_lines(200)]
    folder = write_run(tmp_path, wide, {"actor_model_name_or_path": "m"})
    code = (
        "import sys, time; from pathlib import Path; from dschat_ppo.html_report.page import write_report\n"
        f"start = time.process_time(); write_report([Path({str(folder)!r})], Path({str(folder / 'r.html')!r}))\n"
        f"print(time.process_time() - start, [name for name in {LARGE} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    seconds, _, imported = done.stdout.strip().partition(" ")
    assert float(seconds) < 1
    assert imported == "[]"


@pytest.mark.parametrize("spoil", [
    lambda folder: (folder / "metrics.jsonl").unlink(),
    lambda folder: (folder / "report.html").mkdir(),
])  # fmt: skip
def test_a_finished_run_gets_a_warning_when_its_report_fails(tmp_path, capsys, spoil):
    folder = write_run(tmp_path, ppo_lines(1))
    spoil(folder)
    report_run(folder)
    assert f"no report: {folder}" in capsys.readouterr().out


@pytest.mark.parametrize(("inner", "problem"), [
    ("", None), ("validation", None), ("", StopRequested), ("", UnhealthyRun), ("", NonFiniteError), ("", RuntimeError),
])  # fmt: skip
def test_a_run_that_writes_metrics_leaves_a_report_unless_it_crashes(tmp_path, inner, problem):
    other = write_run(tmp_path / ("validation" if not inner else ""), ppo_lines(1))
    with nullcontext() if problem is None else pytest.raises(problem), reporting(tmp_path):
        folder = write_run(tmp_path / inner, ppo_lines(2))
        if problem is not None:
            raise problem("ends")
    assert (folder / "report.html").exists() is (problem is not RuntimeError)
    assert not (other / "report.html").exists()


def test_a_run_without_a_step_leaves_the_report_of_the_run_before_it(tmp_path):
    write_run(tmp_path, ppo_lines(1))
    with pytest.raises(StopRequested), reporting(tmp_path):
        raise StopRequested("this run is done")
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(NonFiniteError), reporting(tmp_path):
        (tmp_path / "metrics.jsonl").write_text("")
        raise NonFiniteError("the loss is NaN")
    assert not (tmp_path / "report.html").exists()


def test_the_command_s_errors_name_the_problem(tmp_path):
    folders = [write_run(tmp_path / str(number), ppo_lines(1)) for number in range(7)]
    with pytest.raises(UserError, match="1 to 6 runs, got 7"):
        write_report(folders, tmp_path / "r.html")
    with pytest.raises(UserError, match=r"no/r.html: cannot be written \(No such file or directory\)"):
        write_report(folders[:1], tmp_path / "no" / "r.html")
