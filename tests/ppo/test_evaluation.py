"""Evaluation of held-out prompts: the metrics by hand, the answers in files, and the best
models."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from dschat_ppo.config.ppo_flags import EvaluationFlags
from dschat_ppo.errors import StorageError
from dschat_ppo.ppo.evaluation import (
    EvaluatedPrompt,
    Evaluation,
    final_answer,
    summary,
    summary_by_data_set,
)
from dschat_ppo.rewards.call_forms import ResponseText
from dschat_ppo.rewards.reward_source import FailedRows, RewardFunctionError, Scores
from dschat_ppo.rollout.generation_request import GenerationConfig
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.types import FinishReason, Rollout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        (r"first \boxed{5}, no: \boxed{x+1}.", "x+1"),
        (r"\boxed{5}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("a line\nthe last line \n\n", "the last line"),
        ("#### ", ""),
    ],
)
def test_final_answers(text, expected):
    assert final_answer(text) == expected


def answered(index, answers, scores, lengths, ended, kl=None) -> EvaluatedPrompt:
    return EvaluatedPrompt(index, "p", answers, scores, lengths, ended, kl)


def test_summary_by_hand():
    rows = [
        answered(
            0,
            ["a", "b", "b", "c"],
            [0.0, 1.0, 1.0, 0.0],
            [1, 2, 2, 5],
            ["eos", "stop", "length", "eos"],
            [0.0, 0.1, 0.1, 0.3],
        ),
        answered(
            1, ["x", "x", "y", "y"], [0.0, 0.0, 1.0, 1.0], [3, 3, 3, 1], ["eos"] * 4, [0.0] * 4
        ),
    ]
    found = summary(rows, pass_score=1.0)
    assert found == pytest.approx(
        {
            "eval/score": 0.5,
            "eval/length_mean": 2.5,
            "eval/ended_share": 7 / 8,
            "eval/unscored_share": 0.0,
            "eval/pass@1": 0.5,
            "eval/pass@2": 5 / 6,  # two of four pass: 1 - C(2, 2) / C(4, 2)
            "eval/pass@4": 1.0,
            "eval/majority@4": 0.5,  # "b" wins and passes; of "x" and "y" the first, which does not
            "eval/kl_ref_k1": 0.5 / 20,
        }
    )


def test_mean_scores_by_source_by_hand():
    """The source "length" has the name of another metric; "rule" scores two of four answers, "none"
    scores none."""
    nan = math.nan
    rows = [
        replace(
            answered(index, ["a", "b"], [1.0, 1.0], [1, 3], ["eos"] * 2),
            scores_by_source={"length": lengths, "rule": rules, "none": [nan, nan]},
            data_source=name,
        )
        for index, name, lengths, rules in (
            (0, "p", [1.0, 3.0], [nan, 0.5]),
            (1, "q", [2.0, 8.0], [nan, 0.75]),
        )
    ]
    found = summary(rows, 1.0)
    assert found["eval/length_mean"] == 2.0, "in tokens"
    assert {name: value for name, value in found.items() if name.startswith("eval/reward/")} == {
        "eval/reward/length_mean": (1 + 3 + 2 + 8) / 4,
        "eval/reward/rule_mean": (0.5 + 0.75) / 2,
        "eval/reward/rule_share": 0.5,
        "eval/reward/none_share": 0.0,
    }
    by_data_set = summary_by_data_set(rows, 1.0)
    assert (
        by_data_set["eval/reward/length_mean/p"] == 2.0
        and by_data_set["eval/reward/rule_mean/q"] == 0.75
    )
    alone = [replace(row, scores_by_source={"rule": [1.0, 1.0]}) for row in rows]
    assert not any("reward" in name for name in summary(alone, 1.0)), "the score itself says it"
    # one answer has no majority, and without a reference it has no KL
    found = summary([answered(0, ["a"], [0.7], [4], ["length"])], pass_score=0.5)
    assert found == {
        "eval/score": 0.7,
        "eval/length_mean": 4.0,
        "eval/ended_share": 0.0,
        "eval/unscored_share": 0.0,
        "eval/pass@1": 1.0,
    }


def test_answers_without_a_score_count_in_none_of_the_scores():
    nan = math.nan
    rows = [
        answered(0, ["b", "b", "a", "a"], [nan, nan, 1.0, 0.0], [1, 1, 1, 1], ["eos"] * 4),
        answered(1, ["a", "a", "b", "b"], [nan] * 4, [3, 3, 3, 3], ["eos"] * 4),
        answered(2, ["a", "b", "c", "d"], [nan, 0.0, 0.0, 1.0], [2, 2, 2, 2], ["eos"] * 4),
    ]
    found = summary(rows, 1.0)
    assert found == pytest.approx(
        {
            "eval/score": (1 + 0 + 0 + 0 + 1) / 5,
            "eval/unscored_share": 7 / 12,
            "eval/length_mean": 2.0,
            "eval/ended_share": 1.0,
            "eval/pass@1": (1 / 2 + 1 / 3) / 2,
            "eval/pass@2": (1 + (1 - 1 / 3)) / 2,  # no prompt has four scored answers
            "eval/majority@4": 1 / 2,  # "a" wins and its first passes; "b" is first, and does not
        }
    )


class Sampler:
    """Answers of `index % 3 + 1` tokens, the number of the answer over all prompts; the odd ones
    are cut."""

    seed = 7
    config = GenerationConfig(SamplingParameters(1.0), StoppingCriteria(4, (1,)), samples=5)

    def __init__(self):
        self.asked = []

    def sample(self, indices, *path, purpose, prompts, config, first, step):
        assert purpose == "evaluation"
        self.asked.append((list(indices), config, first, path))
        numbers = [
            index * config.samples + sample for index in indices for sample in range(config.samples)
        ]
        mask = torch.arange(3) < torch.tensor([[number % 3 + 1] for number in numbers])
        tokens = torch.tensor(numbers).unsqueeze(1).expand(-1, 3)
        reasons = torch.tensor(
            [FinishReason.LENGTH if n % 2 else FinishReason.EOS for n in numbers]
        )
        return Rollout(
            tokens[:, :1], mask[:, :1], tokens, mask, torch.zeros(len(numbers), 3), reasons
        )


class RewardRequests:
    """The score of an answer is its number / 10, or what `scores` gives; odd answers have a further
    number."""

    def __init__(self, prompts=3, scores=None, faults=0):
        self.prompts, self.scores, self.faults = (
            Dataset.from_dict({"row": ["{}"] * prompts}),
            scores,
            faults,
        )
        self.mixture, self.names, self.tokenizer = self, ["number"], None

    def request(self, rollout, indices, steps_done):
        self.step = steps_done
        texts = [f"answer {number}" for number in rollout.response_ids[:, 0].tolist()]
        samples = len(texts) // len(indices)
        return SimpleNamespace(
            prompts=[f"prompt {i}" for i in indices for _ in range(samples)],
            texts=[ResponseText.of(text) for text in texts],
        )

    def readable_prompts(self, rollout, indices):
        samples = len(rollout.response_ids) // len(indices)
        first = rollout.response_ids[::samples, 0].tolist()
        return [f"prompt {number // samples}" for number in first]

    def __call__(self, request, rollout):
        total = rollout.response_ids[:, 0] / 10
        if self.scores is not None:
            total = torch.tensor(next(self.scores))
        number = rollout.response_ids[:, 0].double()
        numbers = {"f/odd": number.where(number % 2 == 1, math.nan), "g/none": number * math.nan}
        return Scores(total, total.unsqueeze(1), numbers=numbers)

    def take_metrics(self):
        return {}

    def count_failed_rows(self):
        if isinstance(self.faults, Exception):
            raise self.faults
        return FailedRows(faults=self.faults, unscored=5)


def evaluation_of(folder, scorer=None, passes=None, on_best=lambda: None, data_sources=(), **flags):
    flags = EvaluationFlags(eval_data_path=["d"], **flags)
    return Evaluation(
        flags, Sampler(), scorer or RewardRequests(), passes, folder, on_best, data_sources
    )


def lines_of(folder, step: int) -> list[dict]:
    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    lines = (folder / f"eval/step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=no_constant) for line in lines]


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_answers_scores_and_files_do_not_depend_on_batches(tmp_path, batch):
    """Answers 0 to 5, two of each prompt; the last batch is filled up with copies that do not
    count."""
    evaluation = evaluation_of(
        tmp_path, RewardRequests(faults=2), eval_samples=2, eval_batch_size=batch
    )
    metrics = evaluation.run(4)
    assert evaluation.requests.step == 4
    assert metrics == pytest.approx(
        {
            "eval/score": 0.25,
            "eval/length_mean": 2.0,
            "eval/ended_share": 0.5,
            "eval/unscored_share": 0.0,
            "eval/pass@1": 0.0,
            "eval/pass@2": 0.0,
            "eval/majority@2": 0.0,
            "eval/function_faults": 2.0,
            "eval/f/odd": (1 + 3 + 5) / 3,
        }
    )
    for indices, config, first, path in evaluation.sampler.asked:
        assert (config.samples, config.sampling.top_k) == (2, 0) and path == (5, 0, 0)
        assert first == 2 * indices[0], "an answer has the same seed in every batch"
    assert lines_of(tmp_path, 4) == [
        {
            "index": row,
            "prompt": f"prompt {row}",
            "answers": [f"answer {2 * row}", f"answer {2 * row + 1}"],
            "scores": pytest.approx([row / 5, row / 5 + 0.1]),
            "lengths": [2 * row % 3 + 1, (2 * row + 1) % 3 + 1],
            "ended": ["eos", "length"],
            "kl": None,
            "scores_by_source": {"number": pytest.approx([row / 5, row / 5 + 0.1])},
            "numbers": {"f/odd": [None, 2 * row + 1], "g/none": [None, None]},
        }
        for row in range(3)
    ]


def test_each_data_set_has_its_own_summary_beside_that_of_all_prompts(tmp_path):
    scorer, names = RewardRequests(), ("maths", "code", "chat")
    scorer.prompts = scorer.prompts.add_column("source", [2, 0, 2])
    metrics = evaluation_of(tmp_path, scorer, data_sources=names, eval_pass_score=0.2).run(4)
    whole = evaluation_of(tmp_path, eval_pass_score=0.2).run(5)
    assert {name: value for name, value in metrics.items() if name in whole} == whole
    assert {name: value for name, value in metrics.items() if name not in whole} == pytest.approx(
        {
            "eval/score/maths": 0.1,
            "eval/length_mean/maths": 2.0,
            "eval/ended_share/maths": 0.0,
            "eval/unscored_share/maths": 0.0,
            "eval/pass@1/maths": 0.0,
            "eval/f/odd/maths": 1.0,
            "eval/score/chat": 0.1,
            "eval/length_mean/chat": 2.0,
            "eval/ended_share/chat": 1.0,
            "eval/unscored_share/chat": 0.0,
            "eval/pass@1/chat": 0.5,
        }
    )
    assert [line["data_source"] for line in lines_of(tmp_path, 4)] == ["chat", "maths", "chat"]
    assert "data_source" not in lines_of(tmp_path, 5)[0]


def test_the_kl_is_the_sum_of_k1_over_each_answer_and_the_answers_to_a_prompt_are_a_group(tmp_path):
    """Micro-batches of scoring count the prompt of a group once."""

    def passes(rollout, groups):
        assert groups.tolist() == [0, 0, 1, 1, 2, 2]
        logprobs = torch.where(rollout.response_mask, 0.25, 0.0)
        return SimpleNamespace(old_logprobs=logprobs, ref_logprobs=logprobs * 3)

    metrics = evaluation_of(tmp_path, passes=passes, eval_samples=2).run(0)
    # Answers of 1, 2, 3, 1, 2 and 3 tokens, -0.5 each; the mean is one over tokens.
    assert [line["kl"] for line in lines_of(tmp_path, 0)] == [
        [-0.5, -1.0],
        [-1.5, -0.5],
        [-1.0, -1.5],
    ]
    assert metrics["eval/kl_ref_k1"] == -0.5


def test_a_greedy_evaluation_takes_the_most_likely_token(tmp_path):
    evaluation = evaluation_of(tmp_path, eval_greedy=True)
    evaluation.run(0)
    assert [config.sampling.top_k for _, config, _, _ in evaluation.sampler.asked] == [1]


def test_an_evaluation_in_which_a_function_fails_on_every_answer_writes_nothing(tmp_path):
    evaluation = evaluation_of(
        tmp_path, RewardRequests(faults=RewardFunctionError("failed on every one"))
    )
    with pytest.raises(RewardFunctionError):
        evaluation.run(0)
    assert not (tmp_path / "eval").exists()


def test_answers_that_cannot_be_written_are_an_error_by_name(tmp_path):
    (tmp_path / "eval").write_text("in the way")
    with pytest.raises(
        StorageError,
        match=r"eval/step_000002.jsonl: the answers of the evaluation cannot be written",
    ):
        evaluation_of(tmp_path).run(2)


@pytest.mark.parametrize("save_best", [True, False])
def test_the_best_models_are_those_of_the_highest_finite_score(tmp_path, save_best):
    """The untrained models of step 0 can be the best, but are not saved; an equal score is not
    better."""
    scores = [0.1, math.nan, 0.5, math.inf, 0.5, 0.7, -math.inf, math.nan, 0.6]
    kept, best = [], []
    evaluation = evaluation_of(
        tmp_path,
        RewardRequests(1, iter([[score] for score in scores])),
        None,
        lambda: kept.append(evaluation.best),
        save_best=save_best,
    )
    for step in range(len(scores)):
        evaluation.run(step)
        best.append(evaluation.best and (round(evaluation.best[0], 6), evaluation.best[1]))
    assert best == [(0.1, 0), (0.1, 0), (0.5, 2), (0.5, 2), (0.5, 2), *[(0.7, 5)] * 4]
    assert [step for _, step in kept] == ([2, 5] if save_best else [])


@pytest.mark.parametrize(("interval", "due"), [(0, [0, 7]), (1, list(range(8))), (3, [0, 3, 6, 7])])
def test_when_an_evaluation_is_due(tmp_path, interval, due):
    evaluation = evaluation_of(tmp_path, eval_interval=interval)
    assert [step for step in range(8) if evaluation.is_due(step, 7)] == due
