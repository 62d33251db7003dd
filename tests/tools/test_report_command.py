"""`python -m dschat_ppo.tools.report`: its arguments, where it writes, and its exit codes."""

from pathlib import Path

from report_runs import ppo_lines, write_run

from dschat_ppo.tools.report.__main__ import main


def test_one_run_gets_its_report_into_its_folder(tmp_path, capsys):
    folder = write_run(tmp_path / "ppo", ppo_lines(2))
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"{folder / 'report.html'}: 1 run, ")
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_several_runs_get_one_report_in_the_current_folder_or_in_the_file_given(tmp_path, monkeypatch, capsys):
    folders = [str(write_run(tmp_path / name, ppo_lines(2))) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert main(folders) == 0
    assert Path("report.html").is_file()
    assert main([*folders, "--out", "both.html"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("both.html: 2 runs, ")


def test_a_wrong_folder_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: there is no such folder\n"
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: has no metrics.jsonl")
