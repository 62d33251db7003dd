"""Pairs of responses in both orders: what a place adds cancels, and ranks are those of the true
order."""

import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from judge_parts import ROLLOUT, request, stub_judge

from dschat_ppo.features.judges.compare import flips, preference, rivals_of

GROUP = [f"answer number {number}" for number in (3, 0, 4, 1, 2)]


def places(text: str) -> list[str]:
    """The two answers of a question, in order."""
    return re.findall(r"<answer-\w+>\n(.*?)\n</answer", text, re.DOTALL)


def first_place(text):
    return [2.0, -1.0]


def true_order(bias: float):
    """The larger number wins, with a bias for the first place in the log-odds."""

    def logprobs(text):
        first, second = (int(place.split()[-1]) for place in places(text))
        return [first - second + bias, 0.0]

    return logprobs


def scores_of(judge, answers, step=0) -> list[float]:
    row = {"data": 1}
    return judge(request(answers, [row] * len(answers), step=step), ROLLOUT).tolist()


@pytest.mark.parametrize("rivals", ["", "&rivals=1", "&rivals=2"])
def test_a_judge_that_sees_the_place_alone_gives_advantages_of_exactly_0(rivals):
    judge = stub_judge(first_place, f"J?compare=pairs{rivals}")
    scores = torch.tensor(scores_of(judge, GROUP))
    assert scores.tolist() == [0.5] * 5
    assert (scores - scores.mean()).abs().max() == 0
    assert judge.take_metrics("j")["judge/j/flip_share"] == 1.0


@pytest.mark.parametrize("bias", [0.0, 5.0, -5.0])
def test_the_ranks_are_those_of_the_true_order(bias):
    judge = stub_judge(true_order(bias), "J?compare=pairs")
    scores = scores_of(judge, GROUP)
    assert [int(GROUP[index][-1]) for index in sorted(range(5), key=scores.__getitem__)] == [
        0, 1, 2, 3, 4
    ]  # fmt: skip
    assert len(judge.reader.texts) == 5 * 4
    expected = sum(1 / (1 + math.exp(-(3 - other))) for other in (0, 1, 2, 4)) / 4
    assert scores[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("rivals", "asked"), [(1, 10), (2, 10), (3, 20), (4, 20)])
def test_with_fewer_rivals_the_winner_of_a_pair_is_the_better_one(rivals, asked):
    judge = stub_judge(true_order(1.0), f"J?compare=pairs&rivals={rivals}")
    scores = scores_of(judge, GROUP)
    assert scores[2] > 0.5 > scores[1]
    assert len(judge.reader.texts) == asked


@pytest.mark.parametrize("rivals", ["", "&rivals=2"])
def test_a_shuffled_group_has_the_same_scores(rivals):
    judge = stub_judge(true_order(1.0), f"J?compare=pairs{rivals}")
    by_text = dict(zip(GROUP, scores_of(judge, GROUP), strict=True))
    for order in itertools.islice(itertools.permutations(GROUP), 0, 120, 17):
        assert dict(zip(order, scores_of(judge, order), strict=True)) == by_text


def test_the_ring_changes_from_step_to_step():
    rings = {str(rivals_of(GROUP, 2, f"7 {step}")) for step in range(20)}
    assert len(rings) > 5
    for rivals in rivals_of(GROUP, 3, "7 1"):
        assert len(set(rivals)) == 3


def test_equal_and_blank_answers_are_not_asked_and_groups_are_apart():
    judge = stub_judge(true_order(0.0), "J?compare=pairs")
    assert scores_of(judge, ["same 1", "same 1", "..."]) == [0.75, 0.75, 0.0]
    assert judge.reader.texts == []
    rows = [{"data": 1}, {"data": 1}]  # equal, and yet of two prompts
    answers = ["number 1", "number 2"]
    scores = judge(request(answers, rows), ROLLOUT)
    assert scores.isnan().all() and judge.failed.tolist() == [True, True]
    assert "no other response" in judge.counts.cause


def test_a_comparison_with_the_right_answer():
    judge = stub_judge(true_order(3.0), "J?compare=reference")
    rows = [{"_truth": "it is 2"}, {"_truth": "it is 2"}, {}]
    scores = judge(request(["it is 4", "it is 2", "it is 1"], rows), ROLLOUT).tolist()
    assert scores[:2] == pytest.approx([1 / (1 + math.exp(-2)), 0.5])
    assert math.isnan(scores[2])


def test_the_preference_by_hand():
    # d(i, j) = 3, d(j, i) = 1: sigmoid(1)
    assert preference([3.0, 0.0], [1.0, 0.0]) == pytest.approx(1 / (1 + math.exp(-1)))
    assert preference([-900.0, 0.0], [900.0, 0.0]) == 0.0


def test_equal_answers_have_equal_scores_with_few_rivals():
    judge = stub_judge(true_order(0.0), "J?compare=pairs&rivals=2")
    scores = scores_of(judge, ["is 2", "is 2", "is 2", "is 1", "is 9", "is 4"])
    assert scores[0] == scores[1] == scores[2]
    assert judge.failed.tolist() == [False] * 6


def test_a_response_whose_environment_failed_is_no_rival():
    answers = ["is 1", "is 2", "is 9"]
    alone = scores_of(stub_judge(true_order(0.0), "J?compare=pairs"), answers[:2])
    judge = stub_judge(true_order(0.0), "J?compare=pairs")
    row = {"data": 1}
    failed = SimpleNamespace(extra={"failed": torch.tensor([False, False, True])})
    scores = judge(request(answers, [row] * 3), failed)
    assert scores[:2].tolist() == alone and scores[2].isnan()
    assert judge.failed.tolist() == [False, False, True]


def test_a_pair_without_a_verdict_does_not_flip():
    assert not flips([math.nan, math.nan], [math.nan, math.nan])
    assert flips([1.0, 0.0], [1.0, 0.0]) and not flips([1.0, 0.0], [0.0, 1.0])
