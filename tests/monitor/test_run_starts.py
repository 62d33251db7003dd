"""`starts.jsonl`: one line for each start of a run."""

import json
from importlib.metadata import version

import pytest
from stub_runs import Trainer, open_run, run, train

from dschat_ppo.common.paths import STARTS
from dschat_ppo.errors import StorageError
from dschat_ppo.html_report.run_folder import read_run
from dschat_ppo.monitor.writers import record_start


def starts_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / STARTS).read_text().splitlines()]


def test_a_resumed_run_adds_a_line_and_the_report_reads_them(tmp_path):
    run(tmp_path, 2)
    longer = open_run(tmp_path)
    trainer = Trainer()
    train(longer, trainer, trainer.to(3))
    assert [line["step"] for line in starts_of(tmp_path)] == [1, 3]
    assert [start["step"] for start in read_run(tmp_path, "a").starts] == [1, 3]


def test_a_run_that_starts_over_removes_the_lines_and_the_report_of_the_earlier_one(tmp_path):
    run(tmp_path, 2)
    (tmp_path / "result.json").write_text("{}")  # it is finished, so it is not resumed
    (tmp_path / "report.html").write_text("old")
    again = open_run(tmp_path, "--overwrite_output_dir", "True")
    assert not (tmp_path / "report.html").exists()
    trainer = Trainer()
    train(again, trainer, trainer.to(1))
    assert [line["step"] for line in starts_of(tmp_path)] == [1]


def test_a_line_has_the_first_step_the_ranks_and_the_versions_or_is_a_storage_error(tmp_path):
    record_start(tmp_path, 7, 2)
    (line,) = starts_of(tmp_path)
    assert (line["step"], line["world_size"]) == (7, 2)
    assert line["versions"]["torch"] == version("torch") and "bitsandbytes" not in line["versions"]
    (tmp_path / STARTS).unlink()
    (tmp_path / STARTS).mkdir()
    with pytest.raises(StorageError, match=r"starts.jsonl: cannot be written \(Is a directory\); free space"):
        record_start(tmp_path, 1, 1)
