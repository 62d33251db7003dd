"""Several machines share the output folder."""

import os
import threading

import pytest

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError
from dschat_ppo.session import output_folder
from dschat_ppo.session.output_folder import check_shared_folder


@pytest.fixture
def second_machine(monkeypatch):
    """Let rank 0 of two machines meet a second one that sees a file, or does not."""

    def sees(is_shared: bool) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, ("beta", is_shared)])

    return sees


def test_a_shared_folder_is_accepted_and_another_one_refused(second_machine, tmp_path):
    second_machine(True)
    check_shared_folder(tmp_path / "out")
    second_machine(False)
    with pytest.raises(UserError, match="machine beta does not see"):
        check_shared_folder(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_one_machine_writes_nothing(tmp_path):
    check_shared_folder(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_machine_waits_until_the_file_appears(monkeypatch, tmp_path):
    for name, value in {"RANK": 2, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(output_folder, "_SECONDS", 5.0)
    answers, told = iter([".shared_1", True, "alpha"]), []
    monkeypatch.setattr(dist, "broadcast_object", lambda mine: next(answers))
    monkeypatch.setattr(dist, "gather_objects", lambda mine: told.append(mine) or [None, None, mine, None])
    later = threading.Timer(0.5, (tmp_path / ".shared_1").touch)
    later.start()
    check_shared_folder(tmp_path)
    assert told == [(os.uname().nodename, True)]
    later.join()
    assert (tmp_path / ".shared_1").exists(), "rank 0 removes it"
    monkeypatch.setattr(output_folder, "_SECONDS", 0.3)
    assert not output_folder._appears(tmp_path / "nowhere")
    monkeypatch.setenv("LOCAL_RANK", "1")  # another rank of that machine does not look
    answers = iter([".shared_2", True, "alpha"])
    check_shared_folder(tmp_path)
    assert told[1:] == [None]


def test_a_folder_that_rank_0_cannot_write_is_left_to_the_lock(second_machine, tmp_path):
    (tmp_path / "out").write_text("a file")
    second_machine(False)
    check_shared_folder(tmp_path / "out")
