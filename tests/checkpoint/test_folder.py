"""The checkpoint folder: checkpoints appear complete, damage is found, and old ones are removed."""

import errno
import os
import shutil

import pytest
from checkpoints import fill

from dschat_ppo.checkpoint.folder import CheckpointFolder, checkpoint_name
from dschat_ppo.checkpoint.manifest import Manifest, damage
from dschat_ppo.errors import StorageError, UserError


def save(folder: CheckpointFolder, step: int, update: int = 0, **changes) -> str:
    name = checkpoint_name(step, update)
    fill(folder.partial(name), step=step, update=update, **changes)
    folder.commit(name)
    return name


def entries(folder: CheckpointFolder) -> list[str]:
    return sorted(os.listdir(folder.root))


def cut(folder: CheckpointFolder, name: str) -> None:
    os.truncate(folder.root / name / "actor/weights.pt", 12)


def flip(folder: CheckpointFolder, name: str) -> None:
    (folder.root / name / "actor/weights.pt").write_bytes(b"\x01" + b"\x00" * 4095)


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "output")


def test_names_hold_step_and_update():
    assert checkpoint_name(12) == "step_000012"
    assert checkpoint_name(12, 3) == "step_000012_update_0003"


def test_names_are_in_the_order_of_steps_and_updates(folder):
    assert folder.names() == []
    for step, update in ((10, 0), (9, 12), (1_000_000, 0), (9, 2), (999_999, 0), (9, 0), (9, 10_000), (9, 9999)):
        save(folder, step, update)
    (folder.root / "step_000003.partial").mkdir()
    (folder.root / "step_000004.removed").mkdir()
    (folder.root / "step_000005").write_text("a file")
    (folder.root / "notes").mkdir()
    assert folder.names() == [
        "step_000009", "step_000009_update_0002", "step_000009_update_0012", "step_000009_update_9999",
        "step_000009_update_10000", "step_000010", "step_999999", "step_1000000",
    ]  # fmt: skip


def test_a_committed_checkpoint_is_the_newest_and_latest(folder):
    assert folder.newest_intact() == (None, [])
    save(folder, 4)
    save(folder, 8)
    assert folder.newest_intact() == ("step_000008", [])
    assert (folder.root / "latest").read_text() == "step_000008"
    assert entries(folder) == ["latest", "step_000004", "step_000008"]
    assert Manifest.read(folder.root / "step_000004").step == 4


def test_a_partial_folder_is_empty_and_no_checkpoint(folder):
    for _ in range(2):
        path = folder.partial("step_000004")
        assert os.listdir(path) == []
        fill(path)
    assert folder.names() == []
    assert folder.newest_intact() == (None, [])


def test_an_incomplete_checkpoint_is_not_committed(folder):
    path = fill(folder.partial("step_000004"))
    (path / "rank_1.pt").unlink()
    with pytest.raises(StorageError, match="step_000004.* was not saved whole: rank_1.pt of rank 1 is missing"):
        folder.commit("step_000004")
    assert entries(folder) == ["step_000004.partial"]


def test_a_commit_replaces_a_damaged_checkpoint_of_its_name(folder):
    save(folder, 4)
    save(folder, 8)
    cut(folder, "step_000008")
    save(folder, 8, metrics_offset=77)
    assert Manifest.read(folder.root / "step_000008").metrics_offset == 77
    assert folder.newest_intact() == ("step_000008", [])
    assert entries(folder) == ["latest", "step_000004", "step_000008"]


def test_damaged_checkpoints_are_skipped_and_reported(folder):
    for step in (1, 2, 3, 4):
        save(folder, step)
    (folder.root / "step_000004" / "rank_1.pt").unlink()
    flip(folder, "step_000003")
    newest, complaints = folder.newest_intact()
    assert newest == "step_000002"
    assert len(complaints) == 2
    assert complaints[0].endswith("step_000004: rank_1.pt of rank 1 is missing")
    assert complaints[1].endswith("step_000003: actor/weights.pt: checksum differs: the file changed on disk")
    assert folder.newest_intact(checksums=False) == ("step_000003", complaints[:1])
    for name in ("step_000001", "step_000002"):
        cut(folder, name)
    newest, complaints = folder.newest_intact()
    assert newest is None and len(complaints) == 4


@pytest.mark.parametrize("content, complaint", [
    (None, "latest is missing"),
    ("", "latest is empty"),
    (" \n", "latest is empty"),
    ("step_000009", "latest names 'step_000009', which is not there"),
    ("../checkpoints/step_000002", "latest names '../checkpoints/step_000002', which is not there"),
    ("step_000001", "latest names step_000001, but step_000002 was saved after it"),
])  # fmt: skip
def test_a_wrong_latest_is_reported_and_the_newest_is_found(folder, content, complaint):
    save(folder, 1)
    save(folder, 2)
    (folder.root / "latest").unlink()
    if content is not None:
        (folder.root / "latest").write_text(content)
    newest, complaints = folder.newest_intact()
    assert newest == "step_000002"
    assert len(complaints) == 1 and complaints[0].endswith(complaint)


def test_a_latest_that_is_no_text_or_has_no_checkpoints_is_reported(folder):
    folder.root.mkdir(parents=True)
    (folder.root / "latest").write_bytes(b"\xff\x00")
    newest, complaints = folder.newest_intact()
    assert newest is None and "which is not there" in complaints[0]


def test_an_unreadable_latest_is_reported(folder):
    save(folder, 1)
    (folder.root / "latest").unlink()
    (folder.root / "latest").mkdir()
    newest, complaints = folder.newest_intact()
    assert newest == "step_000001"
    assert complaints[0].endswith("latest cannot be read (Is a directory)")


def test_a_newline_after_the_name_is_no_fault(folder):
    save(folder, 1)
    (folder.root / "latest").write_text("step_000001\n")
    assert folder.newest_intact() == ("step_000001", [])


def test_pruning_keeps_the_newest_and_the_best(folder):
    for step in (1, 2, 3, 4, 5, 6):
        save(folder, step, best=step < 3)
    assert folder.best() == "step_000002"
    assert folder.prune(2, protect={"step_000003", "nothing"}) == ["step_000001", "step_000004"]
    assert folder.names() == ["step_000002", "step_000003", "step_000005", "step_000006"]
    assert folder.prune(1) == ["step_000003", "step_000005"]
    assert entries(folder) == ["latest", "step_000002", "step_000006"]
    assert folder.prune(1) == []


def test_a_best_checkpoint_with_an_unreadable_manifest_does_not_count(folder):
    save(folder, 1)
    assert folder.best() is None
    save(folder, 2, best=True)
    save(folder, 3, best=True)
    cut(folder, "step_000003")
    assert folder.best() == "step_000003", "what it says still counts"
    (folder.root / "step_000003/manifest.json").unlink()
    assert folder.best() == "step_000002"


def test_no_more_is_removed_than_the_limit_allows(folder):
    save(folder, 1)
    save(folder, 2)
    assert folder.prune(2) == []
    assert folder.prune(5) == []
    with pytest.raises(ValueError, match="the limit cannot be 0"):
        folder.prune(0)
    assert folder.names() == ["step_000001", "step_000002"]


def test_nothing_is_removed_while_the_newest_is_damaged(folder):
    for step in (1, 2, 3):
        save(folder, step)
    cut(folder, "step_000003")
    assert folder.prune(1) == []
    assert folder.names() == ["step_000001", "step_000002", "step_000003"]


def test_damaged_checkpoints_do_not_count_and_are_removed_with_the_old_ones(folder):
    for step in (1, 2, 3, 4):
        save(folder, step)
    cut(folder, "step_000003")
    cut(folder, "step_000001")
    assert folder.prune(3) == []  # two are whole
    assert folder.prune(2) == ["step_000001"]
    assert folder.names() == ["step_000002", "step_000003", "step_000004"]


def test_leftovers_are_removed_and_a_checkpoint_being_replaced_is_restored(folder):
    folder.clear_partials()
    save(folder, 1)
    save(folder, 2)
    shutil.copytree(folder.root / "step_000002", folder.root / "step_000002.replaced")
    os.rename(folder.root / "step_000001", folder.root / "step_000001.replaced")
    fill(folder.partial("step_000001"))
    fill(folder.partial("step_000003"))
    shutil.copytree(folder.root / "step_000002", folder.root / "step_000000.removed")
    (folder.root / "latest.partial").write_text("step_0")
    folder.clear_partials()
    assert entries(folder) == ["latest", "step_000001", "step_000002"]
    assert damage(folder.root / "step_000001") is None


def test_a_write_error_names_the_newest_intact_checkpoint(folder):
    save(folder, 1)
    save(folder, 2)
    cut(folder, "step_000002")
    with pytest.raises(StorageError) as failure, folder.writing():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert isinstance(failure.value, UserError)
    assert str(failure.value) == (
        f"checkpoint {folder.root}: cannot be written (No space left on device); the newest intact checkpoint is "
        "step_000001; correct this, then run the same command again"
    )
    cut(folder, "step_000001")
    with pytest.raises(StorageError, match=r"\(odd\); no intact checkpoint is there; correct"), folder.writing():
        raise OSError("odd")


def test_a_write_error_names_the_output_folder(tmp_path):
    (tmp_path / "output").write_text("a file in its place")
    folder = CheckpointFolder(tmp_path / "output")
    with pytest.raises(StorageError, match=r"cannot be written \((Not a directory|File exists)\)"), folder.writing():
        folder.partial("step_000001")


def test_a_write_error_names_an_unreadable_folder(folder, monkeypatch):
    save(folder, 1)

    def refuse():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(folder, "names", refuse)
    with pytest.raises(StorageError, match=r"\(Input/output error\); no intact checkpoint is there"), folder.writing():
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_other_exceptions_pass_through(folder):
    with pytest.raises(ZeroDivisionError), folder.writing():
        raise ZeroDivisionError


def test_files_are_synced_before_they_are_renamed_and_latest_is_written_last(folder, monkeypatch):
    save(folder, 1)
    fill(folder.partial("step_000002"))
    log = []
    fsync, rename, replace = os.fsync, os.rename, os.replace
    monkeypatch.setattr(os, "fsync", lambda n: (log.append(os.readlink(f"/proc/self/fd/{n}")), fsync(n)))
    monkeypatch.setattr(os, "rename", lambda a, b: (log.append("named"), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (log.append("latest"), replace(a, b)))
    folder.commit("step_000002")
    named, latest = log.index("named"), log.index("latest")
    root = str(folder.root)
    parts = ("", "/manifest.json", "/rank_0.pt", "/rank_1.pt", "/actor", "/actor/weights.pt")
    assert {f"{root}/step_000002.partial{part}" for part in parts} == set(log[:named])
    assert {root, str(folder.root.parent)} <= set(log[named:latest])
    assert log[-1] == root
