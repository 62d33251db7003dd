"""A crash at any point of a save, a replacement or a removal leaves an intact checkpoint."""

import os
from contextlib import suppress

from checkpoints import fill
from test_folder import entries, save

from dschat_ppo.checkpoint.folder import CheckpointFolder
from dschat_ppo.checkpoint.manifest import Manifest, damage


class Crash(BaseException):
    """The process has ended: no further code runs, not even the clean-up after an OSError."""


class CrashingDisk:
    """Ends the process before its n-th call to the file system."""

    CALLS = ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"))

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
    """Let `act` crash before each of its calls in turn, restart, and `check`; return the number of calls."""
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
        fill(folder.partial("step_000002"))

    def check(folder):
        newest, complaints = folder.newest_intact()
        found.append((newest, bool(complaints), set(entries(folder))))

    calls = crash_everywhere(monkeypatch, tmp_path, prepare, lambda folder: folder.commit("step_000002"), check)
    old, new = {"latest", "step_000001"}, {"latest", "step_000001", "step_000002"}
    assert {state for state, *_ in found} == {"step_000001", "step_000002"}
    assert all(names == (new if newest == "step_000002" else old) for newest, _, names in found)
    assert calls > 10 and found[0][0] == "step_000001" and found[-1] == ("step_000002", False, new)
    states = [newest for newest, *_ in found]
    assert states == sorted(states), "once it exists, it stays"


def test_a_crash_at_any_point_of_replacing_the_only_checkpoint_leaves_one(monkeypatch, tmp_path):
    found = []

    def prepare(folder):
        save(folder, 1, metrics_offset=1)
        fill(folder.partial("step_000001"), step=1, metrics_offset=2)

    def check(folder):
        newest, _ = folder.newest_intact()
        assert newest == "step_000001"
        assert entries(folder) == ["latest", "step_000001"]
        found.append(Manifest.read(folder.root / newest).metrics_offset)

    crash_everywhere(monkeypatch, tmp_path, prepare, lambda folder: folder.commit("step_000001"), check)
    assert set(found) == {1, 2}
    assert found == sorted(found)


def test_a_crash_at_any_point_of_pruning_leaves_intact_checkpoints(monkeypatch, tmp_path):
    def prepare(folder):
        for step in (1, 2, 3):
            save(folder, step)

    def check(folder):
        assert folder.newest_intact() == ("step_000003", [])
        assert all(damage(folder.root / name) is None for name in folder.names())
        assert set(entries(folder)) == {"latest", *folder.names()}

    assert crash_everywhere(monkeypatch, tmp_path, prepare, lambda folder: folder.prune(1), check) > 6
