"""When checkpoints are saved, and what they contain (engines and trainer are stand-ins); the random
streams."""

import hashlib
import operator
import os
import random
import threading
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import manifest_of

from dschat_ppo.checkpoint import manager
from dschat_ppo.checkpoint.identity import RunIdentity
from dschat_ppo.checkpoint.manager import (
    CheckpointManager,
    capture_rng_state,
    restore,
    restore_rng_state,
)
from dschat_ppo.checkpoint.state_files import load_state, save_state
from dschat_ppo.checkpoint.store import CheckpointFolder, Manifest, damage
from dschat_ppo.common import dist, stop_requests
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.run_flags import SafetyFlags
from dschat_ppo.errors import NonFiniteError, StopRequested, StorageError, UserError
from dschat_ppo.monitor.writers import MetricsWriter

IDENTITY = RunIdentity("ppo", {"seed": 7}, "f" * 64)
NEVER = SafetyFlags(save_minutes=0, save_total_limit=99)


class Trainer:
    """A `Resumable` whose engines are texts."""

    def __init__(self):
        self.position, self.is_best, self.loaded = (0, 0), False, None
        self.engines_to_save = {"actor": "A", "critic": "C"}

    def shared_state(self):
        return {"at": list(self.position)}

    def rank_state(self):
        return {"mine": 1}

    def load_state(self, shared, ranks):
        self.loaded = shared, ranks


class Run:
    """A checkpoint manager with its trainer, metrics and folder."""

    def __init__(self, output: Path, flags: SafetyFlags, saved: tuple[int, int] | None = None):
        self.folder, self.trainer = CheckpointFolder(output), Trainer()
        self.metrics = MetricsWriter(output, None)
        self.checkpoints = CheckpointManager(
            output, self.trainer, flags, IDENTITY, self.metrics, saved
        )

    def at(self, *position: int) -> list[str]:
        """Call `save_if_due` here, once all earlier files are on the disk; return the names of the
        checkpoints."""
        while not self.checkpoints._files.done():
            time.sleep(0.001)
        self.trainer.position = position
        self.checkpoints.save_if_due()
        return self.folder.names()

    def hold(self) -> threading.Event:
        """Delay the writing of files until the event is set, for three seconds at most."""
        gate = threading.Event()
        self.checkpoints._files._thread.submit(gate.wait, 3)
        return gate

    def manifest(self, name: str) -> Manifest:
        return Manifest.read(self.folder.root / name)


@pytest.fixture
def engines(monkeypatch):
    """Names of the engines that were saved, in order; each gives one file."""
    saved = []

    def save_engine(engine, folder, files):
        saved.append(engine)
        files.save({"weights": torch.full((3,), float(len(saved)))}, folder / "weights.pt")

    monkeypatch.setattr(manager, "save_engine", save_engine)
    monkeypatch.setattr(manager, "require_finite_weights", lambda role, engine: None)
    return saved


def test_checkpoints_are_saved_by_step_count_and_committed_at_a_later_call(tmp_path, engines):
    run = Run(tmp_path, SafetyFlags(save_steps=2, save_minutes=0, save_total_limit=99))
    assert run.at(1, 0) == run.at(1, 1) == run.at(1, 2) == run.at(2, 0) == []
    assert sorted(os.listdir(run.folder.root)) == ["step_000002.partial"]
    assert run.at(2, 0) == run.at(2, 1) == run.at(3, 0) == run.at(4, 0) == ["step_000002"]
    assert run.at(4, 2) == ["step_000002", "step_000004"]
    assert engines == ["A", "C"] * 2
    run = Run(
        tmp_path, SafetyFlags(save_steps=4, save_minutes=0, save_total_limit=99), saved=(4, 0)
    )
    assert run.at(4, 0) == run.at(4, 1) == ["step_000002", "step_000004"] and len(engines) == 4
    run = Run(tmp_path, NEVER)
    assert run.at(1, 0) == run.at(2, 0) == ["step_000002", "step_000004"] and len(engines) == 4


def test_checkpoints_are_saved_after_the_given_minutes(tmp_path, engines, monkeypatch):
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    monkeypatch.setattr(manager, "time", clock)
    run = Run(tmp_path, SafetyFlags(save_minutes=2, save_total_limit=99))
    at = ((119, (1, 1), 0), (121, (1, 2), 1), (240, (1, 3), 1), (242, (3, 0), 2), (243, (3, 1), 2))
    for now, position, saves in at:
        clock.now = 1000.0 + now
        run.at(*position)
        assert len(engines) == 2 * saves, now
    assert run.folder.names() == ["step_000001_update_0002", "step_000003"]


def test_training_does_not_wait_for_files_and_the_next_checkpoint_does(tmp_path, engines):
    run = Run(tmp_path, SafetyFlags(save_steps=1, save_minutes=0, save_total_limit=99))
    gate = run.hold()
    run.trainer.position = (1, 0)
    run.checkpoints.save_if_due()
    run.trainer.position = (1, 1)
    run.checkpoints.save_if_due()
    assert run.folder.names() == [] and not gate.is_set()
    threading.Timer(0.1, gate.set).start()
    run.trainer.position = (2, 0)
    run.checkpoints.save_if_due()  # waits for the first one
    assert gate.is_set() and run.folder.names() == ["step_000001"]
    run.checkpoints.finish()
    assert run.folder.names() == ["step_000001", "step_000002"]
    assert all(damage(run.folder.root / name) is None for name in run.folder.names())


def test_a_manifest_describes_the_state_at_the_time_of_the_save(tmp_path, engines):
    run = Run(tmp_path, SafetyFlags(save_steps=5, save_minutes=0))
    run.metrics.write(1, {"a": 1.0})
    length = (tmp_path / "metrics.jsonl").stat().st_size
    run.trainer.is_best = True
    run.at(5, 0)
    run.metrics.write(2, {"a": 1.0})
    run.trainer.is_best = False
    assert run.at(5, 3) == ["step_000005"]
    folder, manifest = run.folder.root / "step_000005", run.manifest("step_000005")
    assert (manifest.kind, manifest.step, manifest.update, manifest.world_size) == ("ppo", 5, 0, 1)
    assert (manifest.config, manifest.data, manifest.best) == ({"seed": 7}, "f" * 64, True)
    assert manifest.metrics_offset == length > 0
    assert manifest.versions["torch"] == version("torch") and "dschat_ppo" in manifest.versions
    assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "metrics.jsonl").read_bytes()[
        :length
    ]
    paths = ["actor/weights.pt", "critic/weights.pt", "metrics.jsonl", "rank_0.pt", "shared.pt"]
    assert sorted(manifest.files) == paths
    for path in paths:
        content = (folder / path).read_bytes()
        assert manifest.files[path] == {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    assert load_state(folder / "shared.pt") == {"at": [5, 0]}
    mine = load_state(folder / "rank_0.pt")
    assert mine["mine"] == 1 and torch.equal(mine["random"]["torch"], torch.get_rng_state())


def test_weights_that_are_not_finite_are_not_saved_and_the_earlier_checkpoint_is(
    tmp_path, engines, monkeypatch
):
    """The earlier checkpoint is still being written when the weights are checked."""

    def refuse(role, engine):
        if role == "critic":
            raise NonFiniteError(f"{role}: {engine}")

    run = Run(tmp_path, SafetyFlags(save_steps=1, save_minutes=0))
    gate = run.hold()
    run.trainer.position = (1, 0)
    run.checkpoints.save_if_due()
    monkeypatch.setattr(manager, "require_finite_weights", refuse)
    run.trainer.position = (2, 0)
    threading.Timer(0.1, gate.set).start()
    with pytest.raises(NonFiniteError, match="critic: C"):
        run.checkpoints.save_if_due()
    monkeypatch.setattr(stop_requests, "requested", lambda: True)
    # not at a stop and not at the end either
    for end in (run.checkpoints.save_if_due, run.checkpoints.finish):
        with pytest.raises(NonFiniteError):
            end()
    assert sorted(path.name for path in run.folder.root.iterdir()) == ["latest", "step_000001"]
    assert run.folder.newest_intact() == ("step_000001", []) and engines == ["A", "C"]


@pytest.mark.parametrize("what", ["folders", "engine", "commit"])
def test_an_error_of_the_disk_is_reported_and_leaves_no_checkpoint(
    tmp_path, engines, monkeypatch, what
):
    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    run = Run(tmp_path, NEVER)
    if what == "folders":
        (tmp_path / "checkpoints").write_text("in the way")
    elif what == "engine":
        monkeypatch.setattr(
            manager, "save_engine", lambda engine, folder, files: files.save({}, folder / "no/file")
        )
    else:
        monkeypatch.setattr(CheckpointFolder, "commit", refuse)
    run.trainer.position, run.trainer.is_best = (2, 0), True
    with pytest.raises(StorageError, match="cannot be written"):
        run.checkpoints.finish()
    assert run.folder.names() == []


@pytest.mark.parametrize(
    ("other", "ends"),
    [([1, 0, 0], True), ([0, 1, 0], False), ([0, 0, 1], False), ([0, 0, 0], False)],
)
def test_the_ranks_stop_save_and_wait_together(tmp_path, engines, monkeypatch, other, ends):
    """Another rank has a stop request, or a checkpoint is due there, or its files are not written
    yet."""
    run = Run(tmp_path, SafetyFlags(save_steps=4, save_minutes=0))
    run.at(4, 0)
    assert len(engines) == 2
    theirs = torch.tensor(other, dtype=torch.int32)
    monkeypatch.setattr(
        dist,
        "all_reduce",
        lambda mine, op="sum": (torch.maximum if op == "max" else torch.minimum)(mine, theirs),
    )
    if other[0]:
        with pytest.raises(StopRequested):
            run.at(4, 1)
    else:
        assert run.at(4, 1) == ([] if other[2] else ["step_000004"])
    assert len(engines) == (4 if other[0] or other[1] else 2)


def saved_on(folder, ranks: int):
    """A checkpoint of this many ranks; rank r has drawn r numbers."""
    torch.manual_seed(5)
    save_state(folder / "shared.pt", {"steps": 12})
    for rank in range(ranks):
        save_state(folder / f"rank_{rank}.pt", {"random": capture_rng_state(), "mine": rank})
        torch.rand(())
    manifest_of(folder, world_size=ranks).write(folder)
    return folder


@pytest.mark.parametrize(("saved_by", "ranks", "rank"), [(2, 2, 1), (2, 1, 0), (2, 3, 2)])
def test_a_checkpoint_is_restored_on_any_number_of_ranks(
    tmp_path, monkeypatch, said, saved_by, ranks, rank
):
    """Only with as many ranks as saved, a rank has its own state and random stream."""
    folder, trainer, loads, seeds = saved_on(tmp_path, saved_by), Trainer(), [], []
    (folder / "actor").mkdir()
    monkeypatch.setattr(
        manager, "load_engine", lambda engine, folder: loads.append((engine, folder.name))
    )
    monkeypatch.setattr(manager, "seed_this_rank", seeds.append)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    torch.manual_seed(5)
    expected = torch.rand(rank + 1)[-1]
    manifest = restore(folder, trainer, seed=100)
    assert (manifest.step, loads) == (12, [("A", "actor")])
    assert (
        "critic: was not trained when the checkpoint was saved, so it starts from scratch" in said
    )
    shared, states = trainer.loaded
    assert shared == {"steps": 12} and [state["mine"] for state in states.read_all()] == list(
        range(saved_by)
    )
    if saved_by == ranks:
        assert states.this_rank["mine"] == rank and torch.rand(()) == expected and seeds == []
    else:
        assert states.this_rank is None and seeds == [112]
    (folder / f"rank_{saved_by - 1}.pt").unlink()
    with pytest.raises(UserError, match=f"rank_{saved_by - 1}.pt"):
        list(states.read_all())


def drawn(device: str) -> list:
    """Numbers of every stream; an odd number of normal ones, which Python and numpy draw in
    pairs."""
    normal = (
        [random.gauss(0, 1) for _ in range(3)],
        np.random.randn(3).tolist(),
        torch.randn(3, device=device).tolist(),
    )
    uniform = (
        [random.random() for _ in range(700)],
        np.random.rand(700).tolist(),
        torch.rand(700).tolist(),
    )
    return [*normal, *uniform, torch.nn.functional.dropout(torch.ones(100, device=device)).tolist()]


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_draws_after_restoring_are_those_after_capturing(tmp_path, device):
    seed_everything(1)
    drawn(device)
    save_state(tmp_path / "rank_0.pt", capture_rng_state())
    expected = drawn(device)
    seed_everything(2)
    assert not any(map(operator.eq, drawn(device), expected))
    restore_rng_state(load_state(tmp_path / "rank_0.pt"))
    assert drawn(device) == expected
