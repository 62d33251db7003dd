"""Sums of metrics over micro-batches and ranks, and the metrics of an experience: by hand, numpy,
and loops over tokens."""

import math

import numpy as np
import pytest
import torch

from dschat_ppo.common.phases import PhaseClock
from dschat_ppo.monitor import metric_sums, rollout_metrics
from dschat_ppo.monitor.metric_sums import MetricSums, explained_variance
from dschat_ppo.monitor.rollout_metrics import drift_metrics, experience_metrics, phase_metrics
from dschat_ppo.types import Experience, record_of

CPU = torch.device("cpu")


def uneven_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(values, mask) of micro-batches with 7, 1 and 0 valid tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = ((4, 3), (0, 1), (0, 0))
    return [
        (
            torch.randn(2, 4, generator=generator) + i,
            torch.arange(4) < torch.tensor(rows).unsqueeze(1),
        )
        for i, rows in enumerate(lengths)
    ]


def all_kept() -> np.ndarray:
    return np.concatenate(
        [values.numpy().astype(np.float64)[mask.numpy()] for values, mask in uneven_batches()]
    )


def test_mean_is_weighted_by_tokens_not_by_micro_batches():
    sums = MetricSums()
    for values, mask in uneven_batches():
        sums.add_mean("x", values, mask)
        sums.add_max("top", values, mask)
        sums.add_sum("sum", values[mask].sum(), mask.sum())
    mean = pytest.approx(all_kept().mean(), rel=1e-6)
    assert sums.reduce() == {"x": mean, "top": all_kept().max(), "sum": mean}
    naive = np.mean([values[mask].mean().item() for values, mask in uneven_batches()[:2]])
    assert abs(naive - all_kept().mean()) > 0.1


def test_values_outside_the_mask_are_ignored():
    sums = MetricSums()
    values, mask = (
        torch.tensor([1.0, float("nan"), float("inf")]),
        torch.tensor([True, False, False]),
    )
    sums.add_mean("mean", values, mask)
    sums.add_max("max", values, mask)
    assert sums.reduce() == {"mean": 1.0, "max": 1.0}


def test_a_mean_of_some_values_has_no_entry_without_them():
    sums, none = MetricSums(), torch.zeros(2, dtype=torch.bool)
    values = torch.tensor([1.0, 4.0], requires_grad=True)
    sums.add_mean_if_any("some", values, ~none)
    sums.add_mean_if_any("some", values * 3, torch.tensor([False, True]))
    sums.add_mean_if_any("no", values, none)  # and no metric has a gradient
    assert sums.reduce() == {"some": pytest.approx(17 / 3)}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], 1.0),  # exact
        ([11.0, 12.0, 13.0], 1.0),  # an offset does not matter
        ([5.0, 5.0, 5.0], 0.0),  # a constant explains nothing
        ([3.0, 2.0, 1.0], -3.0),  # residuals -2, 0, 2 vary four times as much
    ],
)
def test_explained_variance_by_hand(values, expected):
    assert float(
        explained_variance(torch.tensor(values), torch.tensor([1.0, 2.0, 3.0]))
    ) == pytest.approx(expected)
    assert explained_variance(torch.tensor(values), torch.full((3,), 2.0)) == 0.0
    assert explained_variance(torch.tensor([]), torch.tensor([])) == 0.0


def test_sums_of_several_ranks_become_those_of_one_and_a_new_rank_changes_no_value():
    parts = [MetricSums() for _ in range(3)]
    for number, part in enumerate(parts):
        part.add_mean("mean", torch.arange(number + 1.0))  # 0 | 0 1 | 0 1 2
        part.add_max("most", torch.tensor([number * (-1.0) ** number]))  # 0, -1, 2
    states = [part.state_dict() for part in parts]
    assert MetricSums.restored(states[1:2], CPU).reduce() == {"mean": 0.5, "most": -1.0}
    together = MetricSums.restored(states, CPU)
    assert together.reduce() == {"mean": 4 / 6, "most": 2.0}
    new = together.scaled(0.0)
    assert new.reduce() == {"mean": 0.0, "most": 2.0}, "all names, nothing counted"
    for unchanged in (MetricSums.restored([*states, new.state_dict()], CPU), together):
        unchanged.merge(new)
        assert unchanged.reduce() == {"mean": 4 / 6, "most": 2.0}
    new.add_mean("mean", torch.tensor([10.0]))
    new.add_max("most", torch.tensor([-9.0]))
    assert new.reduce() == {"mean": 10.0, "most": 2.0}
    together.merge(new)
    assert together.reduce() == {"mean": 14 / 7, "most": 2.0}
    assert MetricSums.restored([], CPU).reduce() == {}


def by_source() -> MetricSums:
    """Two micro-batches of rows of `b` and `c`; one of rows of `a` would have to come."""
    sums = MetricSums(["a", "b", "c"])
    sums.add_mean("loss", torch.tensor([1.0, 2.0, 6.0]))
    sums.add_by_source("loss", torch.tensor([1.0, 2.0, 6.0]), torch.tensor([2, 1, 1]))
    sums.add_by_source(
        "loss", torch.tensor([4.0, 9.0]), torch.tensor([2, 0]), torch.tensor([True, False])
    )
    return sums


def test_means_by_data_set_by_hand_and_none_without_values():
    assert by_source().reduce() == {"loss": 3.0, "loss/b": 4.0, "loss/c": 2.5}


def test_a_rank_without_rows_of_a_data_set_joins_the_one_reduction(monkeypatch):
    """This rank has rows of `b` and `c`, the other one has rows of `a` and `b`."""
    other, mine, calls = MetricSums(["a", "b", "c"]), by_source(), []
    other.add_mean("loss", torch.tensor([7.0, 12.0]))
    other.add_by_source("loss", torch.tensor([7.0, 12.0]), torch.tensor([0, 1]))

    def gather_cat(tensor):
        calls.append(tensor)
        return torch.cat(calls)

    other.add_max("top", torch.tensor([-2.0]))
    mine.add_max("top", torch.tensor([-3.0]))
    monkeypatch.setattr(metric_sums, "gather_cat", gather_cat)
    other.reduce()
    assert mine.reduce() == {
        "loss": 5.6,
        "loss/a": 7.0,
        "loss/b": 20 / 3,
        "loss/c": 2.5,
        "top": -2.0,
    }
    assert [tuple(call.shape) for call in calls] == [
        (1, 9),
        (1, 9),
    ], "sums, counts and maxima at once"


def test_means_by_data_set_are_merged_and_restored():
    sums = by_source()
    sums.merge(MetricSums.restored([by_source().state_dict()], CPU))
    assert sums.reduce() == by_source().reduce()
    assert sums.scaled(0.0).reduce() == {"loss": 0.0}
    means_alone = {"means": by_source().state_dict()["means"]}
    assert MetricSums.restored([means_alone], CPU).reduce() == {"loss": 3.0}


def test_scaled_sums_have_the_same_means_and_less_weight_beside_others():
    shared, alone = MetricSums(["a", "b"]), MetricSums()
    shared.add_mean("x", torch.tensor([1.0, 3.0]))
    shared.add_max("top", torch.tensor([5.0]))
    shared.add_by_source("y", torch.tensor([1.0, 3.0]), torch.tensor([0, 1]))
    half = shared.scaled(0.5)
    assert half.reduce() == shared.reduce() == {"x": 2.0, "top": 5.0, "y/a": 1.0, "y/b": 3.0}
    alone.add_mean("x", torch.tensor([8.0]))
    # 2 values of mean 2 that two ranks count, and one of 8: (2 + 8) / 2 on this rank
    half.merge(alone)
    assert half.reduce()["x"] == 5.0


LENGTHS = (4, 1, 0, 3)
KL_COEF = 0.3
SOURCES = ("model", "rule")


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
        "entropies": None,
        "kl": per_token(),
        "values": per_token(),
        "source_scores": torch.tensor([[1.0, 2.0], [0.0, 4.0], [0.5, 0.0], [0.5, -2.0]]),
        "baselines": None,
        "groups": torch.tensor([3, 3, 5, 5]),
        "loss_mask": mask & torch.tensor([True, True, True, False]).unsqueeze(1),
        "loss_weights": per_token(),
        "selected": None,
        "scores": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "rewards": per_token(),
        "advantages": per_token(),
        "returns": per_token(),
    }
    columns = {**fields, **changes}
    return record_of(Experience, {name: c for name, c in columns.items() if c is not None})


def metrics_by_loop(rows: Experience) -> dict[str, float]:
    """Each metric from lists of plain numbers."""
    tokens = [(row, column) for row, length in enumerate(LENGTHS) for column in range(length)]

    def numbers(name: str) -> list[float]:
        return [float(getattr(rows, name)[place]) for place in tokens]

    difference = [
        old - ref for old, ref in zip(numbers("old_logprobs"), numbers("ref_logprobs"), strict=True)
    ]
    drift = [
        abs(a - b)
        for a, b in zip(numbers("rollout_logprobs"), numbers("old_logprobs"), strict=True)
    ]
    residuals = [r - v for r, v in zip(numbers("returns"), numbers("values"), strict=True)]
    scores = rows.scores.tolist()
    answers = {
        tuple(rows.response_ids[row, :length].tolist()) for row, length in enumerate(LENGTHS)
    }
    expected = {
        "reward/score_mean": np.mean(scores),
        "reward/score_std": np.std(scores),
        "reward/score_min": -1.0,
        "reward/score_max": 2.0,
        "reward/kl_penalty": KL_COEF * sum(numbers("kl")) / 4,
        "reward/model_mean": 0.5,
        "reward/rule_mean": 1.0,
        "reward/model_std": 0.125**0.5,
        "reward/rule_std": 5**0.5,
        "reward/equal_groups_share": 0.0,
        "policy/counted_share": 5 / 8,  # the last row, of three tokens, is not in the loss
        "policy/loss_weight_mean": np.mean(numbers("loss_weights")),
        "reward/total_mean": sum(numbers("rewards")) / 4,
        "kl/ref_k1": np.mean(difference),
        "kl/ref_k3": np.mean([math.exp(-d) - 1 + d for d in difference]),
        "value/explained_variance": 1 - np.var(residuals) / np.var(numbers("returns")),
        "rollout/logprob_diff_mean": np.mean(drift),
        "rollout/logprob_diff_max": max(drift),
        "rollout/count": 4,
        "rollout/length_mean": sum(LENGTHS) / 4,
        "rollout/length_max": 4.0,
        "rollout/ended_share": 0.5,
        "rollout/cut_share": 0.5,
        "rollout/distinct_share": len(answers) / 4,
    }
    for name, field in (
        ("policy/advantage_", "advantages"),
        ("value/return_", "returns"),
        ("value/", "values"),
    ):
        expected[f"{name}mean"], expected[f"{name}std"] = (
            np.mean(numbers(field)),
            np.std(numbers(field)),
        )
    return expected


def test_every_metric_matches_a_loop_over_uneven_rows():
    rows = experience()
    found = experience_metrics(rows, KL_COEF, SOURCES) | drift_metrics(rows)
    assert found == pytest.approx(metrics_by_loop(rows), rel=1e-5, abs=1e-6)


def test_a_batch_of_empty_answers_has_finite_metrics():
    zeros = torch.zeros(4, 5)
    names = (
        "rollout_logprobs old_logprobs ref_logprobs values rewards advantages returns kl"
        " loss_weights".split()
    )
    rows = experience(
        response_mask=torch.zeros(4, 5, dtype=torch.bool), **dict.fromkeys(names, zeros)
    )
    metrics = experience_metrics(rows, KL_COEF, SOURCES) | drift_metrics(rows)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rollout/length_max"] == 0.0
    assert metrics["rollout/distinct_share"] == 0.25


def test_without_critic_and_reference_their_metrics_are_absent():
    rows = experience(
        values=None,
        ref_logprobs=None,
        kl=None,
        groups=torch.arange(4),
        source_scores=torch.ones(4, 1),
    )
    found = experience_metrics(rows, 0.0, ("model",))
    whole = experience_metrics(experience(), KL_COEF, SOURCES)
    lacking = {name for name in whole if name not in found}
    assert lacking == {
        "kl/ref_k1",
        "kl/ref_k3",
        "reward/kl_penalty",
        "value/explained_variance",
        "value/mean",
        "value/std",
        "reward/model_mean",
        "reward/rule_mean",
        "reward/model_std",
        "reward/rule_std",
        "reward/equal_groups_share",
    }


def test_the_share_of_clipped_scores_and_what_is_left_of_their_differences():
    scores = torch.tensor([7.0, 9.0, 2.0, 3.0])
    rows = experience(scores=scores, groups=torch.tensor([1, 1, 2, 2]))
    plain = experience_metrics(rows, KL_COEF, SOURCES)
    found = experience_metrics(rows, KL_COEF, SOURCES, clip=(scores, scores.clamp(-5, 5)))
    changed = {name: value for name, value in found.items() if plain.get(name) != value}
    assert changed == pytest.approx(
        {
            "reward/clipped_share": 0.5,
            "reward/clipped_std": np.std([5, 5, 2, 3]),
            "reward/equal_groups_share": 0.5,
        }
    )


def test_a_source_is_measured_over_the_rows_that_it_scores():
    nan = float("nan")
    scores = torch.tensor([[1.0, nan, nan], [nan, nan, 4.0], [0.0, nan, nan], [0.5, nan, -2.0]])
    found = experience_metrics(experience(source_scores=scores), KL_COEF, ("a", "b", "c"))
    by_source = {
        name: value
        for name, value in found.items()
        if name.startswith(("reward/a", "reward/b", "reward/c"))
    }
    assert by_source == {
        "reward/a_mean": 0.5,
        "reward/a_std": pytest.approx((0.5 / 3) ** 0.5),
        "reward/a_share": 0.75,
        "reward/b_share": 0.0,
        "reward/c_mean": 1.0,
        "reward/c_std": 3.0,
        "reward/c_share": 0.5,
    }
    alone = experience_metrics(experience(source_scores=scores[:, :1]), KL_COEF, ("a",))
    assert alone["reward/a_share"] == 0.75 and "reward/a_mean" not in alone
    assert "reward/a_share" not in experience_metrics(experience(), KL_COEF, ("a", "b"))


def test_scores_lengths_and_kl_by_data_set_and_none_of_a_data_set_without_rows():
    rows = experience(data_sources=torch.tensor([2, 0, 2, 0]))
    whole = experience_metrics(experience(), KL_COEF, SOURCES)
    found = experience_metrics(rows, KL_COEF, SOURCES, ("maths", "code", "chat"))
    difference = rows.old_logprobs - rows.ref_logprobs
    assert {name: found[name] for name in found if name not in whole} == pytest.approx(
        {
            "reward/score_mean/maths": -0.5,
            "reward/score_mean/chat": 1.25,
            "rollout/length_mean/maths": 2.0,
            "rollout/length_mean/chat": 2.0,
            "kl/ref_k1/maths": float(torch.cat([difference[1, :1], difference[3, :3]]).mean()),
            "kl/ref_k1/chat": float(difference[0, :4].mean()),
        },
        rel=1e-5,
    )
    assert experience_metrics(rows, KL_COEF, SOURCES, ("one",)) == whole
    no_reference = experience(data_sources=rows.data_sources, ref_logprobs=None, kl=None)
    found = experience_metrics(no_reference, KL_COEF, SOURCES, ("maths", "code", "chat"))
    assert not any(name.startswith("kl/") for name in found)


def test_a_phase_of_one_rank_has_seconds_tokens_and_memory():
    clock = PhaseClock({"train": 2.0}, {"train": 6.0}, {"train": 1.5})
    plain = {"time/train": 2.0, "time/train_tokens_per_s": 3.0, "memory/train_peak_gib": 1.5}
    assert phase_metrics(clock, torch.device("cpu")) == plain


def test_several_ranks_have_an_imbalance_of_time_and_tokens(monkeypatch):
    clock = PhaseClock(
        {"rollout": 6.0, "train": 2.0},
        {"rollout": 5.0, "train": 9.0},
        {"rollout": 1.0, "train": 1.0},
    )
    other = torch.tensor([[[2.0, 1.0, 15.0], [2.0, 1.0, 9.0]]], dtype=torch.float64)
    monkeypatch.setattr(rollout_metrics, "gather_cat", lambda mine: torch.cat([mine, other]))
    found = phase_metrics(clock, torch.device("cpu"))
    assert {name: value for name, value in found.items() if name.endswith("imbalance")} == {
        "time/rollout_imbalance": 1.5,
        "time/rollout_tokens_imbalance": 1.5,
        "time/train_imbalance": 1.0,
    }
