"""Repro bundles: written, read back, bounded in number, refused if damaged."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from tiny_experience import experience, ppo_bundles, with_bad

from dschat_ppo.errors import StorageError, UserError
from dschat_ppo.nonfinite.repro_bundle import FailureContext, read_bundle

NAN, INF = math.nan, math.inf


def test_a_bundle_round_trips(tmp_path):
    rows = experience(advantages=with_bad(NAN, (0, 1)))
    state = [torch.get_rng_state()]
    folder = ppo_bundles(tmp_path).write(
        12, 0, FailureContext([rows, rows], {"x": INF}, random_state=state), {"role": "actor"}
    )
    assert folder == str(tmp_path / "nonfinite/step_000012_rank_0")
    what, records = read_bundle(tmp_path / "nonfinite/step_000012_rank_0")
    assert (what["step"], what["rank"], what["role"], what["constants"]) == (12, 0, "actor", {"x": INF})
    assert len(records) == 2
    for name, value in vars(rows).items():
        if value is None:
            assert getattr(records[1], name) is None
        else:
            assert torch.equal(value.nan_to_num(7.5), getattr(records[1], name).nan_to_num(7.5)), name
    assert torch.equal(what["random_state"][0], state[0])


def test_the_newest_bundles_are_kept(tmp_path):
    bundles = ppo_bundles(tmp_path, "--max_nonfinite_skips", "2")
    names = [bundles.write(step, 0, FailureContext([experience()], {}), {}).split("/")[-1] for step in (3, 3, 4, 5)]
    assert names == ["step_000003_rank_0", "step_000003_rank_0_2", "step_000004_rank_0", "step_000005_rank_0"]
    assert sorted(path.name for path in (tmp_path / "nonfinite").iterdir()) == names[1:]


def test_a_model_that_cannot_be_saved_does_not_hide_the_failure(tmp_path, monkeypatch):
    def full(*_):
        raise StorageError("model.safetensors: no space left on device")

    monkeypatch.setattr("dschat_ppo.nonfinite.repro_bundle.save_model", full)
    said = ppo_bundles(tmp_path).write(1, 0, FailureContext([experience()], {}, SimpleNamespace()), {})
    assert said == "(no repro bundle: model.safetensors: no space left on device)"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [("cut", "bundle.pt: cannot be loaded"), ("bundle.pt", "bundle.pt is missing or not a file"),
     ("config.yaml", "config.yaml is missing or not a file")],
)  # fmt: skip
def test_damaged_bundles_and_pipes_are_refused(tmp_path, damage, problem):
    folder = tmp_path / "nonfinite/step_000001_rank_0"
    ppo_bundles(tmp_path).write(1, 0, FailureContext([experience()], {}), {})
    if damage == "cut":
        (folder / "bundle.pt").write_bytes((folder / "bundle.pt").read_bytes()[:-9])
    else:
        (folder / damage).unlink()
        os.mkfifo(folder / damage)  # reading it would wait forever
    with pytest.raises(UserError, match=problem):
        read_bundle(folder)


def test_a_missing_folder_is_explained(tmp_path):
    with pytest.raises(UserError, match="no such folder; a run keeps its newest repro bundles"):
        read_bundle(tmp_path / "nonfinite/step_000001_rank_0")
