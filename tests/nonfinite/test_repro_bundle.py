"""Repro bundles: written, read back, bounded in number, refused if damaged."""

import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_experience import experience, ppo_bundles, with_bad

from dschat_ppo.engine.optimizer_step import Fault
from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.models.backbone import Layout
from dschat_ppo.nonfinite.repro_bundle import read_bundle

NAN, INF = math.nan, math.inf
FAULT = Fault("loss", 0, 1, [[0.5, NAN, 2.0]], [torch.get_rng_state()])


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    monkeypatch.setattr("dschat_ppo.nonfinite.repro_bundle.save_model", lambda *_: None)


def write(bundles, step=1, records=(), **constants) -> Path:
    engine = SimpleNamespace(module=SimpleNamespace(layout=Layout(packed=True)), fp16_enabled=lambda: False)
    return bundles.write("actor", step, FAULT, engine, list(records), constants)


def test_a_bundle_round_trips(tmp_path):
    rows = experience(advantages=with_bad(NAN, (0, 1)))
    folder = write(ppo_bundles(tmp_path), 12, [rows, rows], x=INF)
    assert folder == tmp_path / "nonfinite/step_000012_rank_0"
    what, records = read_bundle(folder)
    assert (what["step"], what["rank"], what["role"], what["constants"]) == (12, 0, "actor", {"x": INF})
    assert (what["fault"]["kind"], what["fault"]["micro_batch"], what["layout"]["packed"]) == ("loss", 1, True)
    assert len(records) == 2
    for name, value in vars(rows).items():
        if value is None:
            assert getattr(records[1], name) is None
        else:
            assert torch.equal(value.nan_to_num(7.5), getattr(records[1], name).nan_to_num(7.5)), name
    assert torch.equal(what["random_state"][0], FAULT.random_state[0])


def test_the_newest_bundles_are_kept(tmp_path):
    bundles = ppo_bundles(tmp_path, "--max_nonfinite_skips", "2")
    names = [write(bundles, step).name for step in (3, 3, 4, 5)]
    assert names == ["step_000003_rank_0", "step_000003_rank_0_2", "step_000004_rank_0", "step_000005_rank_0"]
    assert sorted(path.name for path in (tmp_path / "nonfinite").iterdir()) == names[1:]


@pytest.mark.parametrize("part", ["save_model", "save_state"])
def test_a_bundle_that_cannot_be_saved_is_one_error(tmp_path, monkeypatch, part):
    def full(*_):
        if part == "save_state":
            raise OSError(28, "no space left on device")
        raise StorageError("model.safetensors: no space left on device")

    monkeypatch.setattr(f"dschat_ppo.nonfinite.repro_bundle.{part}", full)
    with pytest.raises(StorageError, match="no space left on device"):
        write(ppo_bundles(tmp_path))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [("cut", "bundle.pt: cannot be loaded"), ("bundle.pt", "bundle.pt is missing or not a file"),
     ("config.yaml", "config.yaml is missing or not a file")],
)  # fmt: skip
def test_damaged_bundles_and_pipes_are_refused(tmp_path, damage, problem):
    folder = write(ppo_bundles(tmp_path))
    if damage == "cut":
        (folder / "bundle.pt").write_bytes((folder / "bundle.pt").read_bytes()[:-9])
    else:
        (folder / damage).unlink()
        os.mkfifo(folder / damage)  # reading it would wait forever
    with pytest.raises(UserError, match=problem):
        read_bundle(folder)
    with pytest.raises(UserError, match="no such folder; a run keeps its newest repro bundles"):
        read_bundle(tmp_path / "nonfinite/step_000002_rank_0")
