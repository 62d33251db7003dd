"""Checkpoints of a finished run: removed once its models can be read, by the run or by the next start after a crash."""

import os

import pytest
from checkpoints import save_checkpoint

from dschat_ppo.checkpoint import store
from dschat_ppo.checkpoint.store import CheckpointFolder
from dschat_ppo.session.output_folder import remove_checkpoints


@pytest.fixture
def output(tmp_path):
    """A folder with two checkpoints, and one that is set aside."""
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints/step_000001").rename(tmp_path / "checkpoints/step_000001.set_aside")
    return tmp_path


def left(output) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def test_checkpoints_are_removed_and_those_set_aside_stay(output, assets, said):
    (output / "actor").symlink_to(assets / "lm")
    remove_checkpoints(output)
    assert left(output) == ["step_000001.set_aside"]
    assert [line for line in said if line.startswith("checkpoints: removed, 0.0 MiB (--keep_final_checkpoint keeps")]


def test_the_folder_goes_with_the_last_checkpoint(tmp_path, assets):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(assets / "lm" / name)
    save_checkpoint(tmp_path, 1)
    remove_checkpoints(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    remove_checkpoints(tmp_path)  # nothing is left to remove


def test_a_model_beside_folders_of_other_models_is_the_one_that_counts(output, assets):
    (output / "critic").symlink_to(assets / "reward")
    (output / "config.json").write_text("{}", encoding="utf-8")
    assert not remove_checkpoints(output) and "step_000003" in left(output)  # it has no weights


@pytest.mark.parametrize(
    ("roles", "is_whole"), [((), False), (("actor",), True), (("actor", "critic"), True), (("critic",), False)]
)
def test_after_a_crash_they_go_only_if_the_actor_is_there(output, assets, roles, is_whole):
    for role in roles:
        (output / role).symlink_to(assets / ("lm" if role == "actor" else "reward"))
    assert remove_checkpoints(output) == is_whole
    assert ("step_000003" in left(output)) == (not is_whole)


@pytest.mark.parametrize("fault", ["truncated", "missing"])
def test_they_stay_if_a_saved_model_cannot_be_read(output, assets, said, fault):
    (output / "actor").symlink_to(assets / "lm")
    model = output / "critic"
    model.mkdir()
    if fault == "truncated":
        content = (assets / "lm/model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(content[:-1])
    remove_checkpoints(output)
    assert "step_000003" in left(output)
    assert any("checkpoints are kept" in line and str(model) in line for line in said)


def test_the_newest_is_removed_last_and_a_cut_removal_is_finished_by_the_next(output, assets, monkeypatch, said):
    (output / "actor").symlink_to(assets / "lm")
    remove, removed = store.remove_folder, []

    def fails_at_the_second(path):
        removed.append(path.name)
        if len(removed) == 2:
            raise OSError("cut")
        remove(path)

    monkeypatch.setattr(store, "remove_folder", fails_at_the_second)
    remove_checkpoints(output)
    assert removed == ["step_000002.partial", "step_000003.partial"]
    assert any("cannot be removed (cut)" in line for line in said)
    monkeypatch.undo()
    CheckpointFolder(output).clear_partials()  # as every start does
    remove_checkpoints(output)
    assert left(output) == ["step_000001.set_aside"]


def test_the_size_is_that_of_the_files(output):
    folders = [output / "checkpoints" / name for name in CheckpointFolder(output).names()]
    expected = sum(os.path.getsize(file) for folder in folders for file in folder.rglob("*") if file.is_file())
    assert CheckpointFolder(output).remove_all() == expected > 0
