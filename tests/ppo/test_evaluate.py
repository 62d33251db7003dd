"""What is said of the answers to held-out prompts, by hand."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from dschat_ppo.config.evaluation_flags import EvaluationFlags
from dschat_ppo.ppo.evaluate import Answered, Evaluation, final_answer, summary
from dschat_ppo.rewards.reward_source import RewardFunctionError
from dschat_ppo.rollout.generator import GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        (r"first \boxed{5}, no: \boxed{x+1}.", "x+1"),
        (r"\boxed{\frac{1}{3}}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{5}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("a line\nthe last line \n\n", "the last line"),
        ("42", "42"),
        ("", ""),
        ("#### ", ""),
    ],
)
def test_final_answers(text, expected):
    assert final_answer(text) == expected


def answered(index, answers, scores, lengths, ended, kl=None) -> Answered:
    return Answered(index, "p", answers, scores, lengths, ended, kl)


def test_summary_by_hand():
    rows = [
        answered(
            0, ["a", "b", "b", "c"], [0.0, 1.0, 1.0, 0.0], [1, 2, 2, 5], [True, True, False, True], [0.0, 0.1, 0.1, 0.3]
        ),
        answered(1, ["x", "x", "y", "y"], [0.0, 0.0, 1.0, 1.0], [3, 3, 3, 1], [True] * 4, [0.0] * 4),
    ]  # fmt: skip
    found = summary(rows, pass_score=1.0)
    assert found == pytest.approx({
        "eval/score": 0.5,
        "eval/length_mean": 2.5,
        "eval/ended_share": 7 / 8,
        "eval/pass@1": 0.5,
        "eval/pass@2": 5 / 6,  # two of four pass: 1 - C(2, 2) / C(4, 2)
        "eval/pass@4": 1.0,
        "eval/majority@4": 0.5,  # "b" wins and passes; of "x" and "y" the first, which does not
        "eval/kl_ref_k1": 0.5 / 20,
    })  # fmt: skip


def test_the_majority_is_of_boxes_with_braces_inside():
    right, wrong = r"\boxed{2}, or rather \boxed{\frac{1}{2}}", r"\boxed{2}"
    rows = [answered(0, [right, wrong, right, wrong, right], [1.0, 0.0, 1.0, 0.0, 1.0], [9] * 5, [True] * 5)]
    rows += [answered(1, [wrong, right, right], [0.0, 1.0, 1.0], [9] * 3, [True] * 3)]
    assert [summary([row], 1.0)[f"eval/majority@{len(row.answers)}"] for row in rows] == [1.0, 1.0]


def test_one_answer_each_has_no_majority_and_without_reference_no_kl():
    found = summary([answered(0, ["a"], [0.7], [4], [False])], pass_score=0.5)
    assert found == {"eval/score": 0.7, "eval/length_mean": 4.0, "eval/ended_share": 0.0, "eval/pass@1": 1.0}


def test_answers_are_json_whatever_they_score(tmp_path):
    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    rows = [
        answered(0, ["a", "b"], [math.nan, 0.5], [1, 2], [True, False], [-math.inf, 0.25]),
        answered(1, ["c", "d"], [1.0, math.inf], [1, 1], [True, True]),
    ]
    validation = Evaluation(
        EvaluationFlags(),
        SimpleNamespace(how=GenerationConfig(SamplingParameters(1.0), StoppingCriteria(4, (1,)))),
        None,
        None,
        tmp_path,
        None,
    )
    assert validation._write(rows, 7) is None
    lines = (tmp_path / "eval/step_000007.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=no_constant) for line in lines)
    assert first == {
        "index": 0, "prompt": "p", "answers": ["a", "b"], "scores": [None, 0.5], "lengths": [1, 2],
        "ended": [True, False], "kl": [None, 0.25],
    }  # fmt: skip
    assert second["scores"] == [1.0, None] and second["kl"] is None


def test_an_evaluation_that_a_function_failed_on_altogether_writes_nothing(tmp_path, monkeypatch):
    def count_failed_rows():
        raise RewardFunctionError("failed on every one")

    rollouts = SimpleNamespace(how=GenerationConfig(SamplingParameters(1.0), StoppingCriteria(4, (1,))))
    judge = SimpleNamespace(count_failed_rows=count_failed_rows)
    validation = Evaluation(EvaluationFlags(), rollouts, judge, None, tmp_path, None)
    monkeypatch.setattr(validation, "_answer_all", lambda: [answered(0, ["a"], [0.0], [1], [True])])
    with pytest.raises(RewardFunctionError):
        validation.run(0)
    assert not (tmp_path / "eval").exists()


def test_a_score_that_is_not_finite_is_never_the_best(tmp_path, monkeypatch):
    scores = iter([math.nan, 0.5, math.inf, 0.7, math.nan, 0.6])
    rollouts = SimpleNamespace(
        how=GenerationConfig(SamplingParameters(1.0), StoppingCriteria(4, (1,))), device=torch.device("cpu")
    )
    judge = SimpleNamespace(count_failed_rows=lambda: 0)
    kept = []
    validation = Evaluation(EvaluationFlags(), rollouts, judge, None, tmp_path, lambda: kept.append(validation.best))
    monkeypatch.setattr(
        validation, "_answer_all", lambda: [answered(0, ["a"], [next(scores)], [1], [True])]
    )  # fmt: skip
    best = []
    for step in range(6):
        validation.run(step)
        best.append(validation.best)
    assert best == [None, (0.5, 1), (0.5, 1), (0.7, 3), (0.7, 3), (0.7, 3)]
    assert kept == [(0.5, 1), (0.7, 3)]
