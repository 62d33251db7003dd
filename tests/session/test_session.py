"""What a run goes on from and what it leaves, with a trainer that trains nothing."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from checkpoints import manifest_of
from stub_runs import ROWS, Trainer, open_run, run, steps_of

from dschat_ppo.checkpoint.folder import CheckpointFolder
from dschat_ppo.checkpoint.manifest import Manifest
from dschat_ppo.checkpoint.resume import is_inside
from dschat_ppo.checkpoint.rng_state import random_state
from dschat_ppo.checkpoint.run_identity import rows_fingerprint
from dschat_ppo.checkpoint.state_file import save_state
from dschat_ppo.errors import StopRequested
from dschat_ppo.runtime import stop_requests
from dschat_ppo.session import session


def names(output) -> list[str]:
    return CheckpointFolder(output).names()


def stop_from(monkeypatch, checkpointer):
    """Ask to stop from the boundary of this number on."""
    numbers = count(1)
    monkeypatch.setattr(stop_requests, "requested", lambda: next(numbers) >= checkpointer)


def test_a_run_ends_with_its_last_step_saved_and_a_longer_one_goes_on_from_there(tmp_path):
    assert run(tmp_path, 2).position == (2, 0)
    assert names(tmp_path) == ["step_000002"] and steps_of(tmp_path) == [1, 2]
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "of": "a crash"}\n')
    longer = open_run(tmp_path)
    assert longer.chosen == tmp_path / "checkpoints/step_000002"
    trainer = Trainer()
    longer.train(trainer, trainer.to(4))
    assert names(tmp_path) == ["step_000002", "step_000004"] and steps_of(tmp_path) == [1, 2, 3, 4]
    assert "crash" not in (tmp_path / "metrics.jsonl").read_text()


def test_when_and_how_many_are_saved_is_the_command_s_affair(tmp_path):
    assert run(tmp_path, 9, "--save_steps", "2", "--save_total_limit", "3").position == (9, 0)
    assert names(tmp_path) == ["step_000006", "step_000008", "step_000009"]


def test_what_is_saved_already_is_not_saved_again(tmp_path):
    run(tmp_path, 2)
    written = (tmp_path / "checkpoints/step_000002/manifest.json").stat().st_mtime_ns
    assert run(tmp_path, 2).position == (2, 0)
    assert (tmp_path / "checkpoints/step_000002/manifest.json").stat().st_mtime_ns == written


def test_a_run_is_described_by_its_flags_what_they_amount_to_and_its_rows(tmp_path):
    run(tmp_path, 1)
    manifest = Manifest.read(tmp_path / "checkpoints/step_000001")
    assert manifest.kind == "sft" and manifest.data == rows_fingerprint(ROWS)
    assert manifest.config["rows_per_update"] == 8 and manifest.config["seed"] == 1234
    assert (tmp_path / "config.yaml").exists()


def test_a_finished_run_is_done_once_more_where_it_may_be_overwritten(tmp_path, monkeypatch):
    run(tmp_path, 2)
    (tmp_path / "result.json").write_text("{}")
    trainer = Trainer()
    with monkeypatch.context() as patch:
        stop_from(patch, 1)
        with pytest.raises(StopRequested):
            open_run(tmp_path, "--overwrite_output_dir", "True", "--seed", "5").train(trainer, trainer.to(3))
    assert steps_of(tmp_path) == [1] and names(tmp_path) == ["step_000001"]
    assert run(tmp_path, 3, "--overwrite_output_dir", "True", "--seed", "5").position == (3, 0)
    assert steps_of(tmp_path) == [1, 2, 3], "what was interrupted goes on"
    (tmp_path / "result.json").write_text("{}")
    longer = open_run(tmp_path, "--resume_force", "True")
    assert longer.chosen == tmp_path / "checkpoints/step_000003", "what is forced to be longer too"


def test_a_run_that_was_stopped_goes_on_and_one_that_begins_anew_does_not(tmp_path, monkeypatch):
    trainer = Trainer()
    with monkeypatch.context() as patch:
        stop_from(patch, 3)
        with pytest.raises(StopRequested, match="step_000003; run the same command again"):
            open_run(tmp_path).train(trainer, trainer.to(9))
    assert steps_of(tmp_path) == [1, 2, 3]
    (tmp_path / "best").mkdir()
    anew = open_run(tmp_path, "--resume", "never")
    assert anew.chosen is None and names(tmp_path) == [] and not (tmp_path / "best").exists()
    trainer = Trainer()
    anew.train(trainer, trainer.to(1))
    assert steps_of(tmp_path) == [1]


def test_a_checkpoint_of_another_folder_brings_its_state_but_no_metrics(tmp_path, monkeypatch):
    run(tmp_path / "one", 2)
    place = tmp_path / "one/checkpoints/step_000002"
    other = tmp_path / "other"
    other.mkdir()
    trainer = Trainer()
    with monkeypatch.context() as patch:
        patch.setattr(stop_requests, "requested", lambda: True)
        with pytest.raises(
            StopRequested, match="other/checkpoints/step_000002; run the command again with --resume auto"
        ):
            session_of = open_run(other, "--resume", str(place))
            session_of.train(trainer, lambda writer, checkpointer: checkpointer.save_if_due())
    assert trainer.position == (2, 0)
    assert names(other) == ["step_000002"], "what the message says is there"
    (other / "metrics.jsonl").write_text('{"step": 1, "of": "something else"}\n')
    assert run(other, 3, "--resume", str(place)).position == (3, 0)
    assert steps_of(other) == [3] and names(other) == ["step_000003"], "what was there was of another run"
    assert steps_of(tmp_path / "one") == [1, 2] and names(tmp_path / "one") == ["step_000002"]


def test_a_checkpoint_that_was_set_aside_is_saved_under_its_name_again(tmp_path):
    run(tmp_path, 2)
    place = tmp_path / "checkpoints/step_000002"
    aside = place.rename(place.with_name("step_000002.set_aside"))
    assert run(tmp_path, 2, "--resume", str(aside)).position == (2, 0)
    assert names(tmp_path) == ["step_000002"], "else there would be nothing to go on from"
    assert run(tmp_path, 3).position == (3, 0) and steps_of(tmp_path) == [1, 2, 3]


def test_tensorboard_begins_at_the_first_step_to_come(tmp_path, monkeypatch):
    made = []

    class Writer(session.MetricsWriter):
        def __init__(self, folder, tensorboard, resumed=None):
            made.append((folder, tensorboard, resumed))
            super().__init__(folder, None, resumed)

    monkeypatch.setattr(session, "MetricsWriter", Writer)
    words = ["--enable_tensorboard", "--tensorboard_path", "board"]
    run(tmp_path, 2, *words)
    length = (tmp_path / "metrics.jsonl").stat().st_size
    run(tmp_path, 5, *words)
    board = tmp_path / "board"
    assert made == [(tmp_path, board, None), (tmp_path, board, (length, 3))]


def test_the_run_s_seed_and_the_streams_of_the_checkpoint(tmp_path, monkeypatch):
    """A checkpoint of two ranks: the streams of this one are seeded anew from `--seed` and the step."""
    run(tmp_path, 2)
    folder = tmp_path / "checkpoints/step_000002"
    saved = Manifest.read(folder)
    save_state(folder / "rank_1.pt", {"random": random_state()})
    two = manifest_of(folder, kind="sft", step=2, update=0, config=saved.config, data=saved.data, world_size=2)
    replace(two, files={name: entry for name, entry in two.files.items() if name != "manifest.json"}).write(folder)
    seeds = []
    monkeypatch.setattr("dschat_ppo.checkpoint.manager.seed_this_rank", seeds.append)
    torch.manual_seed(0)
    assert run(tmp_path, 3, "--resume_force", "True", "--seed", "50").position == (3, 0)
    assert seeds == [52]


def test_only_what_lies_in_the_folder_is_of_it(tmp_path):
    out = tmp_path / "out"
    (out / "checkpoints/step_000001").mkdir(parents=True)
    (tmp_path / "link").symlink_to(out)
    assert is_inside(out / "checkpoints/step_000001", out)
    assert is_inside(tmp_path / "link/checkpoints/step_000001", out)
    assert not is_inside(tmp_path / "output/checkpoints/step_000001", out)


@pytest.mark.parametrize("begun", [False, True])
def test_who_is_stopped_before_training_changes_nothing(tmp_path, monkeypatch, begun):
    run(tmp_path, 2)
    (tmp_path / "result.json").write_text("{}")
    opened, trainer = open_run(tmp_path), Trainer()
    kept = sorted(path.name for path in tmp_path.rglob("*"))
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    with pytest.raises(StopRequested, match="before training began; run the same command again"):
        if begun:
            opened.train(trainer, trainer.to(9))
        else:
            open_run(tmp_path, "--resume", "never", "--overwrite_output_dir")
    assert sorted(path.name for path in tmp_path.rglob("*")) == kept and trainer.position == (0, 0)
