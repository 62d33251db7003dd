"""An output folder with the outputs of an earlier run: accepted, refused, kept or removed."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from checkpoints import config_of, identity_of, save_checkpoint

from dschat_ppo.checkpoint.identity import find_checkpoint
from dschat_ppo.common.logging import logger
from dschat_ppo.config.cli import flatten
from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.errors import StopRequested, UserError
from dschat_ppo.monitor.writers import write_config
from dschat_ppo.session.output_folder import (
    check_earlier_outputs,
    prepare_output_folder,
    refuse_model_folders,
    refuse_pipes,
)
from dschat_ppo.session.session import begin_run


def earlier(output: Path, *more: str) -> tuple[str | None, str | None]:
    """(why the run is refused, why nothing is left to do); None: it is not."""
    config = config_of(output, *more)
    try:
        check_earlier_outputs(output, config, config.run)
    except UserError as problem:
        return str(problem), None
    except StopRequested as done:
        return None, str(done)
    return None, None


def test_an_empty_folder_and_an_unfinished_run_with_a_checkpoint_are_accepted(tmp_path):
    assert earlier(tmp_path) == (None, None)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    write_config(flatten(config_of(tmp_path)), tmp_path)
    save_checkpoint(tmp_path, 1)
    assert earlier(tmp_path) == (None, None)
    assert (tmp_path / "metrics.jsonl").exists()


def test_an_adapter_folder_counts_as_an_earlier_output(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    problem, _ = earlier(tmp_path)
    assert problem is not None and "holds earlier outputs (adapter_config.json)" in problem


def test_the_output_is_not_written_over_the_base_of_an_adapter(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    refuse_model_folders(tmp_path / "out", [str(adapter)])
    for output in (base, adapter):
        with pytest.raises(UserError, match="would be written over a model that is read"):
            refuse_model_folders(output, [str(adapter)])


def test_checkpoints_alone_count_as_earlier_outputs(tmp_path):
    write_config(flatten(config_of(tmp_path)), tmp_path)
    save_checkpoint(tmp_path, 1)
    for resume in ("never", str(tmp_path.parent / "elsewhere")):
        problem, _ = earlier(tmp_path, "--resume", resume)
        assert problem is not None and "holds earlier outputs (step_000001)" in problem
    assert earlier(tmp_path) == earlier(tmp_path, "--overwrite_output_dir", "True") == (None, None)


def test_a_run_without_a_checkpoint_starts_over_and_keeps_the_old_metrics(tmp_path):
    write_config(flatten(config_of(tmp_path)), tmp_path)
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f"{number}\n")
        assert earlier(tmp_path) == (None, None)
        assert (tmp_path / f"metrics.{number}.jsonl").read_text() == f"{number}\n"
    (tmp_path / "metrics.jsonl").write_text("3\n")
    problem, _ = earlier(tmp_path, "--seed", "5")
    assert problem is not None and "  --seed: 1234 -> 5" in problem and "--overwrite_output_dir" in problem
    assert "--resume_force" not in problem, "there is no checkpoint to continue from"
    problem, _ = earlier(tmp_path, "--seed", "5", "--resume_force", "True")
    assert problem is not None and "--resume_force has no effect without a checkpoint" in problem
    assert (tmp_path / "metrics.jsonl").exists(), "nothing was touched"


@pytest.mark.parametrize(("lines", "did_steps"), [
    ("", False), ('{"step": 0, "eval/score": 1.0}\n', False), ('{"step": 0}\n{"step": 1}\n', True),
    ('{"step": 0', True),
])  # fmt: skip
def test_a_run_that_did_no_step_does_not_block_one_with_other_settings(tmp_path, said, lines, did_steps):
    write_config(flatten(config_of(tmp_path)), tmp_path)
    (tmp_path / "metrics.jsonl").write_text(lines)
    problem, _ = earlier(tmp_path, "--seed", "5")
    if did_steps:
        assert problem is not None and "  --seed: 1234 -> 5" in problem
    else:
        assert problem is None and "with other settings ended before its first step; starting over" in said[0]
        assert (tmp_path / "metrics.1.jsonl").read_text() == lines


def test_a_model_blocks_a_run_with_other_settings_also_without_a_step(tmp_path):
    write_config(flatten(config_of(tmp_path)), tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "model.safetensors").touch()
    problem, _ = earlier(tmp_path, "--seed", "5")
    assert problem is not None and "  --seed: 1234 -> 5" in problem


def test_a_finished_run_is_reported_and_other_runs_are_refused(tmp_path, monkeypatch):
    write_config(flatten(config_of(tmp_path, "--keep_final_checkpoint", "True")), tmp_path)
    (tmp_path / "result.json").write_text("{}")
    save_checkpoint(tmp_path, 4)
    problem, done = earlier(tmp_path)
    assert problem is None and done is not None and "is done" in done
    assert "raise --num_train_epochs or --max_steps, and add --resume_force if the learning rate depends" in done
    assert earlier(tmp_path, "--zero_stage", "3")[1] == done, "the result would be the same"
    problem, done = earlier(tmp_path, "--num_train_epochs", "2")
    assert done is None and problem is not None and "result.json" in problem
    assert "add --resume_force to continue from its last checkpoint" in problem
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


def test_a_finished_run_whose_rate_does_not_depend_on_its_length_may_be_extended(tmp_path):
    constant = ("--lr_scheduler_type", "constant")
    write_config(flatten(config_of(tmp_path, *constant)), tmp_path)
    (tmp_path / "result.json").write_text("{}")
    save_checkpoint(tmp_path, 4)
    for length in (("--num_train_epochs", "2"), ("--num_train_epochs", "0.5"), ("--max_steps", "9")):
        assert earlier(tmp_path, *constant, *length) == (None, None)
    assert earlier(tmp_path, *constant)[1] is not None, "the same length"
    save_checkpoint(tmp_path, 4)
    problem, _ = earlier(tmp_path, *constant, "--max_steps", "9", "--seed", "5")
    assert (
        problem is not None
        and "  --seed: 1234 -> 5" in problem
        and "--max_steps" not in problem.split("add --resume")[0]
    )


def test_a_finished_run_without_checkpoints_is_done_and_cannot_be_extended(tmp_path):
    constant = ("--lr_scheduler_type", "constant")
    write_config(flatten(config_of(tmp_path, *constant)), tmp_path)
    (tmp_path / "result.json").write_text("{}")
    problem, done = earlier(tmp_path, *constant)
    assert problem is None and done is not None and "this run is done (to train longer, start another run" in done
    for longer in (["--num_train_epochs", "2"], ["--max_steps", "9", "--resume_force", "True"]):
        problem, done = earlier(tmp_path, *constant, *longer)
        assert done is None and problem is not None and "\n" not in problem
        assert "its checkpoints were removed, so its length cannot change" in problem
        assert "--keep_final_checkpoint" in problem


@pytest.mark.parametrize(("before", "now"), [(True, False), (False, False), (False, True)])
def test_what_a_crash_left_of_the_removal_is_removed(tmp_path, assets, before, now):
    write_config(flatten(config_of(tmp_path, "--keep_final_checkpoint", str(before))), tmp_path)
    (tmp_path / "result.json").write_text("{}")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(assets / "lm" / name, tmp_path)
    save_checkpoint(tmp_path, 4)
    problem, done = earlier(tmp_path, "--keep_final_checkpoint", str(now))
    assert problem is None and done is not None and "this run is done" in done
    assert (tmp_path / "checkpoints").exists() == (before or now)
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize("place", [".", "actor"])
def test_the_checkpoints_of_a_model_that_cannot_be_read_stay(tmp_path, place):
    write_config(flatten(config_of(tmp_path)), tmp_path)
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "model.safetensors").write_bytes(b"damaged")
    save_checkpoint(tmp_path, 4)
    problem, done = earlier(tmp_path)
    assert problem is None and done is not None and "a saved model cannot be read: add --resume_force" in done
    assert (tmp_path / "checkpoints/step_000004").exists()
    assert earlier(tmp_path, "--resume_force", "True") == (None, None)


def test_checkpoints_of_a_version_without_the_flag_stay(tmp_path):
    path = write_config(flatten(config_of(tmp_path)), tmp_path)
    flags = yaml.safe_load(path.read_text())
    del flags["keep_final_checkpoint"]
    path.write_text(yaml.safe_dump(flags))
    (tmp_path / "result.json").write_text("{}")
    save_checkpoint(tmp_path, 4)
    assert "raise --num_train_epochs or --max_steps" in (earlier(tmp_path)[1] or "")
    assert (tmp_path / "checkpoints/step_000004").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "model-00001-of-00002.safetensors", "result.json"])
@pytest.mark.parametrize("config", [None, b"", b"\xff", b"a: [", b"[1]"])
def test_outputs_without_their_configuration_are_refused(tmp_path, name, config):
    (tmp_path / name).write_text("{}\n")
    if config is not None:
        (tmp_path / "config.yaml").write_bytes(config)
    problem, _ = earlier(tmp_path)
    assert problem is not None and f"holds earlier outputs ({name}) and no readable config.yaml; name" in problem
    assert "\n" not in problem


def test_a_run_without_metrics_starts_over(tmp_path):
    (tmp_path / "config.json").write_text("{}\n")
    write_config(flatten(config_of(tmp_path)), tmp_path)
    assert earlier(tmp_path) == (None, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "config.yaml"]


def test_a_start_from_scratch_removes_earlier_outputs_and_a_resume_keeps_them(tmp_path):
    config = config_of(tmp_path)
    marks = [
        "actor_ema/model.safetensors",
        "critic/model.safetensors",
        "eval/step_000004.jsonl",
        "best/actor/model.safetensors",
        "nonfinite/step_1/bundle.pt",
        "trackers.json",
    ]
    marks += ["tensorboard/events.out.tfevents.1", "best.old/model.safetensors", "best.partial/model.safetensors"]
    others = ["eval/notes.jsonl", "tensorboard/notes", "notes/step_000004.jsonl"]
    for mark in [*marks, *others]:
        (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / mark).write_text("x")
    saved = save_checkpoint(tmp_path, 1)
    run = replace(config.run, tensorboard_path="tensorboard", overwrite_output_dir=True)
    prepare_output_folder(tmp_path, config, run, resumed=saved)
    assert saved.exists() and all((tmp_path / mark).exists() for mark in marks)
    prepare_output_folder(tmp_path, config, run)
    assert not saved.exists() and not any((tmp_path / mark).exists() for mark in marks)
    assert all((tmp_path / other).exists() for other in others)
    assert (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize("resumed", [True, False])
def test_the_result_is_removed_after_the_other_earlier_outputs(tmp_path, monkeypatch, resumed):
    config = config_of(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    saved = save_checkpoint(tmp_path, 1)
    removed = []

    def rmtree(path):
        removed.append(path.name)
        assert (tmp_path / "result.json").exists()

    write_config(flatten(config), tmp_path)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    prepare_output_folder(tmp_path, config, config.run, saved if resumed else None)
    assert removed == ([] if resumed else ["checkpoints"])
    assert not (tmp_path / "result.json").exists()


def test_folders_that_no_run_made_are_kept(tmp_path):
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
def test_a_damaged_result_does_not_mark_a_finished_run(tmp_path, monkeypatch, content):
    warnings = []
    monkeypatch.setattr(logger(), "warning", warnings.append)
    write_config(flatten(config_of(tmp_path)), tmp_path)
    (tmp_path / "result.json").write_bytes(content)
    identity = identity_of(tmp_path)
    problem, done = earlier(tmp_path)
    assert done is None and problem is not None and "\n" not in problem
    assert "result.json is damaged, and there is no checkpoint to finish that run from" in problem
    saved = save_checkpoint(tmp_path, 4)
    assert earlier(tmp_path) == (None, None) and find_checkpoint(tmp_path, SafetyFlags(), identity) == saved
    assert warnings == [f"{tmp_path}/result.json is damaged, so the run does not count as done"]
    assert find_checkpoint(tmp_path, SafetyFlags(), identity, overwrite=True) == saved, "it was interrupted"
    (tmp_path / "result.json").write_text("{}")
    assert find_checkpoint(tmp_path, SafetyFlags(), identity, overwrite=True) is None


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"a: [", b"[1]", b"a: 2026-13-45", bytes(30)])
def test_a_finished_run_with_an_unreadable_configuration_is_another_run(tmp_path, assets, content):
    shutil.copy(assets / "lm/model.safetensors", tmp_path)
    if content is not None:
        (tmp_path / "config.yaml").write_bytes(content)
    (tmp_path / "result.json").write_text("{}")
    save_checkpoint(tmp_path, 4)
    problem, done = earlier(tmp_path)
    assert done is None and "holds earlier outputs (result.json) and no readable config.yaml; name" in problem


@pytest.mark.parametrize("name", ["health.jsonl", "samples.jsonl", "starts.jsonl", "report.html"])
def test_a_run_from_scratch_removes_the_records_of_an_earlier_run(tmp_path, name):
    config = config_of(tmp_path)
    (tmp_path / name).write_text("{}\n")
    prepare_output_folder(tmp_path, config, config.run)
    assert (tmp_path / name).exists(), "no run of this project made it"
    prepare_output_folder(tmp_path, config, config.run)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_old_tensorboard_files_of_an_earlier_run_are_removed(tmp_path, inside, ours):
    board = tmp_path / ("out/board" if inside else "shared_board")
    board.mkdir(parents=True)
    (board / "events.out.tfevents.1").write_text("old")
    config = config_of(tmp_path / "out", "--tensorboard_path", "board" if inside else str(board))
    if ours:
        (tmp_path / "out").mkdir(exist_ok=True)
        write_config(flatten(config), tmp_path / "out")
    prepare_output_folder(tmp_path / "out", config, config.run)
    assert (board / "events.out.tfevents.1").exists() is not (inside and ours)


@pytest.mark.parametrize(("given", "folder"), [
    ("board", "out/board"), ("./out", "out"), ("out/board", "out/board"), ("outer", "out/outer"), (".", "out"),
    ("{here}/shared", "shared"), ("{here}/out", "out"),
])  # fmt: skip
@pytest.mark.parametrize("output", ["out", "./out/", "{here}/out"])
def test_relative_tensorboard_paths_are_inside_the_output_folder(tmp_path, monkeypatch, given, folder, output):
    monkeypatch.chdir(tmp_path)
    words = ["--tensorboard_path", given.format(here=tmp_path)]
    board = config_of(output.format(here=tmp_path), *words).run.tensorboard_folder
    assert board.resolve() == tmp_path / folder


@pytest.mark.parametrize("model", ["out", "out/actor", "out/critic"])
def test_an_output_folder_with_an_input_model_is_rejected(tmp_path, model):
    config = config_of(tmp_path / "out", "--overwrite_output_dir")
    with pytest.raises(UserError, match="written over a model"):
        begin_run("sft", config, [str(tmp_path / model)])


def test_a_pipe_where_a_run_has_files_is_refused_and_not_waited_for(tmp_path):
    refuse_pipes(tmp_path / "new")
    (tmp_path / "logs").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    refuse_pipes(tmp_path)
    os.mkfifo(tmp_path / "logs" / "rank_0.log")
    with pytest.raises(UserError, match=r": logs/rank_0\.log is not a regular file; remove it$"):
        refuse_pipes(tmp_path)
