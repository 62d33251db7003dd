"""Several reward sources as one, a failure on one rank that stops all, and means of the numbers that they return."""

import threading

import pytest
import torch

from dschat_ppo.common import dist
from dschat_ppo.rewards.function_reward import FunctionReward, parse_function
from dschat_ppo.rewards.reward_source import (
    CallCounts,
    RewardFunctionError,
    RewardMixture,
    RewardRequest,
    RewardServiceError,
    number_means,
)
from dschat_ppo.types import Rollout

REQUEST = RewardRequest.of(["p", "q", "r"], ["yes", "", "longer"], [{"answer": "yes"}, {"answer": "no"}, {}])
ROLLOUT = Rollout(*torch.zeros(6, 3, 1))
NAN = float("nan")


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
    """A source of weight 0 is reported, but not added."""
    calls = []
    sources = [(Fixed("a", [1, 2, 3], calls), 0.5), (Fixed("b", [10, 0, -4], calls), -2), (Fixed("c", [NAN] * 3), 0.0)]
    mixed = RewardMixture(sources)(REQUEST, ROLLOUT)
    assert mixed.total.tolist() == [0.5 - 20, 1, 1.5 + 8]
    assert mixed.by_source[:, :2].tolist() == [[1, 10], [2, 0], [3, -4]] and mixed.by_source[:, 2].isnan().all()
    assert mixed.total.dtype == mixed.by_source.dtype == torch.float32
    assert calls == ["a", "b"]
    for weight in (0.0, -1.0):
        only = RewardMixture([(Fixed("a", [1, 2, 3]), weight)], default=7.0)
        assert only(REQUEST, ROLLOUT).total.tolist() == [weight, 2 * weight, 3 * weight]


def test_sources_elsewhere_score_while_others_do():
    """The first source waits for the second one, which runs after it in one thread."""
    second_has_run = threading.Event()

    class Elsewhere(Fixed):
        scores_elsewhere = True

        def __call__(self, request, rollout):
            assert second_has_run.wait(timeout=20)
            return super().__call__(request, rollout)

    class Here(Fixed):
        def __call__(self, request, rollout):
            second_has_run.set()
            return super().__call__(request, rollout)

    calls = []
    pending = RewardMixture([(Elsewhere("a", [1, 2, 3], calls), 1.0), (Here("b", [10, 0, -4], calls), 1.0)]).begin(
        REQUEST, ROLLOUT
    )
    assert calls == [] and pending().total.tolist() == [11, 2, -1] and calls == ["b", "a"]
    with pytest.raises(RewardServiceError, match="is down"):
        RewardMixture([(Elsewhere("a", "is down"), 1.0)])(REQUEST, ROLLOUT)


def test_sources_of_one_name_are_numbered():
    sources = [(Fixed(name, [0, 0, 0]), 1.0) for name in ("a", "b", "a", "a")]
    assert RewardMixture(sources).names == ["a", "b", "a_2", "a_3"]
    score = [(Fixed("score", [0, 0, 0]), 1.0)]  # with several sources, `reward/score_mean` is a metric of its own
    assert RewardMixture(score).names == ["score"] and RewardMixture(score * 2).names == ["score_2", "score_3"]


def test_failed_calls_are_counted_and_close_ends_the_workers():
    spec = parse_function("exact_match:2")
    sources = [(FunctionReward(spec, 1, 5.0, 0.25), spec.weight), (Fixed("b", [1, 2, 3]), 1.0)]
    mixture = RewardMixture(sources)
    assert mixture(REQUEST, ROLLOUT).total.tolist() == [3, 2, 3.5]  # the last row has no answer: the default
    assert mixture.count_failed_rows(refuse_all=True) == 1
    assert mixture.count_failed_rows(refuse_all=True) == 0, "no rows are no failure"
    mixture.close()
    assert [worker.process for worker in sources[0][0].pool.workers] == [None]


class Function(Fixed):
    """A source with workers whose scores (NaN: not its response), other numbers and counts are given."""

    def __init__(self, name, scores=(0, 0, 0), numbers=None, counts=None):
        super().__init__(name, scores)
        self.spec, self.counts = f"--reward_function {name}", counts or CallCounts()
        self.numbers = {key: torch.tensor(values) for key, values in (numbers or {}).items()}

    def close(self):
        pass


GOOD, SOME, ALL = CallCounts(3), CallCounts(3, 2, "KeyError: 'a'"), CallCounts(3, 3, "KeyError: 'b'")
OTHER = CallCounts(4, 4, "ValueError: c")


@pytest.mark.parametrize(("first", "second", "expected"), [
    ([SOME, GOOD], [ALL, SOME], 7), ([ALL, GOOD], [GOOD, ALL], 6),
    ([ALL, ALL], [GOOD, SOME], r"^--reward_function f: .* first 6 answers; .*: KeyError: 'b'; correct"),
    ([SOME, SOME], [ALL, OTHER], r"^--reward_function g: .* first 7 answers; .*: KeyError: 'b'; correct"),
    ([CallCounts(), ALL], [GOOD, SOME], r"^--reward_function f: .* first 3 answers; .*: KeyError: 'b'; correct"),
])  # fmt: skip
def test_a_function_that_fails_on_every_row_of_all_ranks_is_an_error(monkeypatch, first, second, expected):
    """`first`, `second`: counts of two functions on (rank 0, rank 1); the other sources succeed."""
    monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, [first[1], second[1], CallCounts()]])

    def mixture():
        functions = [(Function("f", counts=first[0]), 0), (Function("g", counts=second[0]), 1)]
        return RewardMixture([(Fixed("a", [1, 2, 3]), 1), *functions])

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


def test_the_sum_is_over_the_sources_that_score_a_response(capsys):
    """Response 0: 0.5 x 1 + 2 x 10; response 1: 2 x 20; response 2: no source, so the default."""
    sources = [(Function("a", [1, NAN, NAN]), 0.5), (Function("b", [10, 20, NAN]), 2), (Function("c", [NAN, 5, 6]), 0)]
    mixed = RewardMixture(sources, default=-3.0)(REQUEST, ROLLOUT)
    assert mixed.total.tolist() == [20.5, 40, -3]
    assert mixed.by_source.isnan().tolist() == [[False, False, True], [True, False, False], [True, True, False]]
    warning = "warning: rank 0: no reward source scored 1 of 3 responses (data_source None); their score is -3"
    assert warning in capsys.readouterr().out


def test_a_nan_of_another_source_is_no_absence_but_a_fault():
    """The finite check must find it."""
    mixed = RewardMixture([(Fixed("model", [NAN, 2, 3]), 1.0), (Function("b", [10, NAN, 1]), 1)], 5.0)(REQUEST, ROLLOUT)
    assert mixed.total.tolist() == pytest.approx([NAN, 2, 4], nan_ok=True)


def test_responses_without_a_source_are_counted_and_all_of_them_are_an_error(monkeypatch):
    def mixture(other_rank: CallCounts):
        found = RewardMixture([(Function("f", [NAN] * 3), 1)])
        rows = [{"data_source": name} for name in ("b", "a", "b")]
        monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine])
        found(RewardRequest.of(["", "", ""], ["", "", ""], rows), ROLLOUT)
        monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, [CallCounts(), other_rank]])
        return found

    monkeypatch.setattr(Function, "__call__", lambda self, request, rollout: torch.tensor(self.scores))
    again = mixture(CallCounts(3, 1))
    assert [again.count_failed_rows(refuse_all=first) for first in (True, False)] == [4, 1], "counted once"
    assert mixture(CallCounts(3, 3)).count_failed_rows(refuse_all=False) == 6
    problem = (
        r"^no reward source scored any of the first 6 answers \(data_source 'a', 'b'\): every function returned None"
    )
    with pytest.raises(RewardFunctionError, match=problem):
        mixture(CallCounts(3, 3, "data_source 'c'")).count_failed_rows(refuse_all=True)


def test_means_are_over_the_responses_that_have_the_number(monkeypatch):
    first = [{"f/acc": torch.tensor([1.0, NAN, 0.0]), "f/only_here": torch.tensor([NAN, 2.0, NAN])},
             {"f/acc": torch.tensor([1.0]), "g/absent": torch.tensor([NAN])}]  # fmt: skip
    second = [{"f/acc": torch.tensor([0.0, 0.0, NAN]), "g/only_there": torch.tensor([3.0, 5.0, NAN])}]
    sent = []
    monkeypatch.setattr(dist, "gather_objects", lambda own: sent.append(own) or [own])
    assert number_means(second) == {"f/acc": 0, "g/only_there": 4}
    monkeypatch.setattr(dist, "gather_objects", lambda own: [own, sent[0]])
    # acc: (1 + 0 + 1 + 0 + 0) / 5, not the mean of the ranks' means (2 / 3 + 0) / 2
    assert number_means(first) == pytest.approx({"f/acc": 0.4, "f/only_here": 2, "g/only_there": 4})
    assert number_means([]) == {"f/acc": 0, "g/only_there": 4}, "a rank without numbers takes part"


def test_without_any_weight_a_score_of_weight_0_is_a_score():
    mixture = RewardMixture([(Function("a", [1, NAN, 2], counts=CallCounts(2)), 0)], default=7.0)
    assert mixture(REQUEST, ROLLOUT).total.tolist() == [0, 7, 0]
    assert mixture.count_failed_rows(refuse_all=True) == 1


def test_other_numbers_carry_the_name_of_their_source():
    sources = [(Function("f", [1, 2, 3], {"acc": accuracies}), 1) for accuracies in ([1.0, 0.0, NAN], [2.0] * 3)]
    numbers = RewardMixture(sources)(REQUEST, ROLLOUT).numbers
    assert list(numbers) == ["f/acc", "f_2/acc"] and numbers["f/acc"][:2].tolist() == [1, 0]
