"""Several reward sources as one, and a failure on one rank that stops all."""

import pytest
import torch
from launch import deepspeed, succeed

from dschat_ppo.common import dist
from dschat_ppo.rewards.function_reward import FunctionReward, parse_function
from dschat_ppo.rewards.reward_mixture import RewardMixture
from dschat_ppo.rewards.reward_source import (
    CallCounts,
    RewardFunctionError,
    RewardRequest,
    RewardServiceError,
    raise_on_any_rank,
)
from dschat_ppo.types import Rollout

REQUEST = RewardRequest(["p", "q", "r"], ["yes", "", "longer"], [{"answer": "yes"}, {"answer": "no"}, {}])
ROLLOUT = Rollout(*torch.zeros(6, 3, 1))


class Fixed:
    """A source that returns fixed scores and records its calls."""

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


def test_a_source_of_weight_zero_is_reported_but_not_added():
    mixed = RewardMixture([(Fixed("a", [1, 2, 3]), 1.0), (Fixed("b", [float("nan")] * 3), 0.0)])(REQUEST, ROLLOUT)
    assert mixed.scores.tolist() == [1, 2, 3]
    assert mixed.by_source[:, 1].isnan().all()
    assert RewardMixture([(Fixed("a", [1, 2, 3]), 0.0)])(REQUEST, ROLLOUT).scores.tolist() == [0, 0, 0]


def test_sources_of_one_name_are_numbered():
    sources = [(Fixed(name, [0, 0, 0]), 1.0) for name in ("a", "b", "a", "a")]
    assert RewardMixture(sources).names == ["a", "b", "a_2", "a_3"]


def test_no_sources():
    with pytest.raises(ValueError, match="at least one"):
        RewardMixture([])


def test_a_request_needs_equally_many_of_each():
    with pytest.raises(ValueError, match="2 prompts, 1 responses, 2 rows"):
        RewardRequest(["a", "b"], ["c"], [{}, {}])


def test_failed_calls_are_counted_and_close_ends_the_workers():
    spec = parse_function("exact_match:2")
    sources = [(FunctionReward(spec, 1, 5.0, 0.25), spec.weight), (Fixed("b", [1, 2, 3]), 1.0)]
    mixture = RewardMixture(sources)
    assert mixture(REQUEST, ROLLOUT).scores.tolist() == [3, 2, 3.5]  # the last row has no answer: the default
    assert mixture.count_failed_rows(refuse_all=True) == 1
    assert mixture.count_failed_rows(refuse_all=True) == 0, "no rows are no failure"
    mixture.close()
    assert [worker.process for worker in sources[0][0].pool.workers] == [None]


class Function(Fixed):
    """A source with workers whose counts are given."""

    def __init__(self, name, *calls):
        super().__init__(name, [0, 0, 0])
        self.spec, self.ended, self.numbers = f"--reward_function {name}", list(calls), {}

    def take_counts(self):
        return self.ended.pop(0)

    def close(self):
        pass


GOOD, SOME, ALL = CallCounts(3), CallCounts(3, 2, "KeyError: 'a'"), CallCounts(3, 3, "KeyError: 'b'")
OTHER = CallCounts(4, 4, "ValueError: c")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([GOOD, GOOD], [GOOD, GOOD], 0),
        ([SOME, GOOD], [ALL, SOME], 7),
        ([ALL, GOOD], [GOOD, ALL], 6),
        ([ALL, ALL], [GOOD, SOME], r"^--reward_function f: .* first 6 answers; .*: KeyError: 'b'; correct"),
        ([OTHER, ALL], [ALL, ALL], r"^--reward_function f: .* first 7 answers; .*: ValueError: c; correct"),
        ([SOME, SOME], [ALL, OTHER], r"^--reward_function g: .* first 7 answers; .*: KeyError: 'b'; correct"),
        ([CallCounts(), ALL], [GOOD, SOME], r"^--reward_function f: .* first 3 answers; .*: KeyError: 'b'; correct"),
    ],
)
def test_a_function_that_fails_on_every_row_of_all_ranks_is_an_error(monkeypatch, first, second, expected):
    """`first`, `second`: counts of two functions on (rank 0, rank 1); the other sources succeed."""
    monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, [first[1], second[1], CallCounts()]])

    def mixture():
        return RewardMixture([(Fixed("a", [1, 2, 3]), 1), (Function("f", first[0]), 0), (Function("g", second[0]), 1)])

    if isinstance(expected, int):
        assert mixture().count_failed_rows(refuse_all=True) == expected
        return
    with pytest.raises(RewardFunctionError, match=expected) as refused:
        mixture().count_failed_rows(refuse_all=True)
    assert len(str(refused.value).splitlines()) == 1
    assert mixture().count_failed_rows(refuse_all=False) == sum(calls.failed for calls in [*first, *second])


def test_after_a_failure_the_other_sources_still_run():
    calls = []
    sources = [(Fixed("a", "away", calls), 1), (Fixed("b", [1, 2, 3], calls), 1), (Fixed("c", "second", calls), 1)]
    with pytest.raises(RewardServiceError, match="away"):
        RewardMixture(sources)(REQUEST, ROLLOUT)
    assert calls == ["a", "b", "c"]


def test_raise_on_any_rank_with_one_rank():
    raise_on_any_rank(None)
    with pytest.raises(RewardServiceError, match="^the cause$"):
        raise_on_any_rank("the cause")


@pytest.mark.ranks
def test_every_rank_raises_the_same_error(tmp_path):
    succeed(deepspeed(2, "tests/workers/reward_failure.py", tmp_path))
    for rank in range(2):
        text = (tmp_path / str(rank)).read_text(encoding="utf-8")
        before, _, function = text.partition(" / [")
        assert before == "none / the service é is away / the service é is away"
        scores, on_one, on_both = function.split(" / ")
        assert (scores, on_one) == ("0.0, 1.0]", "2")
        assert on_both == (
            "--reward_function exact_match: failed on every one of the first 4 answers; the first cause: "
            "ValueError: the row has no column 'answer' (no row has a column 'answer'); correct the function, its "
            "settings or the columns of the data"
        )
