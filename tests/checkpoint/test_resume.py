"""Which checkpoint a run goes on from, and what is left of an earlier run in its folder."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dschat_ppo.checkpoint.folder import CheckpointFolder, checkpoint_name
from dschat_ppo.checkpoint.manifest import Manifest, describe_file
from dschat_ppo.checkpoint.resume import RunIdentity, find_checkpoint
from dschat_ppo.checkpoint.run_files import write_config
from dschat_ppo.common.logging import logger
from dschat_ppo.config.cli import flatten, parse
from dschat_ppo.config.safety_flags import SafetyFlags
from dschat_ppo.errors import UserError
from dschat_ppo.session.begin_run import _earlier_outputs, prepare_output_folder

WORDS = ["--model_name_or_path", "m", "--zero_stage", "2"]
ROWS = "a" * 64


def config_of(output: Path, *more: str):
    return parse("sft", [*WORDS, "--data_path", "d", "--output_dir", str(output), *more])


def about(output: Path, *more: str, data: str = ROWS) -> RunIdentity:
    return RunIdentity("sft", flatten(config_of(output, *more)) | {"rows_per_update": 8}, data)


def save(output: Path, step: int, update: int = 0) -> Path:
    """A checkpoint as the keeper makes it, with one file."""
    folder, name = CheckpointFolder(output), checkpoint_name(step, update)
    partial = folder.partial(name)
    (partial / "shared.pt").write_bytes(bytes(range(200)))
    files = {"shared.pt": describe_file(partial / "shared.pt")}
    manifest = Manifest("sft", step, update, 2, about(output).config, {"torch": "2"}, ROWS, files, False, 17, "2026")
    manifest.write(partial)
    folder.commit(name)
    return folder.root / name


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(bytes(content))


def test_nothing_saved_is_a_beginning(tmp_path):
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path)) is None


def test_the_newest_intact_one_is_taken_and_damage_is_said(tmp_path, capsys):
    first, second = save(tmp_path, 1), save(tmp_path, 2, 3)
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path)) == second
    assert capsys.readouterr().out == ""
    flip(second / "shared.pt")
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path)) == first
    assert "step_000002_update_0003: shared.pt: checksum differs" in capsys.readouterr().out
    assert second.with_name(f"{second.name}.set_aside").exists(), "else it would be the newest for ever"
    flip(first / "shared.pt")
    with pytest.raises(UserError, match="no intact checkpoint.*checksum differs.*--overwrite_output_dir"):
        find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path))


@pytest.mark.parametrize("content", ["", "step_000009"])
def test_a_latest_that_names_nothing_is_no_beginning(tmp_path, content):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/latest").write_text(content)
    with pytest.raises(UserError, match="no intact checkpoint"):
        find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path))


def test_overwriting_does_a_finished_run_once_more_and_goes_on_with_an_interrupted_one(tmp_path, capsys):
    saved = save(tmp_path, 1)
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path), overwrite=True) == saved
    (tmp_path / "result.json").write_text("{}")
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path), overwrite=True) is None
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path)) == saved, "or forced to be longer"
    assert find_checkpoint(tmp_path, SafetyFlags(resume=str(saved)), about(tmp_path), overwrite=True) == saved
    (tmp_path / "result.json").unlink()
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path, "--seed", "5"), overwrite=True) is None
    assert "as --overwrite_output_dir says" in (said := capsys.readouterr().out) and "+ --seed 5" in said
    with pytest.raises(UserError, match="--seed"):
        find_checkpoint(tmp_path, SafetyFlags(resume=str(saved)), about(tmp_path, "--seed", "5"), overwrite=True)
    flip(saved / "shared.pt")
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path), overwrite=True) is None


def test_never_does_not_look(tmp_path):
    flip(save(tmp_path, 1) / "shared.pt")
    assert find_checkpoint(tmp_path, SafetyFlags(resume="never"), about(tmp_path)) is None


def test_a_named_one_sets_later_ones_aside(tmp_path):
    first, second, third = save(tmp_path, 1), save(tmp_path, 1, 2), save(tmp_path, 4)
    assert find_checkpoint(tmp_path, SafetyFlags(resume=str(second)), about(tmp_path)) == second
    assert first.exists() and not third.exists()
    assert third.with_name("step_000004.set_aside").exists()
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path)) == second
    save(tmp_path, 4)
    assert find_checkpoint(tmp_path, SafetyFlags(resume=str(second)), about(tmp_path)) == second
    assert not third.exists() and third.with_name("step_000004.set_aside1").exists(), "a second time too"
    aside = third.with_name("step_000004.set_aside")
    fourth = save(tmp_path, 5)
    assert find_checkpoint(tmp_path, SafetyFlags(resume=str(aside)), about(tmp_path)) == aside
    assert aside.exists() and not fourth.exists()


def test_what_is_named_elsewhere_leaves_the_folder_to_who_clears_it(tmp_path):
    elsewhere, here = save(tmp_path / "a", 1), save(tmp_path / "b", 2)
    assert find_checkpoint(tmp_path / "b", SafetyFlags(resume=str(elsewhere)), about(tmp_path)) == elsewhere
    assert here.exists()


def test_updates_of_another_size_cannot_go_on_inside_a_ppo_step(tmp_path):
    between, inside, force = save(tmp_path, 1), save(tmp_path, 1, 2), SafetyFlags(resume_force=True)
    other = about(tmp_path)
    other = replace(other, config=other.config | {"rows_per_update": 4})
    with pytest.raises(UserError, match="step_000001_update_0002 was saved inside .* 8 rows each, not 4"):
        find_checkpoint(tmp_path, force, other)
    assert find_checkpoint(tmp_path, replace(force, resume=str(between)), other) == between
    assert not inside.exists()


def test_a_name_that_is_no_intact_checkpoint_is_refused(tmp_path):
    first = save(tmp_path, 1)
    with pytest.raises(UserError, match="--resume .*/none: there is no such folder"):
        find_checkpoint(tmp_path, SafetyFlags(resume=str(tmp_path / "none")), about(tmp_path))
    flip(first / "shared.pt")
    with pytest.raises(UserError, match="--resume .*checksum differs"):
        find_checkpoint(tmp_path, SafetyFlags(resume=str(first)), about(tmp_path))


def test_a_link_to_the_folder_names_the_same_checkpoint_and_a_copy_beside_them_another(tmp_path):
    output, link = tmp_path / "output", tmp_path / "link"
    link.symlink_to(output)
    saved, later = save(output, 1), save(output, 2)
    copy = saved.with_name("kept")
    shutil.copytree(saved, copy)
    assert find_checkpoint(output, SafetyFlags(resume=str(copy)), about(output)) == copy
    assert saved.exists() and not later.exists()
    assert find_checkpoint(output, SafetyFlags(), about(output)) == saved, "what is at the same place stays"
    later = save(output, 2)
    assert find_checkpoint(output, SafetyFlags(resume=str(link / "checkpoints/step_000001")), about(output)).samefile(
        saved
    )
    assert not later.exists()


def test_what_means_something_else_is_refused_unless_forced(tmp_path, capsys):
    saved = save(tmp_path, 1)
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path)) == saved
    assert capsys.readouterr().out == ""
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path, "--zero_stage", "3")) == saved
    assert "since step_000001 was saved:\n- --zero_stage 2\n+ --zero_stage 3\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="step_000001 was saved under .*:\n- --seed 1234\n.*--seed 5\n"):
        find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path, "--seed", "5"))
    assert find_checkpoint(tmp_path, SafetyFlags(resume_force=True), about(tmp_path, "--seed", "5")) == saved
    with pytest.raises(UserError, match=r"something else:\n- training rows .* a+\n\+ training rows .* b+\n- --seed"):
        find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path, "--seed", "5", data="b" * 64))
    with pytest.raises(UserError, match="of the step 'sft', not of 'ppo'"):
        find_checkpoint(tmp_path, SafetyFlags(), replace(about(tmp_path), kind="ppo"))


def earlier(output: Path, *more: str) -> tuple[str | None, str | None]:
    config = config_of(output, *more)
    return _earlier_outputs(output, config, config.run)


def test_an_empty_folder_or_an_unfinished_run_with_a_checkpoint_is_all_right(tmp_path):
    assert earlier(tmp_path) == (None, None)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    write_config(config_of(tmp_path), tmp_path)
    save(tmp_path, 1)
    assert earlier(tmp_path) == (None, None)
    assert (tmp_path / "metrics.jsonl").exists()


def test_checkpoints_alone_are_earlier_outputs_too(tmp_path):
    write_config(config_of(tmp_path), tmp_path)
    save(tmp_path, 1)
    for resume in ("never", str(tmp_path.parent / "elsewhere")):
        problem, _ = earlier(tmp_path, "--resume", resume)
        assert problem is not None and "holds earlier outputs (step_000001)" in problem
    assert earlier(tmp_path) == earlier(tmp_path, "--overwrite_output_dir", "True") == (None, None)


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew_and_keeps_its_metrics(tmp_path):
    write_config(config_of(tmp_path), tmp_path)
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f"{number}\n")
        assert earlier(tmp_path) == (None, None)
        assert (tmp_path / f"metrics.{number}.jsonl").read_text() == f"{number}\n"
    (tmp_path / "metrics.jsonl").write_text("3\n")
    problem, _ = earlier(tmp_path, "--seed", "5")
    assert problem is not None and "--seed 1234" in problem and "--overwrite_output_dir" in problem
    assert "--resume_force" not in problem, "there is no checkpoint to train on from"
    assert (tmp_path / "metrics.jsonl").exists(), "nothing was touched"


def test_a_run_that_is_done_says_so_and_others_are_refused(tmp_path, monkeypatch):
    write_config(config_of(tmp_path), tmp_path)
    (tmp_path / "result.json").write_text("{}")
    save(tmp_path, 4)
    problem, done = earlier(tmp_path)
    assert problem is None and done is not None and "is done" in done
    assert "raise --num_train_epochs and add --resume_force" in done
    assert earlier(tmp_path, "--zero_stage", "3")[1] == done, "it would compute the same"
    problem, done = earlier(tmp_path, "--num_train_epochs", "2")
    assert done is None and problem is not None and "result.json" in problem
    assert "add --resume_force to train on from its last checkpoint" in problem
    assert earlier(tmp_path, "--num_train_epochs", "2", "--resume_force", "True") == (None, None)
    assert earlier(tmp_path, "--overwrite_output_dir", "True") == (None, None)
    problem, _ = earlier(tmp_path, "--resume", str(tmp_path.parent / "elsewhere"))
    assert problem is not None and "result.json" in problem
    monkeypatch.chdir(tmp_path)
    problem, _ = earlier(tmp_path, "--resume", "never")
    assert problem is not None and "result.json" in problem
    assert earlier(tmp_path, "--resume", "checkpoints/step_000004") == (None, None)
    (tmp_path / "link").symlink_to(tmp_path)
    assert earlier(tmp_path, "--resume", str(tmp_path / "link/checkpoints/step_000004")) == (None, None)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "model-00001-of-00002.safetensors", "result.json"])
@pytest.mark.parametrize("config", [None, b"", b"\xff", b"a: [", b"[1]"])
def test_outputs_without_their_configuration_are_refused(tmp_path, name, config):
    (tmp_path / name).write_text("{}\n")
    if config is not None:
        (tmp_path / "config.yaml").write_bytes(config)
    problem, _ = earlier(tmp_path)
    assert problem is not None and f"holds earlier outputs ({name}); name another folder" in problem
    assert "\n" not in problem


def test_a_run_that_ended_before_its_first_metrics_begins_anew(tmp_path):
    (tmp_path / "config.json").write_text("{}\n")
    write_config(config_of(tmp_path), tmp_path)
    assert earlier(tmp_path) == (None, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "config.yaml"]


def test_beginning_anew_takes_away_what_marks_an_earlier_run_and_going_on_does_not(tmp_path):
    config = config_of(tmp_path)
    marks = [
        "actor_ema/model.safetensors",
        "critic/model.safetensors",
        "eval/step_000004.jsonl",
        "best/actor/model.safetensors",
        "nonfinite/step_1/what.json",
    ]
    marks += ["tensorboard/events.out.tfevents.1", "best.old/model.safetensors", "best.partial/model.safetensors"]
    others = ["eval/notes.jsonl", "tensorboard/notes", "notes/step_000004.jsonl"]
    for mark in [*marks, *others]:
        (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / mark).write_text("x")
    saved = save(tmp_path, 1)
    run = replace(config.run, tensorboard_path="tensorboard", overwrite_output_dir=True)
    prepare_output_folder(tmp_path, config, run, resumed=saved)
    assert saved.exists() and all((tmp_path / mark).exists() for mark in marks)
    prepare_output_folder(tmp_path, config, run)
    assert not saved.exists() and not any((tmp_path / mark).exists() for mark in marks)
    assert all((tmp_path / other).exists() for other in others)
    assert (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize("resumed", [True, False])
def test_a_run_that_begins_is_not_finished_and_is_so_until_what_is_old_is_gone(tmp_path, monkeypatch, resumed):
    config = config_of(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    saved = save(tmp_path, 1)
    removed = []

    def rmtree(path):
        removed.append(path.name)
        assert (tmp_path / "result.json").exists()

    write_config(config, tmp_path)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    prepare_output_folder(tmp_path, config, config.run, saved if resumed else None)
    assert removed == ([] if resumed else ["checkpoints"])
    assert not (tmp_path / "result.json").exists()


def test_a_checkpoint_that_was_being_replaced_is_put_back_before_anything_is_looked_at(tmp_path):
    saved = save(tmp_path, 1)
    saved.rename(saved.with_name("step_000001.replaced"))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    write_config(config_of(tmp_path), tmp_path)
    assert earlier(tmp_path) == (None, None)
    assert (tmp_path / "metrics.jsonl").exists()
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path)) == saved


def test_folders_that_no_run_of_ours_made_are_left_alone(tmp_path):
    config = config_of(tmp_path)
    mine = ["checkpoints/thesis.txt", "best/photo.jpg", "critic/model.safetensors", "actor_ema/notes"]
    for name in mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    prepare_output_folder(tmp_path, config, config.run)
    assert all((tmp_path / name).exists() for name in mine)
    prepare_output_folder(tmp_path, config, config.run)
    assert (tmp_path / "critic/model.safetensors").exists(), "not without --overwrite_output_dir"


@pytest.mark.parametrize("content", [b"", b'{"steps": 4', b"[1]", bytes(20), b"\xff"])
def test_a_result_that_is_not_whole_is_no_mark_of_a_finished_run(tmp_path, monkeypatch, content):
    said = []
    monkeypatch.setattr(logger(), "warning", said.append)
    write_config(config_of(tmp_path), tmp_path)
    (tmp_path / "result.json").write_bytes(content)
    problem, done = earlier(tmp_path)
    assert done is None and problem is not None and "\n" not in problem
    assert "result.json is damaged, and there is no checkpoint to finish that run from" in problem
    saved = save(tmp_path, 4)
    assert earlier(tmp_path) == (None, None) and find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path)) == saved
    assert said == [f"{tmp_path}/result.json is damaged, so the run does not count as done"]
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path), overwrite=True) == saved, "it was interrupted"
    (tmp_path / "result.json").write_text("{}")
    assert find_checkpoint(tmp_path, SafetyFlags(), about(tmp_path), overwrite=True) is None


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"a: [", b"[1]", b"a: 2026-13-45", bytes(30)])
def test_a_configuration_that_cannot_be_read_is_written_again_from_an_intact_checkpoint(tmp_path, monkeypatch, content):
    said = []
    monkeypatch.setattr(logger(), "warning", said.append)
    write_config(config_of(tmp_path), tmp_path)
    written = (tmp_path / "config.yaml").read_bytes()
    (tmp_path / "config.yaml").unlink()
    if content is not None:
        (tmp_path / "config.yaml").write_bytes(content)
    (tmp_path / "result.json").write_text("{}")
    save(tmp_path, 4)
    problem, done = earlier(tmp_path)
    assert problem is None and done is not None and "this run is done" in done
    assert yaml.safe_load((tmp_path / "config.yaml").read_bytes()) == yaml.safe_load(written)
    assert len(said) == 1 and "config.yaml could not be read; it is restored from checkpoint step_000004" in said[0]
    problem, done = earlier(tmp_path, "--seed", "5")
    assert done is None and problem is not None and "--seed 1234" in problem
