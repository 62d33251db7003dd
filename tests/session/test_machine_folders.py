"""Machines share the output folder, or each has its own, as `--local_checkpoints` says."""

import pytest

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError
from dschat_ppo.session import machine_folders
from dschat_ppo.session.machine_folders import check_machine_folders


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
    assert machine_folders._appears(tmp_path / "there", 0.0)
    assert not machine_folders._appears(tmp_path / "nowhere", 0.3)
