"""Checkpoints on the disk: they appear complete, whatever ends the process; damage is found; old
ones are removed; from which one a run resumes."""

import json
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from checkpoints import CONTENT, fill, flip, identity_of, manifest_of, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat_ppo.checkpoint.identity import find_checkpoint
from dschat_ppo.checkpoint.store import CheckpointFolder, Manifest, checkpoint_name, damage
from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.errors import StorageError, UserError


@pytest.fixture
def saved(tmp_path):
    return fill(tmp_path / "step_000012_update_0003")


def rewrite(saved, **changes):
    content = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**content, **changes}))


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    config = {"é": "\ud800", "list": [1.0, -0.0, 1e-300], "inf": float("inf"), "": None}
    fill(tmp_path)
    (tmp_path / "manifest.json").unlink()
    written = manifest_of(tmp_path, best=True, kind="sft", config=config)
    written.write(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(dict(reversed(content.items())), indent=7))
    (tmp_path / "notes.txt").write_text("mine")
    assert Manifest.read(tmp_path) == written and damage(tmp_path) is None
    assert written.files["actor/weights.pt"]["bytes"] == 4096


def flip_bit(path, position=0):
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (
        lambda f: os.truncate(f / "manifest.json", 100),
        "manifest.json is damaged",
    ),
    "an older format": (
        lambda f: rewrite(f, format=1, versions={"dschat_ppo": "0.1"}, saved_at="2026-01-02"),
        (
            "is of format 1, and this installation reads format 2: finish or export that run with"
            " the one that saved it (dschat_ppo 0.1, at 2026-01-02)"
        ),
    ),
    "other settings": (lambda f: rewrite(f, step=13), "manifest.json: checksum differs"),
    "a pipe": (
        lambda f: ((f / "rank_0.pt").unlink(), os.mkfifo(f / "rank_0.pt")),
        "rank_0.pt is missing",
    ),
    "a missing rank": (lambda f: (f / "rank_1.pt").unlink(), "rank_1.pt is missing"),
    "a cut file": (
        lambda f: os.truncate(f / "actor/weights.pt", 12),
        "weights.pt has 12 bytes instead of 4096",
    ),
    "a flipped bit": (lambda f: flip_bit(f / "rank_1.pt", 5), "rank_1.pt: checksum differs"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_names_file_and_fault(saved, case):
    spoil, expected = DAMAGE[case]
    spoil(saved)
    found = damage(saved)
    assert found is not None and expected in found


def save(folder: CheckpointFolder, step: int, update: int = 0, **changes) -> str:
    name = checkpoint_name(step, update)
    fill(folder.make_partial(name), step=step, update=update, **changes)
    folder.commit(name)
    return name


def entries(folder: CheckpointFolder) -> list[str]:
    return sorted(os.listdir(folder.root))


def cut(folder: CheckpointFolder, name: str) -> None:
    os.truncate(folder.root / name / "actor/weights.pt", 12)


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "output")


def test_names_are_in_the_order_of_steps_and_updates(folder):
    assert folder.names() == []
    for step, update in (
        (10, 0),
        (9, 12),
        (1_000_000, 0),
        (9, 2),
        (999_999, 0),
        (9, 0),
        (9, 10_000),
        (9, 9999),
    ):
        save(folder, step, update)
    (folder.root / "step_000003.partial").mkdir()
    (folder.root / "step_000005").write_text("a file")
    (folder.root / "notes").mkdir()
    assert folder.names() == [
        "step_000009",
        "step_000009_update_0002",
        "step_000009_update_0012",
        "step_000009_update_9999",
        "step_000009_update_10000",
        "step_000010",
        "step_999999",
        "step_1000000",
    ]


def test_a_committed_checkpoint_is_the_newest_and_latest(folder):
    assert folder.newest_intact() == (None, [])
    save(folder, 4)
    save(folder, 8)
    assert folder.newest_intact() == ("step_000008", [])
    assert (folder.root / "latest").read_text() == "step_000008"
    assert entries(folder) == ["latest", "step_000004", "step_000008"]
    assert Manifest.read(folder.root / "step_000004").step == 4


def test_an_incomplete_checkpoint_is_not_committed(folder):
    path = fill(folder.make_partial("step_000004"))
    (path / "rank_1.pt").unlink()
    with pytest.raises(
        StorageError, match="step_000004.* was not saved whole: rank_1.pt is missing"
    ):
        folder.commit("step_000004")
    assert entries(folder) == ["step_000004.partial"]


def test_a_commit_sets_another_checkpoint_of_its_name_aside(folder):
    save(folder, 4)
    save(folder, 8)
    cut(folder, "step_000008")
    save(folder, 8, metrics_offset=77)
    assert Manifest.read(folder.root / "step_000008").metrics_offset == 77
    assert folder.newest_intact() == ("step_000008", [])
    assert entries(folder) == ["latest", "step_000004", "step_000008", "step_000008.set_aside"]


def test_checkpoints_that_were_set_aside_or_moved_away_are_not_as_if_none_was_saved(folder):
    assert folder.newest_intact() == (None, [])
    save(folder, 4)
    (folder.root / "step_000004").rename(folder.root / "step_000004.set_aside")
    newest, [complaint] = folder.newest_intact()
    assert (
        newest is None
        and "are gone (set aside: step_000004.set_aside; name one by --resume)" in complaint
    )
    (folder.root / "step_000004.set_aside").rename(folder.root.parent / "elsewhere")
    assert folder.newest_intact()[1][0].endswith("the checkpoints that were saved there are gone")
    save(folder, 4)
    folder.remove_all()
    assert folder.newest_intact() == (None, [])


def test_pruning_keeps_the_newest_and_the_best(folder):
    for step in (1, 2, 3, 4, 5, 6):
        save(folder, step, best=step < 3)
    assert folder.best() == "step_000002"
    assert folder.prune(2, protect={"step_000003", "nothing"}) == ["step_000001", "step_000004"]
    assert folder.names() == ["step_000002", "step_000003", "step_000005", "step_000006"]
    assert folder.prune(1) == ["step_000003", "step_000005"]
    assert entries(folder) == ["latest", "step_000002", "step_000006"]
    assert folder.prune(1) == []


def test_damaged_checkpoints_do_not_count_and_nothing_is_removed_while_the_newest_is_damaged(
    folder,
):
    for step in (1, 2, 3, 4):
        save(folder, step)
    cut(folder, "step_000004")
    assert folder.prune(1) == [] and len(folder.names()) == 4
    save(folder, 5)
    assert folder.prune(5) == []  # four are whole
    assert folder.prune(2) == ["step_000001", "step_000002"]
    assert folder.names() == ["step_000003", "step_000004", "step_000005"]


class Crash(BaseException):
    """The process has ended: no further code runs, not even the clean-up after an OSError."""


class CrashingDisk:
    """Ends the process before its n-th call to the file system."""

    CALLS = (
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (os, "unlink"),
        (os, "rmdir"),
        (os, "mkdir"),
    )

    def __init__(self, monkeypatch, crash_at: int):
        self.count = 0
        for module, name in self.CALLS:
            monkeypatch.setattr(module, name, self.counted(getattr(module, name), crash_at))

    def counted(self, call, crash_at):
        def counting(*arguments, **named):
            self.count += 1
            if self.count == crash_at:
                raise Crash
            return call(*arguments, **named)

        return counting


def crash_everywhere(monkeypatch, tmp_path, prepare, act, check) -> int:
    """Let `act` crash before each of its calls in turn, restart, and `check`; return the number of
    calls."""
    for crash_at in range(1, 1000):
        folder = CheckpointFolder(tmp_path / f"crash_{crash_at}")
        prepare(folder)
        with monkeypatch.context() as patched:
            disk = CrashingDisk(patched, crash_at)
            with suppress(Crash):
                act(folder)
        restarted = CheckpointFolder(tmp_path / f"crash_{crash_at}")
        restarted.clear_partials()
        check(restarted)
        if disk.count < crash_at:
            return disk.count
    raise AssertionError("it never ended")


def test_a_crash_at_any_point_of_a_save_leaves_the_old_or_the_new_checkpoint(monkeypatch, tmp_path):
    found = []

    def prepare(folder):
        save(folder, 1)
        fill(folder.make_partial("step_000002"))

    def check(folder):
        newest, complaints = folder.newest_intact()
        found.append((newest, bool(complaints), set(entries(folder))))

    calls = crash_everywhere(
        monkeypatch, tmp_path, prepare, lambda folder: folder.commit("step_000002"), check
    )
    old, new = {"latest", "step_000001"}, {"latest", "step_000001", "step_000002"}
    assert {state for state, *_ in found} == {"step_000001", "step_000002"}
    assert all(names == (new if newest == "step_000002" else old) for newest, _, names in found)
    assert calls > 10 and found[0][0] == "step_000001" and found[-1] == ("step_000002", False, new)
    states = [newest for newest, *_ in found]
    assert states == sorted(states), "once it exists, it stays"


def test_a_crash_at_any_point_of_pruning_leaves_intact_checkpoints(monkeypatch, tmp_path):
    def prepare(folder):
        for step in (1, 2, 3):
            save(folder, step)

    def check(folder):
        assert folder.newest_intact() == ("step_000003", [])
        assert all(damage(folder.root / name) is None for name in folder.names())
        assert set(entries(folder)) == {"latest", *folder.names()}

    assert (
        crash_everywhere(monkeypatch, tmp_path, prepare, lambda folder: folder.prune(1), check) > 6
    )


FILES = [*CONTENT, "manifest.json"]
OPERATIONS = st.one_of(
    st.tuples(st.just("save"), st.booleans()),
    st.tuples(st.just("prune"), st.integers(1, 3)),
    st.tuples(st.just("cut"), st.integers(0, 3), st.sampled_from(FILES)),  # which from the newest
    st.tuples(st.just("lose"), st.integers(0, 3), st.sampled_from(FILES)),
    st.tuples(st.just("flip"), st.integers(0, 3), st.sampled_from(sorted(CONTENT))),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATIONS, max_size=14))
def test_the_newest_intact_checkpoint_is_found_and_never_removed(operations):
    """Against lists of what is there: `flipped` is found by checksums alone, `spoilt` by sizes
    too."""
    with tempfile.TemporaryDirectory() as place, patch.object(os, "fsync", lambda number: None):
        folder, there, saved = CheckpointFolder(Path(place)), [], 0
        best, spoilt, flipped, unknown = set(), set(), set(), set()
        for kind, *arguments in operations:
            if kind == "save":
                saved += 1
                there.append(save(folder, saved // 3, saved % 3, best=arguments[0]))
                best |= {there[-1]} if arguments[0] else set()
            elif kind == "prune":
                newest = [name for name in there if name not in spoilt][-arguments[0] :]
                removed = folder.prune(arguments[0])
                assert not removed or (there[-1] in newest and len(newest) == arguments[0])
                assert not {*newest, max(best - unknown, default="")} & set(removed)
                there = [name for name in there if name not in removed]
                assert folder.names() == there
            elif arguments[0] < len(there):
                name, file = there[-1 - arguments[0]], arguments[1]
                path = folder.root / name / file
                if path.exists() and kind == "flip" and name not in flipped:  # twice would mend it
                    flip_bit(path)
                    flipped.add(name)
                elif path.exists() and kind != "flip":
                    os.truncate(path, 1) if kind == "cut" else path.unlink()
                    spoilt.add(name)
                    unknown |= {name} if file == "manifest.json" else set()
            intact = [name for name in there if name not in spoilt | flipped]
            assert folder.newest_intact()[0] == (intact[-1] if intact else None)


def test_a_run_resumes_from_the_newest_intact_checkpoint_and_reports_damage(tmp_path, capsys):
    first, second = save_checkpoint(tmp_path, 1), save_checkpoint(tmp_path, 2, 3)
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path)) == second
    assert capsys.readouterr().out == ""
    flip(second / "shared.pt")
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path)) == first
    assert "step_000002_update_0003: shared.pt: checksum differs" in capsys.readouterr().out
    assert second.with_name(f"{second.name}.set_aside").exists(), "else it would remain the newest"
    flip(first / "shared.pt")
    with pytest.raises(
        UserError, match="no intact checkpoint.*checksum differs.*--overwrite_output_dir"
    ):
        find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path))
    for folder, why in (
        (first, "shared.pt: checksum differs"),
        (tmp_path / "none", "there is no such folder"),
    ):
        with pytest.raises(UserError, match=f"^--resume .*{why}"):
            find_checkpoint(tmp_path, SafetyFlags(resume=str(folder)), identity_of(tmp_path))
    assert find_checkpoint(tmp_path, SafetyFlags(resume="never"), identity_of(tmp_path)) is None
    assert find_checkpoint(tmp_path / "empty", SafetyFlags(), identity_of(tmp_path)) is None


def test_overwrite_restarts_a_finished_run_and_resumes_an_interrupted_one(tmp_path, capsys):
    saved = save_checkpoint(tmp_path, 1)
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path), overwrite=True) == saved
    (tmp_path / "result.json").write_text("{}")
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path), overwrite=True) is None
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path)) == saved, (
        "or forced to be longer"
    )
    assert (
        find_checkpoint(
            tmp_path, SafetyFlags(resume=str(saved)), identity_of(tmp_path), overwrite=True
        )
        == saved
    )
    (tmp_path / "result.json").unlink()
    assert (
        find_checkpoint(
            tmp_path, SafetyFlags(), identity_of(tmp_path, "--seed", "5"), overwrite=True
        )
        is None
    )
    assert (
        "because of --overwrite_output_dir" in (said := capsys.readouterr().out)
        and "  --seed: 1234 -> 5" in said
    )
    with pytest.raises(UserError, match="--seed"):
        find_checkpoint(
            tmp_path,
            SafetyFlags(resume=str(saved)),
            identity_of(tmp_path, "--seed", "5"),
            overwrite=True,
        )
    flip(saved / "shared.pt")
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path), overwrite=True) is None


def test_later_checkpoints_than_the_named_one_are_set_aside(tmp_path):
    first, second, third = (
        save_checkpoint(tmp_path, 1),
        save_checkpoint(tmp_path, 1, 2),
        save_checkpoint(tmp_path, 4),
    )
    assert (
        find_checkpoint(tmp_path, SafetyFlags(resume=str(second)), identity_of(tmp_path)) == second
    )
    assert first.exists() and not third.exists()
    assert third.with_name("step_000004.set_aside").exists()
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path)) == second
    save_checkpoint(tmp_path, 4)
    assert (
        find_checkpoint(tmp_path, SafetyFlags(resume=str(second)), identity_of(tmp_path)) == second
    )
    assert not third.exists() and third.with_name("step_000004.set_aside1").exists(), (
        "a second time too"
    )
    set_aside = third.with_name("step_000004.set_aside")
    fourth = save_checkpoint(tmp_path, 5)
    assert (
        find_checkpoint(tmp_path, SafetyFlags(resume=str(set_aside)), identity_of(tmp_path))
        == set_aside
    )
    assert set_aside.exists() and not fourth.exists()


def test_a_run_cannot_resume_inside_a_ppo_step_with_updates_of_another_size(tmp_path):
    between, inside = save_checkpoint(tmp_path, 1), save_checkpoint(tmp_path, 1, 2)
    force = SafetyFlags(resume_force=True)
    other = identity_of(tmp_path)
    other = replace(other, config=other.config | {"rows_per_update": 4})
    with pytest.raises(
        UserError, match="step_000001_update_0002 was saved inside .* 8 rows each, not 4"
    ):
        find_checkpoint(tmp_path, force, other)
    assert find_checkpoint(tmp_path, replace(force, resume=str(between)), other) == between
    assert not inside.exists()


@pytest.mark.parametrize("length", [["--num_train_epochs", "2"], ["--max_steps", "7"]])
@pytest.mark.parametrize(
    ("rates", "matters"),
    [
        ("--lr_scheduler_type cosine", True),
        ("--lr_scheduler_type constant_with_warmup", False),
        ("--lr_scheduler_type constant_with_warmup --warmup_ratio 0.1", True),
    ],
)
def test_the_length_matters_where_a_learning_rate_depends_on_it(tmp_path, length, rates, matters):
    saved = save_checkpoint(tmp_path, 1)
    config = identity_of(tmp_path, *rates.split()).config
    replace(Manifest.read(saved), config=config).write(saved)
    if not matters:
        assert (
            find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path, *rates.split(), *length))
            == saved
        )
    with pytest.raises(UserError, match=f"  {length[0]}: "):  # both schedules must ignore it
        now = rates.split() if matters else ["--lr_scheduler_type", "linear"]
        find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path, *now, *length))


def test_a_resumed_run_may_have_more_patience(tmp_path):
    saved = save_checkpoint(tmp_path, 1)
    patient = identity_of(tmp_path, "--early_stop_patience", "5", "--early_stop_min_delta", "0.1")
    assert find_checkpoint(tmp_path, SafetyFlags(), patient) == saved


def test_a_link_names_the_same_checkpoint_and_a_copy_another(tmp_path):
    output, link = tmp_path / "output", tmp_path / "link"
    link.symlink_to(output)
    saved, later = save_checkpoint(output, 1), save_checkpoint(output, 2)
    copy = saved.with_name("kept")
    shutil.copytree(saved, copy)
    assert find_checkpoint(output, SafetyFlags(resume=str(copy)), identity_of(output)) == copy
    assert saved.exists() and not later.exists()
    assert find_checkpoint(output, SafetyFlags(), identity_of(output)) == saved, (
        "what is at the same place stays"
    )
    later = save_checkpoint(output, 2)
    named = SafetyFlags(resume=str(link / "checkpoints/step_000001"))
    assert find_checkpoint(output, named, identity_of(output)).samefile(saved)
    assert not later.exists()


def test_settings_that_change_the_result_are_refused_unless_forced(tmp_path, capsys):
    saved = save_checkpoint(tmp_path, 1)
    assert find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path)) == saved
    assert capsys.readouterr().out == ""
    assert (
        find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path, "--zero_stage", "3"))
        == saved
    )
    assert capsys.readouterr().out == ""
    with pytest.raises(
        UserError, match="step_000001 was saved under .*What changed:\n  --seed: 1234 -> 5$"
    ):
        find_checkpoint(tmp_path, SafetyFlags(), identity_of(tmp_path, "--seed", "5"))
    assert (
        find_checkpoint(
            tmp_path, SafetyFlags(resume_force=True), identity_of(tmp_path, "--seed", "5")
        )
        == saved
    )
    assert "since step_000001 was saved:\n  --seed: 1234 -> 5\n" in capsys.readouterr().out
    with pytest.raises(
        UserError, match=r"something else; .*:\n  training rows .*: a+ -> b+\n  --seed"
    ):
        find_checkpoint(
            tmp_path, SafetyFlags(), identity_of(tmp_path, "--seed", "5", data="b" * 64)
        )
    with pytest.raises(UserError, match="of the step 'sft', not of 'ppo'"):
        find_checkpoint(tmp_path, SafetyFlags(), replace(identity_of(tmp_path), kind="ppo"))
