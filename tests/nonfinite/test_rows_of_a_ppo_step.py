"""Step 3: failures in the rows of a PPO step, and the limits of an update."""

import math
from types import SimpleNamespace

import pytest
import torch
from dschat_ppo.ppo.finite_check import FiniteCheck
from dschat_ppo.ppo.update_limits import UpdateLimits
from tiny_experience import experience, ppo_bundles, scored, with_bad

from dschat_ppo.algorithms.kl import KL_ESTIMATORS
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.errors import NonFiniteError
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.nonfinite.nonfinite_policy import NonFinitePolicy
from dschat_ppo.nonfinite.repro_bundle import read_bundle
from dschat_ppo.types import Experience, ScoredRollout

NAN, INF = math.nan, math.inf


# Rows of a PPO step


class AdvantageComputation:
    """Stand-in: counts its calls and returns the given rows."""

    def __init__(self, **changes):
        self.seen, self.changes = 0, changes

    def experience(self, rows, step):
        self.seen += 1
        return experience(**self.changes)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def check_of(tmp_path, shaping: AdvantageComputation, how: str = "skip") -> FiniteCheck:
    bundles = ppo_bundles(tmp_path, "--on_nonfinite", how, "--max_nonfinite_skips", "1")
    engines = SimpleNamespace(actor=None, critic=None)
    return FiniteCheck(bundles.config, engines, shaping, NonFinitePolicy(bundles.config.safety, bundles))


def test_good_rows_get_advantages_and_reset_the_skip_count(tmp_path):
    check = check_of(tmp_path, AdvantageComputation())
    bad = scored(scores=torch.tensor([0.0, NAN, 1.0]))
    assert check.experience(bad, 1) is None
    assert isinstance(check.experience(scored(), 2), Experience)
    assert check.experience(bad, 3) is None
    with pytest.raises(NonFiniteError, match=r"PPO step 4: scores of 1 of 3 answers are not finite \(rows 1\)"):
        check.experience(bad, 4)
    assert check.shaping.seen == 1


def test_bad_advantages_restore_the_adaptive_state(tmp_path):
    check = check_of(tmp_path, AdvantageComputation(advantages=with_bad(INF, (2, 0))), how="stop")
    with pytest.raises(NonFiniteError, match=r"advantages of 1 of 3 answers are not finite \(rows 2\)"):
        check.experience(scored(), 1)
    assert check.shaping.seen == 0
    what, [rows], _ = read_bundle(tmp_path / "nonfinite/step_000001_rank_0")
    assert (what["role"], what["fault"]) == ("shaping", {"kind": "advantages", "rows": [2]})
    assert what["constants"] == {"shaping": {"seen": 0}}
    assert isinstance(rows, ScoredRollout)


def test_the_first_cause_of_bad_numbers_is_named(tmp_path):
    """Log-probs of the actor that are bad make its KL bad."""
    check = check_of(tmp_path, AdvantageComputation(), how="stop")
    bad = with_bad(NAN, (0, 0))
    with pytest.raises(NonFiniteError, match="old_logprobs of 1 of 3"):
        check.experience(scored(old_logprobs=bad, kl=bad, values=bad), 1)
    with pytest.raises(NonFiniteError, match="kl of 1 of 3"):
        check.experience(scored(kl=bad, values=bad), 1)


# Metrics and limits


def test_metrics_of_an_update_are_merged_and_selected():
    total, part = MetricSums(), MetricSums()
    for sums, values in ((total, [1.0, 2.0]), (part, [6.0])):
        sums.add_mean("mean", torch.tensor(values))
        sums.add_max("largest", torch.tensor(values))
    part.add_mean("other", torch.tensor([4.0]))
    total.merge(part)
    assert total.reduce() == {"mean": 3.0, "other": 4.0, "largest": 6.0}
    assert part.only("largest").reduce() == {"largest": 6.0}
    assert part.only("other").reduce() == {"other": 4.0}


def sums_of(log_ratios: list[float]) -> MetricSums:
    sums = MetricSums()
    new = torch.tensor(log_ratios)
    sums.add_mean("policy/kl_k3", KL_ESTIMATORS["k3"](torch.zeros_like(new), new))
    sums.add_max("policy/counted_log_ratio_abs_max", new.abs())
    return sums


def test_limits_of_an_update_by_hand():
    """k3 of log-ratios 1, -1, 0: (e - 2 + 1/e + 0) / 3 = 0.3620."""
    sums = sums_of([1.0, -1.0, 0.0])
    for target, ends in ((0.36, True), (0.3621, False), (None, False)):
        assert UpdateLimits(AlgorithmFlags(target_kl=target)).end(sums) is ends
    for largest, forbidden in ((0.9, True), (1.0, False), (None, False)):
        assert UpdateLimits(AlgorithmFlags(max_log_ratio=largest)).forbid(sums) is forbidden
    assert UpdateLimits(AlgorithmFlags(max_log_ratio=0.9)).forbid(sums_of([0.0, -0.95]))
