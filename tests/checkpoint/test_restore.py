"""What a trainer is given when a checkpoint is put back; the trainer is a stand-in without engines."""

import pytest
import torch
from checkpoints import manifest_of

from dschat_ppo.checkpoint.manager import restore
from dschat_ppo.checkpoint.rng_state import random_state
from dschat_ppo.checkpoint.state_file import save_state
from dschat_ppo.errors import UserError


class Trainer:
    """A `Resumable` that keeps what it is given."""

    engines_to_save = {}

    def load_state(self, shared, ranks):
        self.shared, self.ranks = shared, ranks


def saved_on(folder, ranks: int):
    """A checkpoint of this many ranks; rank r has drawn r numbers."""
    torch.manual_seed(5)
    save_state(folder / "shared.pt", {"steps": 12})
    for rank in range(ranks):
        save_state(folder / f"rank_{rank}.pt", {"random": random_state(), "mine": rank})
        torch.rand(())
    manifest_of(folder, world_size=ranks).write(folder)
    return folder


def on_rank(monkeypatch, rank: int, ranks: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))


def test_on_as_many_ranks_no_other_ranks_file_is_read_unless_asked_for(tmp_path, monkeypatch):
    folder, trainer = saved_on(tmp_path, 2), Trainer()
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


def test_an_engine_that_was_not_trained_before_begins_anew(tmp_path, monkeypatch, capsys):
    trainer = Trainer()
    trainer.engines_to_save = {"critic": None}  # which nothing may be loaded into
    restore(saved_on(tmp_path, 1), trainer, seed=7)
    assert "critic: was not trained when the checkpoint was saved, so it begins anew" in capsys.readouterr().out
    assert trainer.shared == {"steps": 12}


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_another_number_of_ranks_nothing_is_its_own(ranks, tmp_path, monkeypatch):
    folder, trainer = saved_on(tmp_path, 2), Trainer()
    on_rank(monkeypatch, 0, ranks)
    restore(folder, trainer, seed=7)
    assert trainer.ranks.own is None
    assert [state["mine"] for state in trainer.ranks.read_all()] == [0, 1]
