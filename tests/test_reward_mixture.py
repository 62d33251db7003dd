"""Several sources as one, and how a failure on one rank stops all."""

import pytest
import torch
from launch import deepspeed, succeed

from dschat_ppo.rewards.failure import RewardServiceError, agree_on_failure
from dschat_ppo.rewards.functions import FunctionReward, parse_function
from dschat_ppo.rewards.mixture import RewardMixture
from dschat_ppo.rewards.request import RewardRequest
from dschat_ppo.types import Rollout

REQUEST = RewardRequest(["p", "q", "r"], ["yes", "", "longer"], [{"answer": "yes"}, {"answer": "no"}, {}])
ROLLOUT = Rollout(*torch.zeros(6, 3, 1))


class Fixed:
    """A source that gives fixed scores and writes down that it was asked."""

    def __init__(self, name, scores, calls=None):
        self.name, self.scores, self.calls = name, scores, [] if calls is None else calls

    def __call__(self, request, rollout):
        assert (request, rollout) == (REQUEST, ROLLOUT)
        self.calls.append(self.name)
        if isinstance(self.scores, str):
            raise RewardServiceError(self.scores)
        return torch.tensor(self.scores, dtype=torch.float64)


def test_scores_are_the_weighted_sum():
    calls = []
    mixture = RewardMixture([(Fixed("a", [1, 2, 3], calls), 0.5), (Fixed("b", [10, 0, -4], calls), -2)])
    mixed = mixture(REQUEST, ROLLOUT)
    assert mixed.scores.tolist() == [0.5 - 20, 1, 1.5 + 8]
    assert mixed.by_source.tolist() == [[1, 10], [2, 0], [3, -4]]
    assert mixed.scores.dtype == mixed.by_source.dtype == torch.float32
    assert calls == ["a", "b"]


def test_a_weight_of_zero_only_reports():
    mixed = RewardMixture([(Fixed("a", [1, 2, 3]), 1.0), (Fixed("b", [float("nan")] * 3), 0.0)])(REQUEST, ROLLOUT)
    assert mixed.scores.tolist() == [1, 2, 3]
    assert mixed.by_source[:, 1].isnan().all()
    assert RewardMixture([(Fixed("a", [1, 2, 3]), 0.0)])(REQUEST, ROLLOUT).scores.tolist() == [0, 0, 0]


def test_names_differ():
    sources = [(Fixed(name, [0, 0, 0]), 1.0) for name in ("a", "b", "a", "a")]
    assert RewardMixture(sources).names == ["a", "b", "a_2", "a_3"]


def test_no_sources():
    with pytest.raises(ValueError, match="at least one"):
        RewardMixture([])


def test_a_request_needs_as_many_of_each():
    with pytest.raises(ValueError, match="2 prompts, 1 responses, 2 rows"):
        RewardRequest(["a", "b"], ["c"], [{}, {}])


def test_faults_are_counted_and_processes_end():
    spec = parse_function("exact_match:2")
    sources = [(FunctionReward(spec, 1, 5.0, 0.25), spec.weight), (Fixed("b", [1, 2, 3]), 1.0)]
    mixture = RewardMixture(sources)
    assert mixture(REQUEST, ROLLOUT).scores.tolist() == [3, 2, 3.5]  # the last row has no answer: the default
    assert mixture.take_faults() == 1
    mixture.close()
    assert [worker.process for worker in sources[0][0].pool.workers] == [None]


def test_after_a_failure_the_other_sources_are_asked_all_the_same():
    calls = []
    sources = [(Fixed("a", "away", calls), 1), (Fixed("b", [1, 2, 3], calls), 1), (Fixed("c", "second", calls), 1)]
    with pytest.raises(RewardServiceError, match="away"):
        RewardMixture(sources)(REQUEST, ROLLOUT)
    assert calls == ["a", "b", "c"]


def test_agreement_alone():
    agree_on_failure(None)
    with pytest.raises(RewardServiceError, match="^the cause$"):
        agree_on_failure("the cause")


@pytest.mark.ranks
def test_ranks_agree(tmp_path):
    succeed(deepspeed(2, "tests/workers/reward_failure.py", tmp_path))
    for rank in range(2):
        told = (tmp_path / str(rank)).read_text(encoding="utf-8")
        assert told == "none / the service é is away / the service é is away / [0.0, 1.0]"
