"""Restoring a checkpoint into a trainer; engines and trainer are stand-ins."""

from dataclasses import replace

import pytest
import torch
from checkpoints import manifest_of
from test_manager import Trainer

from dschat_ppo.checkpoint import manager
from dschat_ppo.checkpoint.manager import capture_rng_state, restore
from dschat_ppo.checkpoint.state_files import save_state
from dschat_ppo.checkpoint.store import Manifest
from dschat_ppo.common import dist
from dschat_ppo.errors import UserError


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of two ranks at step 6; and one of one rank."""
    folders = []
    for ranks in (2, 1):
        folder = tmp_path / f"of_{ranks}"
        for role in ("actor", "critic"):
            (folder / role).mkdir(parents=True)
        torch.manual_seed(ranks)
        for rank in range(ranks):
            save_state(folder / f"rank_{rank}.pt", {"random": capture_rng_state(), "rank": rank})
            torch.rand(1)
        save_state(folder / "shared.pt", {"shared": ranks})
        manifest_of(folder, step=6, update=1, world_size=ranks).write(folder)
        folders.append(folder)
    return folders


@pytest.fixture
def loads(monkeypatch):
    """What was loaded into which engine: (engine, folder's name)."""
    done = []
    monkeypatch.setattr(manager, "load_engine", lambda engine, folder: done.append((engine, folder.name)))
    return done


def test_each_engine_loads_its_states_and_the_trainer_those_of_all_ranks(saved, loads):
    trainer = Trainer()
    trainer.engines_to_save = {"actor": "A", "critic": "C"}
    manifest = restore(saved[0], trainer, seed=100)
    assert (manifest.step, manifest.update, manifest.world_size) == (6, 1, 2)
    assert loads == [("A", "actor"), ("C", "critic")]
    shared, ranks = trainer.loaded
    assert shared == {"shared": 2} and [rank["rank"] for rank in ranks.read_all()] == [0, 1]


def test_random_streams_are_restored_on_as_many_ranks_and_seeded_on_others(saved, loads, monkeypatch):
    trainer, seeds = Trainer(), []
    trainer.engines_to_save = {}
    monkeypatch.setattr(manager, "seed_this_rank", seeds.append)
    torch.manual_seed(1)
    expected = torch.rand(3)
    restore(saved[1], trainer, seed=100)
    assert torch.equal(torch.rand(3), expected) and seeds == []
    torch.manual_seed(9)
    restore(saved[0], trainer, seed=100)
    assert seeds == [106]
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    monkeypatch.setattr(dist, "rank", lambda: 1)
    torch.manual_seed(2)
    torch.rand(1)
    expected = torch.rand(3)
    restore(saved[0], trainer, seed=100)
    assert torch.equal(torch.rand(3), expected) and seeds == [106]


class StateTrainer:
    """A `Resumable` that keeps what it is given."""

    engines_to_save = {}

    def load_state(self, shared, ranks):
        self.shared, self.ranks = shared, ranks


def saved_on(folder, ranks: int):
    """A checkpoint of this many ranks; rank r has drawn r numbers."""
    torch.manual_seed(5)
    save_state(folder / "shared.pt", {"steps": 12})
    for rank in range(ranks):
        save_state(folder / f"rank_{rank}.pt", {"random": capture_rng_state(), "mine": rank})
        torch.rand(())
    manifest_of(folder, world_size=ranks).write(folder)
    return folder


def on_rank(monkeypatch, rank: int, ranks: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))


def test_on_as_many_ranks_the_files_of_other_ranks_are_read_only_on_request(tmp_path, monkeypatch):
    folder, trainer = saved_on(tmp_path, 2), StateTrainer()
    (folder / "rank_0.pt").unlink()
    on_rank(monkeypatch, 1, 2)
    restore(folder, trainer, seed=7)
    assert trainer.shared == {"steps": 12} and trainer.ranks.own["mine"] == 1
    torch.manual_seed(5)
    expected = torch.rand(2)[1]
    restore(folder, trainer, seed=7)
    assert torch.rand(()) == expected, "its own random stream"
    with pytest.raises(UserError, match="rank_0.pt"):
        next(trainer.ranks.read_all())


def test_an_engine_that_was_not_trained_before_starts_from_scratch(tmp_path, monkeypatch, capsys):
    trainer = StateTrainer()
    trainer.engines_to_save = {"critic": None}  # which nothing may be loaded into
    restore(saved_on(tmp_path, 1), trainer, seed=7)
    assert "critic: was not trained when the checkpoint was saved, so it starts from scratch" in capsys.readouterr().out
    assert trainer.shared == {"steps": 12}


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_another_number_of_ranks_no_rank_has_its_own_state(ranks, tmp_path, monkeypatch):
    folder, trainer = saved_on(tmp_path, 2), StateTrainer()
    on_rank(monkeypatch, 0, ranks)
    restore(folder, trainer, seed=7)
    assert trainer.ranks.own is None
    assert [state["mine"] for state in trainer.ranks.read_all()] == [0, 1]


def test_changed_versions_are_logged_in_one_line(tmp_path, monkeypatch, capsys):
    folder = saved_on(tmp_path, 1)
    manifest = Manifest.read(folder)
    replace(manifest, versions={"torch": "2.1", "deepspeed": "0.19"}).write(folder)
    monkeypatch.setattr(manager, "package_versions", lambda: {"torch": "2.13", "deepspeed": "0.19", "new": "1"})
    restore(folder, StateTrainer(), seed=7)
    assert capsys.readouterr().out.endswith("was saved: torch 2.1 -> 2.13, new None -> 1\n")
    replace(manifest, versions={"torch": "2.13", "deepspeed": "0.19", "new": "1"}).write(folder)
    restore(folder, StateTrainer(), seed=7)
    assert capsys.readouterr().out == ""
