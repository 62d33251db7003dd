"""Histograms of a PPO step, by hand and by numpy."""

import numpy as np
import torch
from tiny_experience import experience

from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.rollout_metrics import RATIO_EDGES, bucket_counts, experience_histograms


def test_values_are_counted_in_their_buckets_where_the_mask_is_true():
    values = torch.tensor([[-5.0, 0.0, 0.5], [1.0, 9.0, 0.25]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    counts = bucket_counts(values, mask, (0.0, 0.5, 1.0, 2.0))
    assert counts.tolist() == [2, 1, 2], "the outer buckets hold what is beyond them"
    assert counts.dtype == torch.float64


def test_ratios_are_counted_as_numpy_does():
    assert list(RATIO_EDGES) == sorted(RATIO_EDGES)
    ratios = torch.rand(200, generator=torch.Generator().manual_seed(0)).double() * 2
    counts = bucket_counts(ratios, torch.ones(200, dtype=torch.bool), RATIO_EDGES)
    assert counts.tolist() == np.histogram(ratios.numpy(), RATIO_EDGES)[0].tolist()


def test_histograms_of_the_experience_are_over_real_tokens_and_all_rows():
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])
    rows = experience(advantages=torch.tensor([[-1.0, 1.0, 99.0], [99.0] * 3, [1.0, 99.0, 99.0]]), loss_mask=mask)
    found = experience_histograms(rows)
    advantage, length = found["policy/advantage"], found["rollout/length"]
    assert (advantage.edges[0], advantage.edges[-1], len(advantage.edges)) == (-1.0, 1.0, 51)
    assert (advantage.counts[0], advantage.counts[-1], sum(advantage.counts)) == (1, 2, 3)
    assert (length.edges[0], length.edges[-1], sum(length.counts)) == (0, 3, 3), "lengths of 3, 0 and 1 tokens"


def test_an_experience_without_tokens_in_the_loss_has_an_empty_histogram():
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    assert sum(experience_histograms(experience(loss_mask=nothing))["policy/advantage"].counts) == 0


def test_counts_add_up_over_updates_ranks_and_a_checkpoint(monkeypatch):
    first, second = MetricSums(), MetricSums()
    first.add_counts("ratio", torch.tensor([1.0, 2.0]).double())
    first.add_counts("ratio", torch.tensor([3.0, 0.0]).double())
    second.merge(first.scaled(0.5))
    second.add_counts("length", torch.tensor([7.0]).double())
    saved = [part.state_dict() for part in (first, second, second.emptied())]
    cpu = torch.device("cpu")
    assert MetricSums.restored(saved[:2], cpu).reduce_counts() == {"length": [7], "ratio": [6, 3]}
    assert MetricSums.restored(saved[2:], cpu).reduce_counts() == {"length": [0], "ratio": [0, 0]}
    older = {name: part for name, part in saved[0].items() if name != "counts"}
    assert MetricSums.restored([older], cpu).reduce_counts() == {}
    assert first.reduce() == {}, "they are no metrics"
    monkeypatch.setattr("dschat_ppo.monitor.metric_sums.gather_cat", lambda part: torch.cat([part, 10 * part]))
    assert second.reduce_counts() == {"length": [77], "ratio": [22, 11]}
