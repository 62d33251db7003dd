"""Machines share the output folder, or each has its own, as `--local_checkpoints` says."""

import os
import threading

import pytest

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError
from dschat_ppo.session import output_folder
from dschat_ppo.session.output_folder import check_machine_folders


@pytest.fixture
def second_machine(monkeypatch):
    """Let rank 0 of two machines meet a second one that sees a file, or does not."""

    def sees(is_shared: bool) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, ("beta", is_shared)])

    return sees


@pytest.mark.parametrize("local_checkpoints", [False, True])
def test_the_folder_is_as_the_flag_says(second_machine, tmp_path, local_checkpoints):
    second_machine(not local_checkpoints)
    check_machine_folders(tmp_path / "out", local_checkpoints)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("is_shared", "words"),
    [(False, "machine beta does not see.*--local_checkpoints"), (True, "and beta share it: leave out")],
)
def test_the_folder_is_not_as_the_flag_says(second_machine, tmp_path, is_shared, words):
    second_machine(is_shared)
    with pytest.raises(UserError, match=words):
        check_machine_folders(tmp_path / "out", local_checkpoints=is_shared)
    assert list((tmp_path / "out").iterdir()) == []


def test_one_machine_writes_nothing(tmp_path):
    check_machine_folders(tmp_path / "out", local_checkpoints=False)
    assert not (tmp_path / "out").exists()


def test_a_file_may_take_a_moment_to_appear(tmp_path, monkeypatch):
    (tmp_path / "there").touch()
    assert output_folder._appears(tmp_path / "there", 0.0)
    assert not output_folder._appears(tmp_path / "nowhere", 0.3)


@pytest.mark.parametrize(("local_checkpoints", "waits"), [(False, True), (True, False)])
def test_another_machine_waits_for_the_file_only_where_it_must_appear(monkeypatch, tmp_path, local_checkpoints, waits):
    for name, value in {"RANK": 2, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(output_folder, "_SECONDS", 5.0)
    answers, told = iter([".shared_1", True, "alpha"]), []
    monkeypatch.setattr(dist, "broadcast_object", lambda mine: next(answers))
    monkeypatch.setattr(dist, "gather_objects", lambda mine: told.append(mine) or [None, None, mine, None])
    later = threading.Timer(0.5, (tmp_path / ".shared_1").touch)
    later.start()
    check_machine_folders(tmp_path, local_checkpoints)
    assert told == [(os.uname().nodename, waits)]
    later.join()
    assert (tmp_path / ".shared_1").exists(), "rank 0 removes it"
    monkeypatch.setenv("LOCAL_RANK", "1")  # another rank of that machine does not look
    answers = iter([".shared_2", True, "alpha"])
    check_machine_folders(tmp_path, local_checkpoints)
    assert told[1:] == [None]


def test_a_folder_that_rank_0_cannot_write_is_left_to_the_lock(second_machine, tmp_path):
    (tmp_path / "out").write_text("a file")
    second_machine(False)
    check_machine_folders(tmp_path / "out", local_checkpoints=False)
