"""Histograms and answers of a PPO step for trackers."""

from types import SimpleNamespace

import torch
from tiny_experience import experience

from dschat_ppo.monitor.histograms import RATIO, RATIO_EDGES, bucket_counts
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.monitor.trackers import Answer
from dschat_ppo.ppo.step_figures import step_figures

SAMPLE = {"step": 1, "prompt": "7", "answer": "0 1 2", "score": 1.0, "length": 3, "ended": "eos"}


def ppo_of(trackers=("tensorboard",), rows=None) -> SimpleNamespace:
    sums = MetricSums()
    sums.add_counts(RATIO, bucket_counts(torch.ones(4), torch.ones(4, dtype=torch.bool), RATIO_EDGES))
    config = SimpleNamespace(run=SimpleNamespace(trackers=trackers))
    state = SimpleNamespace(experience=rows, sums=sums)
    return SimpleNamespace(config=config, state=state)


def test_figures_have_the_ratios_of_the_updates(monkeypatch):
    found = step_figures(ppo_of(rows=experience()), [SAMPLE])
    assert set(found.histograms) == {"policy/advantage", "policy/ratio", "rollout/length"}
    ratios = found.histograms["policy/ratio"]
    assert ratios.counts[RATIO_EDGES.index(0.999)] == sum(ratios.counts) == 4
    assert found.answers == [Answer("7", "0 1 2", 1.0, 3)]


def test_without_updates_there_is_no_histogram_of_ratios():
    ppo = ppo_of(rows=experience())
    ppo.state.sums = MetricSums()
    assert set(step_figures(ppo, []).histograms) == {"policy/advantage", "rollout/length"}


def test_there_are_no_figures_without_trackers_without_experience_and_on_other_ranks(monkeypatch):
    without = ppo_of(trackers=(), rows=experience())
    without.state.sums = None  # it is not reduced
    assert step_figures(without, [SAMPLE]) is None
    assert step_figures(ppo_of(rows=None), []) is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(MetricSums, "reduce_counts", lambda sums: calls.append(sums) or {})
    calls = []
    assert step_figures(ppo_of(rows=experience()), []) is None
    assert len(calls) == 1, "every rank takes part"
