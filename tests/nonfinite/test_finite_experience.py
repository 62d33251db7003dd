"""Rows of a PPO step with a number that is not finite reach no update, and nothing adapts to them."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tiny_experience import experience, ppo_bundles, with_bad

from dschat_ppo.common import dist
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.nonfinite.nonfinite_policy import FiniteExperience, NonFinitePolicy
from dschat_ppo.nonfinite.repro_bundle import read_bundle
from dschat_ppo.types import ScoredRollout

NAN, INF = math.nan, math.inf


def finite(tmp_path, how="skip", models=None, in_rank_order=True) -> FiniteExperience:
    bundles = ppo_bundles(tmp_path, "--on_nonfinite", how, "--max_nonfinite_skips", "1")
    policy = NonFinitePolicy(bundles.config.safety, bundles)
    return FiniteExperience(Mock(), policy, models or {}, in_rank_order)


def test_good_rows_are_passed_on_and_end_a_row_of_skips(tmp_path, said):
    is_finite = finite(tmp_path)
    bad = experience(scores=torch.tensor([0.0, NAN, 1.0]))
    assert not is_finite(bad, 1)
    assert said[-1].startswith(
        "PPO step 1: scores of 1 of 3 answers are not finite (rows 1); its updates are skipped. Replay: "
    )
    assert is_finite(experience(), 2)
    assert not is_finite(bad, 3)
    with pytest.raises(NonFiniteError, match=r"PPO step 4: scores of 1 of 3 answers are not finite \(rows 1\)"):
        is_finite(bad, 4)
    assert is_finite.undo.call_count == 3, "what adapts to rows forgets the bad ones"
    assert is_finite.policy.metrics()["optim/nonfinite_skipped"] == 3


@pytest.mark.parametrize("how", ["skip", "stop"])
def test_advantages_that_are_not_finite_leave_nothing_adapted(tmp_path, how):
    is_finite, bad = finite(tmp_path, how), experience(advantages=with_bad(INF, (2, 0)))
    if how == "skip":
        assert not is_finite(bad, 1)
    else:
        with pytest.raises(NonFiniteError, match=r"advantages of 1 of 3 answers are not finite \(rows 2\)"):
            is_finite(bad, 1)
    assert is_finite.undo.call_count == 1
    what, [rows] = read_bundle(tmp_path / "nonfinite/step_000001_rank_0")
    assert (what["role"], what["fault"]) == ("shaping", {"kind": "advantages", "rows": [2]})
    assert what["model"] is None
    assert type(rows) is ScoredRollout


def test_the_first_cause_is_named(tmp_path):
    """Log-probs of the actor that are bad make its KL bad."""
    is_finite, bad = finite(tmp_path, how="stop"), with_bad(NAN, (0, 0))
    with pytest.raises(NonFiniteError, match="old_logprobs of 1 of 3"):
        is_finite(experience(old_logprobs=bad, kl=bad, values=bad), 1)
    with pytest.raises(NonFiniteError, match="kl of 1 of 3"):
        is_finite(experience(kl=bad, values=bad, advantages=bad), 1)
    with pytest.raises(NonFiniteError, match="scores of 2 of 3 answers are not finite .rows 0, 2."):
        is_finite(experience(scores=torch.tensor([NAN, 1.0, -INF]), old_logprobs=bad), 1)


def test_recorded_log_probs_count_where_no_others_are_known(tmp_path):
    is_finite, bad = finite(tmp_path, how="stop"), with_bad(NAN, (0, 0))
    assert is_finite(experience(rollout_logprobs=bad), 1)
    with pytest.raises(NonFiniteError, match="rollout_logprobs of 1 of 3"):
        is_finite(experience(rollout_logprobs=bad, kl=bad, old_logprobs=None), 1)
    what, _ = read_bundle(tmp_path / "nonfinite/step_000001_rank_0")
    assert what["role"] == "actor"


def test_bad_values_are_the_critics_and_are_kept_for_the_replay(tmp_path):
    bad = with_bad(NAN, (2, 0))
    assert not finite(tmp_path)(experience(values=bad, advantages=bad, returns=bad), 1)
    what, [rows] = read_bundle(tmp_path / "nonfinite/step_000001_rank_0")
    assert (what["role"], what["fault"]) == ("critic", {"kind": "values", "rows": [2]})
    assert rows.values[2, 0].isnan()


def test_the_model_that_computed_the_field_is_named_or_saved(tmp_path, monkeypatch):
    (tmp_path / "reference").mkdir()
    monkeypatch.chdir(tmp_path)
    actor = SimpleNamespace()
    models = {"actor": actor, "critic": None, "reference": "reference", "reward": "hub/name"}
    met = []
    is_finite = finite(tmp_path, models=models)
    monkeypatch.setattr(is_finite, "policy", SimpleNamespace(report=lambda *given: met.append(given)))
    bad = with_bad(NAN, (0, 0))
    for changes in ({"entropies": bad}, {"values": bad}, {"ref_logprobs": bad}, {"scores": torch.tensor([NAN, 0, 0])},
                    {"baselines": torch.tensor([NAN, 0, 0])}):  # fmt: skip
        assert not is_finite(experience(**changes), 1)
    contexts = [(given[-1]["role"], given[4].engine, given[4].model) for given in met]
    assert contexts == [
        ("actor", actor, None), ("critic", None, None), ("reference", None, str(Path(tmp_path, "reference").resolve())),
        ("reward", None, "hub/name"), ("reward", None, "hub/name"),
    ]  # fmt: skip


@pytest.mark.parametrize(("in_rank_order", "rank"), [(True, 1), (False, 0)])
def test_the_rank_that_generated_the_row_writes_the_bundle(tmp_path, monkeypatch, in_rank_order, rank):
    met = []
    is_finite = finite(tmp_path, in_rank_order=in_rank_order)
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    monkeypatch.setattr(is_finite, "policy", SimpleNamespace(report=lambda *given: met.append(given)))
    is_finite(experience(scores=torch.tensor([0.0, 1.0, NAN])), 7)
    is_finite(experience(scores=torch.tensor([0.0, NAN, NAN])), 7)
    assert [(given[0], given[1], given[2]) for given in met] == [("rows", 7, rank), ("rows", 7, 0)]


def test_many_bad_rows_are_counted_and_the_first_eight_named(tmp_path, monkeypatch):
    met = []
    is_finite = finite(tmp_path)
    monkeypatch.setattr(is_finite, "policy", SimpleNamespace(report=lambda *given: met.append(given)))
    rows = replace(experience(), scores=torch.full((12,), NAN))
    monkeypatch.setattr(
        "dschat_ppo.nonfinite.nonfinite_policy.bad_places", lambda _: {"scores": [[n] for n in range(9)]}
    )
    is_finite(rows, 2)
    assert "scores of 9 of 12 answers are not finite (rows 0, 1, 2, 3, 4, 5, 6, 7, ...)" in met[0][3]
