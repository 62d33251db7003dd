"""The output folder: one run at a time has it; outputs of an earlier run are accepted, refused,
kept or removed."""

import errno
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from checkpoints import config_of, save_checkpoint

from dschat_ppo.common import dist
from dschat_ppo.config.step_config import flatten
from dschat_ppo.errors import NonFiniteError, StopRequested, UserError
from dschat_ppo.monitor.writers import write_config
from dschat_ppo.run import output_folder
from dschat_ppo.run.output_folder import (
    KeptModels,
    check_earlier_outputs,
    check_shared_folder,
    clear_partials,
    lock_folder,
    prepare_output_folder,
    refuse_model_folders,
    remove_checkpoints,
)


def release_locks():
    for number in output_folder._LOCKS.values():
        os.close(number)
    output_folder._LOCKS.clear()


@pytest.fixture(autouse=True)
def own_locks(monkeypatch):
    monkeypatch.setattr(output_folder, "_LOCKS", {})
    yield
    release_locks()


def lock_and_wait(folder, pipe):
    output_folder._LOCKS.clear()  # as in a process that is no fork of a run
    try:
        lock_folder(folder)
        pipe.send("locked")
        time.sleep(300)
    except UserError as problem:
        pipe.send(str(problem))


def other_run(folder) -> tuple[multiprocessing.Process, str]:
    """Another process that tries to lock the folder, and what it says."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=lock_and_wait, args=(folder, theirs), daemon=True)
    process.start()
    return process, ours.recv()


def test_a_second_run_is_refused_until_the_first_ends(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "output"
    first, said = other_run(folder)
    assert said == "locked"
    with pytest.raises(
        UserError, match=rf"{folder} is being written by another run \(pid {first.pid} on host "
    ):
        lock_folder(folder)
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        lock_folder(folder)  # which rank 0 alone locks
    first.kill()
    first.join()
    before = os.listdir("/proc/self/fd")
    lock_folder(folder)
    lock_folder(folder)  # a later step in the same process
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    second, said = other_run(folder)
    assert f"another run (pid {os.getpid()} on host" in said
    second.join()
    lock_folder(tmp_path / "other")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/inside"):
        with pytest.raises(UserError, match=rf"--output_dir {folder}: cannot be written"):
            lock_folder(folder)


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", fail)
    lock_folder(tmp_path)
    assert f"--output_dir {tmp_path}: its file system has no locks" in capsys.readouterr().out


def test_a_child_does_not_keep_the_lock(tmp_path):
    lock_folder(tmp_path)
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    forked.start()
    started = subprocess.Popen(["sleep", "600"], close_fds=False)
    try:
        refused, said = other_run(tmp_path)
        assert "another run" in said
        refused.join()
        release_locks()
        free, said = other_run(tmp_path)
        free.kill()
        assert said == "locked", "a child holds the lock"
        assert forked.is_alive() and started.poll() is None
    finally:
        for child in (forked, started):
            child.kill()
        forked.join()
        started.wait()


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_folder_that_the_machines_do_not_share_is_refused(monkeypatch, tmp_path, rank, is_shared):
    check_shared_folder(tmp_path / "one machine")  # writes nothing
    for name, value in {
        "RANK": rank,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 4,
        "LOCAL_WORLD_SIZE": 2,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(dist, "broadcast_object", lambda mine: ".shared_1")
    monkeypatch.setattr(dist, "on_main", lambda work: work() if rank == 0 else None)
    theirs = None if is_shared or rank else "beta"
    monkeypatch.setattr(dist, "gather_objects", lambda mine: [None, None, mine, theirs])
    if rank and is_shared:
        (tmp_path / ".shared_1").touch()
    if is_shared:
        check_shared_folder(tmp_path)
    else:
        with pytest.raises(
            UserError, match=f"machine {os.uname().nodename if rank else 'beta'} does not see"
        ):
            check_shared_folder(tmp_path)
    assert (tmp_path / ".shared_1").exists() is (rank == 2 and is_shared), "rank 0 removes it"


def earlier(output: Path, *more: str) -> str:
    """What becomes of a run in this folder: "" (it goes on), "done: ..." or "refused: ..."."""
    config = config_of(output, *more)
    try:
        check_earlier_outputs(output, config)
    except UserError as problem:
        return f"refused: {problem}"
    except StopRequested as done:
        return f"done: {done}"
    return ""


def leave(output: Path, what: str, *flags: str) -> None:
    """Leave these outputs of an earlier run with these flags; `config`, `checkpoint` and `aside` (a
    checkpoint that was set aside) are not written as texts."""
    for name in what.split():
        if name == "config":
            write_config(flatten(config_of(output, *flags)), output)
        elif name == "checkpoint":
            save_checkpoint(output, 4)
        elif name == "aside":
            save_checkpoint(output, 4).rename(output / "checkpoints" / "step_000004.set_aside")
        else:
            (output / name).write_text("{}")


FINISHED, UNFINISHED = "config metrics.jsonl result.json", "config metrics.jsonl"
OVERWRITE, FORCE = ["--overwrite_output_dir", "True"], ["--resume_force", "True"]
CONSTANT, LONGER = ["--lr_scheduler_type", "constant"], ["--max_steps", "9"]
HERE = ["--resume", "checkpoints/step_000004"]
EARLIER = [
    ("", [], ""),
    (f"{UNFINISHED} checkpoint", ["--seed", "5"], ""),  # `find_checkpoint` decides
    (
        f"{UNFINISHED} checkpoint",
        ["--resume", "never"],
        "refused: .*resume there give --resume auto",
    ),
    (
        f"{UNFINISHED} checkpoint",
        ["--resume", "/elsewhere"],
        "refused: .*holds earlier outputs .metrics.jsonl",
    ),
    (f"{UNFINISHED} aside", [], ""),
    (f"{FINISHED} aside", ["--resume", "checkpoints/step_000004.set_aside", *LONGER], ""),
    ("config checkpoint", OVERWRITE, ""),
    (
        f"{UNFINISHED} config.json",
        [],
        "refused: .*no checkpoint to resume from; name another folder",
    ),
    (
        "adapter_config.json",
        [],
        r"refused: .*\(adapter_config.json\) and no readable config.yaml; name",
    ),
    ("model-00001-of-00002.safetensors", [], "refused: .*no readable config.yaml"),
    (FINISHED, [], "done: .*this run is done .to train longer, start another run from its model"),
    (FINISHED, ["--zero_stage", "3"], "done: "),
    (
        FINISHED,
        LONGER,
        "refused: .*no checkpoint to continue from .--keep_final_checkpoint.*\n  --max_steps",
    ),
    (FINISHED, ["--seed", "5", *FORCE], "refused: .*\n  --seed: 1234 -> 5"),
    (FINISHED, OVERWRITE, ""),
    (
        f"{FINISHED} checkpoint",
        ["--keep_final_checkpoint", "True"],
        "done: .*raise --num_train_epochs or --max_steps",
    ),
    (f"{FINISHED} checkpoint", LONGER, ""),
    (f"{FINISHED} checkpoint", FORCE, ""),
    (f"{FINISHED} checkpoint", HERE, ""),
    (f"{FINISHED} checkpoint", ["--resume", "link/checkpoints/step_000004"], ""),
]


@pytest.mark.parametrize(("what", "flags", "outcome"), EARLIER)
def test_earlier_outputs_decide_what_becomes_of_a_run(tmp_path, monkeypatch, what, flags, outcome):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    leave(tmp_path, what)
    kept = sorted(tmp_path.rglob("*"))
    found = earlier(tmp_path, *flags)
    assert re.match(outcome, found, re.DOTALL) if outcome else found == ""
    assert sorted(tmp_path.rglob("*")) == kept


def test_a_run_without_a_checkpoint_starts_over_and_keeps_the_old_metrics(tmp_path, said):
    leave(tmp_path, "config")
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f"{number}\n")
        assert earlier(tmp_path, "--seed", "5") == ""
        assert (tmp_path / f"metrics.{number}.jsonl").read_text() == f"{number}\n"
    assert (
        "ended before its first checkpoint; starting over (its metrics are kept as metrics.2.jsonl)"
        in said[1]
    )


@pytest.mark.parametrize(
    ("before", "now"), [("True", "False"), ("False", "False"), ("False", "True")]
)
def test_what_a_crash_left_of_the_removal_is_removed(tmp_path, assets, before, now):
    leave(tmp_path, f"{FINISHED} checkpoint", "--keep_final_checkpoint", before)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(assets / "lm" / name, tmp_path)
    assert "this run is done" in earlier(tmp_path, "--keep_final_checkpoint", now)
    assert (tmp_path / "checkpoints").exists() == (before != "False" or now == "True")
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize("rest", ["latest", "environment/step_000003_rank_0.jsonl"])
def test_what_a_crash_left_beside_the_last_checkpoint_is_removed(tmp_path, assets, rest):
    leave(tmp_path, FINISHED, "--keep_final_checkpoint", "False")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(assets / "lm" / name, tmp_path)
    path = tmp_path / "checkpoints" / rest
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert "this run is done" in earlier(tmp_path, "--keep_final_checkpoint", "False")
    assert not (tmp_path / "checkpoints").exists()


OF_A_RUN = [
    "eval/step_000004.jsonl",
    "best/actor/model.safetensors",
    "nonfinite/step_1/bundle.pt",
    "trackers.json",
    "best.old/model.safetensors",
    "best.partial/model.safetensors",
    "health.jsonl",
    "samples.jsonl",
    "starts.jsonl",
    "report.html",
    "tensorboard/events.out.tfevents.1",
]
OF_SOME_RUNS = ["actor_ema/model.safetensors", "critic/model.safetensors"]
OF_OTHERS = ["eval/notes.jsonl", "tensorboard/notes", "notes/step_000004.jsonl"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_start_from_scratch_removes_earlier_outputs_and_a_resume_keeps_them(tmp_path, overwrite):
    config = config_of(tmp_path)
    for mark in [*OF_A_RUN, *OF_SOME_RUNS, *OF_OTHERS]:
        (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / mark).write_text("x")
    prepare_output_folder(tmp_path, config)
    assert all((tmp_path / mark).exists() for mark in OF_A_RUN), "no run of this project made them"
    saved = save_checkpoint(tmp_path, 1)
    config = config_of(
        tmp_path, "--tensorboard_path", "tensorboard", "--overwrite_output_dir", str(overwrite)
    )
    prepare_output_folder(tmp_path, config, resumed=saved)
    assert saved.exists() and all((tmp_path / mark).exists() for mark in OF_A_RUN)
    prepare_output_folder(tmp_path, config)
    assert not saved.exists() and not any((tmp_path / mark).exists() for mark in OF_A_RUN)
    assert [(tmp_path / mark).exists() for mark in OF_SOME_RUNS] == [not overwrite] * 2
    assert all((tmp_path / other).exists() for other in [*OF_OTHERS, "config.yaml"])


def test_the_output_is_not_written_over_a_model_or_the_base_of_an_adapter(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    refuse_model_folders(tmp_path / "out", [str(adapter)])
    places = [
        (base, adapter),
        (adapter, adapter),
        *((tmp_path, tmp_path / part) for part in ("critic", "hf/step_1")),
    ]
    for output, model in places:
        with pytest.raises(UserError, match="would be written over a model that is read"):
            refuse_model_folders(output, [str(model)])


def left(output) -> list[str]:
    return sorted(path.name for path in output.glob("checkpoints/*"))


@pytest.fixture
def finished(tmp_path):
    """A folder with two checkpoints, and one that is set aside."""
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints/step_000001").rename(tmp_path / "checkpoints/step_000001.set_aside")
    return tmp_path


@pytest.mark.parametrize(
    ("models", "is_whole"),
    [
        ({"actor": "lm", "critic": "reward"}, True),
        ({"critic": "reward"}, False),
        ({".": "lm"}, True),
        ({"actor": "lm", "critic": "cut"}, False),
        ({"actor": "lm", "critic": "empty"}, False),
    ],
)
def test_checkpoints_go_once_every_saved_model_can_be_read(
    finished, assets, said, models, is_whole
):
    for place, content in models.items():
        folder = finished / place
        folder.mkdir(exist_ok=True)
        source = assets / ("reward" if content == "reward" else "lm")
        shutil.copy(source / "config.json", folder)
        if content != "empty":
            shutil.copy(source / "model.safetensors", folder)
        if content == "cut":
            os.truncate(
                folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1
            )
    assert remove_checkpoints(finished) is is_whole
    assert (
        "step_000001.set_aside" in left(finished)
        and ("step_000003" in left(finished)) is not is_whole
    )
    assert (
        "(--keep_final_checkpoint keeps" if is_whole else "checkpoints are kept, because"
    ) in said[-1]


def writer_of(*names):
    """Saves files of these names."""

    def save(folder):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)

    return save


def files(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_models_of_steps_are_kept_side_by_side_and_the_best_replaces_the_one_before(tmp_path):
    KeptModels(tmp_path, 1, True, writer_of("actor/a", "critic/b")).save_step(1)
    kept = KeptModels(tmp_path, 10, True, writer_of("actor/a"))
    assert [step for step in range(1, 21) if kept.is_due(step)] == [10, 20]
    kept.save_step(20)
    assert files(tmp_path) == [
        "hf/step_000001/actor/a",
        "hf/step_000001/critic/b",
        "hf/step_000020/actor/a",
    ]
    kept.save_step(1)  # again, after a resume from an earlier checkpoint
    KeptModels(tmp_path, 0, True, writer_of("old")).save_best()
    kept.save_best()
    assert files(tmp_path) == ["best/actor/a", "hf/step_000001/actor/a", "hf/step_000020/actor/a"]


def test_a_failure_keeps_the_folder_as_it_was_and_is_cleared_at_the_next_start(tmp_path):
    KeptModels(tmp_path, 1, True, writer_of("a")).save_best()

    def fail(folder):
        writer_of("b")(folder)
        raise NonFiniteError("a weight")

    kept = KeptModels(tmp_path, 1, True, fail)
    for save in (kept.save_best, lambda: kept.save_step(7)):
        with pytest.raises(NonFiniteError):
            save()
    assert files(tmp_path) == ["best.partial/b", "best/a", "hf/step_000007.partial/b"]
    # a folder that was being replaced gets its name back
    writer_of("c")(tmp_path / "hf/step_000001.old")
    writer_of("d")(tmp_path / "hf/step_000002.old")
    writer_of("e")(tmp_path / "hf/step_000002")
    (tmp_path / "hf/mine.partial").write_text("")  # not of a run
    clear_partials(tmp_path)
    assert files(tmp_path) == ["best/a", "hf/mine.partial", "hf/step_000001/c", "hf/step_000002/e"]
