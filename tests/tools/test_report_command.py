"""`python -m dschat_ppo.tools.report`: its arguments, and where it writes."""

from pathlib import Path

from report_runs import ppo_lines, write_run

from dschat_ppo.tools.report import main


def test_reports_of_one_run_and_of_several(tmp_path, monkeypatch, capsys):
    folders = [str(write_run(tmp_path / name, ppo_lines(2))) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    for words, place in ((folders[:1], f"{folders[0]}/report.html"), (folders, "report.html"),
                         ([*folders, "--out", "both.html"], "both.html")):  # fmt: skip
        assert main(words) == 0
        assert capsys.readouterr().out.startswith(f"{place}: {len(folders[: len(words)])} run")
        assert Path(place).read_text().startswith("<!DOCTYPE html>")
