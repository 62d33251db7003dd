"""Sessions, with a trainer that trains nothing: checks before a model is loaded, what a run resumes
from and what it leaves."""

from dataclasses import replace
from itertools import count

import pytest
from deepspeed.accelerator import get_accelerator
from stub_runs import Trainer, open_run, run, steps_of, train

from dschat_ppo.checkpoint.store import CheckpointFolder, Manifest
from dschat_ppo.common import stop_requests
from dschat_ppo.config.cli import parse
from dschat_ppo.config.step_config import defaults_of
from dschat_ppo.config.supervised_config import SFTConfig
from dschat_ppo.errors import StopRequested, UnhealthyRun, UserError
from dschat_ppo.html_report.run_folder import read_run
from dschat_ppo.monitor import writers
from dschat_ppo.monitor.trackers import Start
from dschat_ppo.run import session


def names(output) -> list[str]:
    return CheckpointFolder(output).names()


def stop_from(monkeypatch, number):
    """Request a stop from the call of this number on."""
    calls = count(1)
    monkeypatch.setattr(stop_requests, "requested", lambda: next(calls) >= number)


def test_a_run_saves_its_last_step_and_a_longer_run_resumes_from_it(tmp_path):
    assert run(tmp_path, 2).position == (2, 0)
    assert names(tmp_path) == ["step_000002"] and steps_of(tmp_path) == [1, 2]
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "of": "a crash"}\n')
    longer = open_run(tmp_path)
    assert longer.checkpoint == tmp_path / "checkpoints/step_000002"
    trainer = Trainer()
    train(longer, trainer, trainer.to(4))
    assert names(tmp_path) == ["step_000002", "step_000004"] and steps_of(tmp_path) == [1, 2, 3, 4]
    assert "crash" not in (tmp_path / "metrics.jsonl").read_text()
    assert [start["step"] for start in read_run(tmp_path, "a").starts] == [1, 3], (
        "the lines of starts.jsonl"
    )


def test_a_stopped_run_is_saved_and_resume_never_starts_from_scratch(tmp_path, monkeypatch):
    trainer = Trainer()
    with monkeypatch.context() as patch:
        stop_from(patch, 3)
        with pytest.raises(StopRequested, match="step_000003; run the same command again"):
            train(open_run(tmp_path), trainer, trainer.to(9))
    assert steps_of(tmp_path) == [1, 2, 3]
    (tmp_path / "best").mkdir()
    restarted = open_run(tmp_path, "--resume", "never")
    assert (
        restarted.checkpoint is None and names(tmp_path) == [] and not (tmp_path / "best").exists()
    )
    trainer = Trainer()
    train(restarted, trainer, trainer.to(1))
    assert steps_of(tmp_path) == [1]


def test_a_checkpoint_of_another_folder_restores_the_state_but_no_metrics(tmp_path, monkeypatch):
    run(tmp_path / "one", 2)
    place = tmp_path / "one/checkpoints/step_000002"
    other = tmp_path / "other"
    other.mkdir()
    trainer = Trainer()
    with monkeypatch.context() as patch:
        patch.setattr(stop_requests, "requested", lambda: True)
        with pytest.raises(
            StopRequested,
            match="other/checkpoints/step_000002; run the command again with --resume a",
        ):
            session_of = open_run(other, "--resume", str(place))
            train(session_of, trainer, lambda writer, checkpointer: checkpointer.save_if_due())
    assert trainer.position == (2, 0)
    assert names(other) == ["step_000002"], "the message names it"
    (other / "metrics.jsonl").write_text('{"step": 1, "of": "something else"}\n')
    assert run(other, 3, "--resume", str(place)).position == (3, 0)
    assert steps_of(other) == [3] and names(other) == ["step_000003"], (
        "the old lines were of another run"
    )
    assert steps_of(tmp_path / "one") == [1, 2] and names(tmp_path / "one") == ["step_000002"]


def test_a_set_aside_checkpoint_is_saved_again_under_its_name(tmp_path):
    run(tmp_path, 2)
    place = tmp_path / "checkpoints/step_000002"
    set_aside = place.rename(place.with_name("step_000002.set_aside"))
    assert run(tmp_path, 2, "--resume", str(set_aside)).position == (2, 0)
    assert names(tmp_path) == ["step_000002"], "else there would be nothing to resume from"
    assert run(tmp_path, 3).position == (3, 0) and steps_of(tmp_path) == [1, 2, 3]


def test_trackers_receive_the_flags_and_resume_at_the_next_step(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(
        writers, "open_trackers", lambda tracking, start: opened.append((tracking, start)) or []
    )
    words = [
        "--enable_tensorboard",
        "--tensorboard_path",
        "board",
        "--report_to",
        "trackio",
        "--run_name",
        "mine",
    ]
    run(tmp_path, 2, *words)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        # steps after the checkpoint, before a crash
        lines.write('{"step": 3}\n{"step": 4}\n{"step"')
    run(tmp_path, 5, *words, "--project", "ours")
    (first, begin), (second, resume) = opened
    assert (first.libraries, first.tensorboard) == (("trackio", "tensorboard"), tmp_path / "board")
    assert (first.project, first.run_name, second.project) == (None, "mine", "ours")
    assert (
        first.flags["seed"] == 1234
        and first.flags.keys() == defaults_of(SFTConfig).keys()
        and "rows_per_update" not in first.flags
    )
    assert (begin, resume) == (Start(None, -1), Start(3, 4))
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("opened_first", [False, True])
def test_a_stop_before_training_changes_nothing(tmp_path, monkeypatch, opened_first):
    run(tmp_path, 2)
    (tmp_path / "result.json").write_text("{}")
    opened, trainer = open_run(tmp_path), Trainer()
    kept = sorted(path.name for path in tmp_path.rglob("*"))
    monkeypatch.setattr(stop_requests, "flag_is_set", lambda: True)
    with pytest.raises(StopRequested, match="before training began; run the same command again"):
        if opened_first:
            train(opened, trainer, trainer.to(9))
        else:
            open_run(tmp_path, "--resume", "never", "--overwrite_output_dir")
    assert sorted(path.name for path in tmp_path.rglob("*")) == kept and trainer.position == (0, 0)


@pytest.mark.parametrize(
    ("steps", "update", "refused"), [(3, 0, True), (4, 0, False), (4, 1, True), (5, 1, False)]
)
def test_a_checkpoint_beyond_the_end_of_the_run_is_refused_before_anything_is_changed(
    tmp_path, steps, update, refused
):
    run(tmp_path, 4)
    folder = tmp_path / "checkpoints/step_000004"
    replace(Manifest.read(folder), update=update).write(folder)
    (tmp_path / "result.json").write_text("{}")
    if refused:
        with pytest.raises(
            UserError,
            match=f"step_000004 is beyond the end of this run, which has {steps} steps: rai",
        ):
            open_run(tmp_path, "--resume_force", "True", steps=steps)
    else:
        assert open_run(tmp_path, "--resume_force", "True", steps=steps).checkpoint == folder
    assert (tmp_path / "result.json").exists() is refused


def test_a_run_that_a_health_event_ends_is_saved(tmp_path):
    trainer = Trainer()

    def until_event(writer, checkpointer):
        trainer.to(2)(writer, checkpointer)
        checkpointer.stop_if("entropy_collapse")

    with pytest.raises(
        UnhealthyRun,
        match=f"entropy_collapse .saved as {tmp_path}/checkpoints/step_000002; run the",
    ):
        train(open_run(tmp_path), trainer, until_event)


DAMAGE = {
    "CRLF": lambda lines: [line.replace(b"\n", b"\r\n") for line in lines],
    "zeros": lambda lines: [bytes(len(b"".join(lines)))],
    "cut": lambda lines: [lines[0], lines[1][:5]],
    "empty": lambda lines: [],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_changed_metrics_are_kept_under_another_name_and_restored_from_the_checkpoint(
    tmp_path, said, damage
):
    run(tmp_path, 3)
    place = tmp_path / "metrics.jsonl"
    written = place.read_bytes()
    changed = b"".join(damage(written.splitlines(keepends=True)))
    place.write_bytes(changed)
    said.clear()
    assert run(tmp_path, 5).position == (5, 0)
    assert place.read_bytes().startswith(written) and steps_of(tmp_path) == [1, 2, 3, 4, 5]
    [warning] = [line for line in said if f"{place} is not as the run wrote it" in line]
    assert "step_000003" in warning and ("kept as metrics.1.jsonl" in warning) is (changed != b"")
    if changed:
        assert (tmp_path / "metrics.1.jsonl").read_bytes() == changed


@pytest.fixture
def events(monkeypatch, tmp_path):
    """The steps of `join_ranks` and `begin_run` in the order in which they run; the ranks do not
    join."""
    done = []

    def noted(name, result=None):
        return lambda *_: done.append(name) or result

    names = ("init_process_group", "open_log", "check_earlier_outputs", "seed_everything")
    for name in names:
        monkeypatch.setattr(session, name, noted(name))
    monkeypatch.setattr(
        session, "set_deterministic", lambda wanted: done.append(f"deterministic {wanted}")
    )
    monkeypatch.setattr(session.watchdog, "start", noted("watchdog"))
    monkeypatch.setattr(session, "lock_folder", noted("lock"))
    return done


def config_of(folder, *more, model="m"):
    return parse(
        "sft",
        [
            "--model_name_or_path",
            str(model),
            "--data_path",
            "d",
            "--output_dir",
            str(folder),
            *more,
        ],
    )


def test_a_validation_has_its_own_folder_whatever_training_left(events, tmp_path):
    folder = tmp_path / "validation"
    folder.mkdir()
    (folder / "result.json").write_text("{}")
    config = config_of(tmp_path, "--validate_only", model=tmp_path)
    session.join_ranks(config)
    assert session.begin_run(config)[1] == folder
    assert "lock" in events and "check_earlier_outputs" not in events
    assert [path.name for path in folder.iterdir()] == ["config.yaml"], (
        "the result of an earlier one is removed"
    )
    with pytest.raises(UserError, match="would be written over a model"):
        session.join_ranks(config_of(tmp_path, model=tmp_path))


def test_ranks_that_cannot_share_rows_are_refused_before_they_join(events, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = config_of(tmp_path, "--sequence_parallel_size", "3")
    with pytest.raises(UserError, match="--sequence_parallel_size 3 does not divide the 4 ranks"):
        session.join_ranks(config)
    assert "init_process_group" not in events


@pytest.mark.parametrize(
    ("dtype", "supported", "usable"),
    [
        ("fp16", {"bf16"}, "bf16, fp32"),
        ("bf16", set(), "fp32"),
    ],
)
def test_a_number_format_that_the_device_lacks_is_refused(
    events, tmp_path, monkeypatch, dtype, supported, usable
):
    accelerator = get_accelerator()
    for name in ("bf16", "fp16"):
        says = lambda name=name: name in supported or None  # noqa: E731  None: as DeepSpeed says no
        monkeypatch.setattr(accelerator, f"is_{name}_supported", says)
    device = accelerator.device_name()
    with pytest.raises(
        UserError,
        match=f"^--dtype {dtype}: this {device} does not support it; use one of {usable}$",
    ):
        session.begin_run(config_of(tmp_path, "--dtype", dtype))


@pytest.mark.parametrize(
    ("dry_run", "deterministic"), [(False, True), (False, False), (True, False)]
)
def test_the_folder_is_locked_before_anything_is_written_and_compared_once_the_flags_are_checked(
    events, tmp_path, dry_run, deterministic
):
    config = config_of(tmp_path, "--dry_run", str(dry_run), "--deterministic", str(deterministic))
    session.join_ranks(config)
    session.begin_run(config, check=lambda: events.append("flags"))
    joined = [
        f"deterministic {deterministic}",
        "lock",
        "init_process_group",
        "watchdog",
        "open_log",
        "flags",
    ]
    assert events == (
        ["flags"] if dry_run else [*joined, "check_earlier_outputs", "seed_everything"]
    )
