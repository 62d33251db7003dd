"""The metrics of an experience, against a loop over its tokens."""

import math

import numpy as np
import pytest
import torch

from dschat_ppo.monitor.rollout_metrics import drift_metrics, experience_metrics
from dschat_ppo.types import Experience

LENGTHS = (4, 1, 0, 3)
KL_COEF = 0.3


def experience(**changes) -> Experience:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)

    def per_token() -> torch.Tensor:
        return torch.where(mask, torch.randn(4, 5, generator=generator), 0.0)

    fields = {
        "prompt_ids": torch.ones(4, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(4, 2, dtype=torch.bool),
        "response_ids": torch.randint(0, 9, (4, 5), generator=generator),
        "response_mask": mask,
        "rollout_logprobs": per_token(),
        "finish_reason": torch.tensor([0, 1, 2, 2], dtype=torch.int8),
        "old_logprobs": per_token(),
        "ref_logprobs": per_token(),
        "values": per_token(),
        "scores": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "rewards": per_token(),
        "advantages": per_token(),
        "returns": per_token(),
    }
    return Experience(**{**fields, **changes})


def metrics_by_loop(rows: Experience) -> dict[str, float]:
    """Each metric from lists of plain numbers."""
    tokens = [(row, column) for row, length in enumerate(LENGTHS) for column in range(length)]

    def numbers(name: str) -> list[float]:
        return [float(getattr(rows, name)[place]) for place in tokens]

    difference = [old - ref for old, ref in zip(numbers("old_logprobs"), numbers("ref_logprobs"), strict=True)]
    drift = [abs(a - b) for a, b in zip(numbers("rollout_logprobs"), numbers("old_logprobs"), strict=True)]
    residuals = [r - v for r, v in zip(numbers("returns"), numbers("values"), strict=True)]
    scores = rows.scores.tolist()
    answers = {tuple(rows.response_ids[row, :length].tolist()) for row, length in enumerate(LENGTHS)}
    expected = {
        "reward/score_mean": np.mean(scores),
        "reward/score_std": np.std(scores),
        "reward/score_min": -1.0,
        "reward/score_max": 2.0,
        "reward/kl_penalty": KL_COEF * sum(difference) / 4,
        "reward/total_mean": sum(numbers("rewards")) / 4,
        "kl/ref_k1": np.mean(difference),
        "kl/ref_k3": np.mean([math.exp(-d) - 1 + d for d in difference]),
        "value/explained_variance": 1 - np.var(residuals) / np.var(numbers("returns")),
        "rollout/logprob_diff_mean": np.mean(drift),
        "rollout/logprob_diff_max": max(drift),
        "answers/length_mean": sum(LENGTHS) / 4,
        "answers/length_max": 4.0,
        "answers/ended_share": 0.5,
        "answers/cut_share": 0.5,
        "answers/distinct_share": len(answers) / 4,
    }
    for name, field in (("advantage", "advantages"), ("return", "returns"), ("value", "values")):
        expected[f"{name}/mean"], expected[f"{name}/std"] = np.mean(numbers(field)), np.std(numbers(field))
    return expected


def test_every_metric_matches_a_loop_over_uneven_rows():
    rows = experience()
    found = experience_metrics(rows, KL_COEF) | drift_metrics(rows)
    assert found == pytest.approx(metrics_by_loop(rows), rel=1e-5, abs=1e-6)


def test_ids_in_padding_change_nothing():
    rows = experience()
    noise = torch.randint(0, 9, rows.response_ids.shape, generator=torch.Generator().manual_seed(7))
    polluted = experience(response_ids=torch.where(rows.response_mask, rows.response_ids, noise))
    assert experience_metrics(polluted, KL_COEF) == experience_metrics(rows, KL_COEF)


def test_distinct_answers_by_hand():
    # Rows of 4, 1, 0 and 3 tokens that all begin alike are four answers.
    assert experience_metrics(experience(response_ids=torch.full((4, 5), 3)), KL_COEF)["answers/distinct_share"] == 1.0
    same = experience(
        response_ids=torch.tensor([[1, 2, 8, 8, 8], [1, 2, 9, 9, 9], [1, 2, 7, 7, 7], [1, 3, 7, 7, 7]]),
        response_mask=torch.tensor([[True, True, False, False, False]]).expand(4, 5),
    )
    assert experience_metrics(same, KL_COEF)["answers/distinct_share"] == 0.5


def test_empty_answers_alone_give_finite_numbers():
    zeros = torch.zeros(4, 5)
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
    rows = experience(response_mask=torch.zeros(4, 5, dtype=torch.bool), **dict.fromkeys(names, zeros))
    metrics = experience_metrics(rows, KL_COEF) | drift_metrics(rows)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["answers/length_max"] == 0.0
    assert metrics["answers/distinct_share"] == 0.25
