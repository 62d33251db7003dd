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
        monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, None if is_shared else "beta"])
        monkeypatch.setattr(dist, "broadcast_object", lambda mine: mine)

    return sees


def test_a_shared_folder_is_accepted_and_another_one_refused(second_machine, tmp_path):
    second_machine(True)
    check_shared_folder(tmp_path)
    second_machine(False)
    with pytest.raises(UserError, match="machine beta does not see"):
        check_shared_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_machine_writes_nothing(tmp_path):
    check_shared_folder(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_machine_waits_until_the_file_appears(monkeypatch, tmp_path):
    for name, value in {"RANK": 2, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(output_folder, "_SECONDS", 5.0)
    told = []
    monkeypatch.setattr(dist, "broadcast_object", lambda mine: ".shared_1")
    monkeypatch.setattr(dist, "on_main", lambda work: None)
    monkeypatch.setattr(dist, "gather_objects", lambda mine: told.append(mine) or [None, None, mine, None])
    later = threading.Timer(0.5, (tmp_path / ".shared_1").touch)
    later.start()
    check_shared_folder(tmp_path)
    later.join()
    assert (tmp_path / ".shared_1").exists(), "rank 0 removes it"
    monkeypatch.setattr(output_folder, "_SECONDS", 0.3)
    with pytest.raises(UserError, match=f"machine {os.uname().nodename} does not see"):
        check_shared_folder(tmp_path / "nowhere")
    assert told == [None, os.uname().nodename]
