"""The journal of answers: which files stay, and a disk that fails."""

import pytest

from dschat_ppo.checkpoint.journal import Journal
from dschat_ppo.checkpoint.store import CheckpointFolder
from dschat_ppo.common import dist
from dschat_ppo.errors import StorageError


def journal_in(output, writer=""):
    return Journal(output, "answers", "judges", writer)


def test_answers_since_an_old_best_checkpoint_do_not_add_up(tmp_path, monkeypatch):
    """It stays for its model; the run resumes from the newest."""
    monkeypatch.setattr(CheckpointFolder, "best", lambda self: "step_000001")
    folder = tmp_path / "checkpoints" / "answers"
    folder.mkdir(parents=True)
    for step in (1, 2, 3):
        (folder / f"step_{step:06d}_rank_0.jsonl").write_text("")
    for step in (1, 3):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir()
    journal_in(tmp_path).begin(4)
    assert [path.name[5:11] for path in folder.iterdir()] == ["000003"]
    (tmp_path / "checkpoints" / "step_000003").rmdir()
    journal_in(tmp_path).begin(4)
    assert [path.name[5:11] for path in folder.iterdir()] == ["000003"], "nothing else to resume"


def test_writers_of_one_folder_have_files_of_their_own_and_read_all(tmp_path):
    for writer in ("one", "two"):
        journal = journal_in(tmp_path, writer)
        journal.begin(2)
        journal.add(writer, [0.5])
        journal.write()
    resumed = journal_in(tmp_path, "one")
    resumed.begin(2)
    assert resumed.known == {"one": [0.5], "two": [0.5]}
    resumed.begin(3)
    assert resumed.known == {}


def test_a_file_that_cannot_be_read_or_written_is_a_problem_of_all_ranks(tmp_path, monkeypatch):
    journal = journal_in(tmp_path)
    journal.begin(2)
    file = tmp_path / "checkpoints" / "answers" / "step_000002_rank_0.jsonl"
    file.mkdir()  # it cannot be opened
    journal.add("a", 1)
    journal.write()
    file.rmdir()
    journal.write()
    assert not file.exists(), "nothing after a problem: its line may be cut"
    with pytest.raises(StorageError, match="rank_0.jsonl: cannot be written"):
        journal.raise_problem()

    on_another_rank = StorageError("rank_1.jsonl: cannot be written")
    monkeypatch.setattr(dist, "gather_objects", lambda problem: [problem, on_another_rank])
    with pytest.raises(StorageError, match="rank_1"):
        journal_in(tmp_path).raise_problem()

    file.write_text('{"a": 1}\nno JSON\n')
    damaged = journal_in(tmp_path)
    damaged.begin(2)
    assert "is damaged; remove it, and judges are asked again" in str(damaged.problem)
