"""Histograms and answers of a PPO step for trackers."""

from types import SimpleNamespace

import pytest
import torch
from tiny_experience import experience

from dschat_ppo.monitor.histograms import RATIO, RATIO_EDGES, bucket_counts
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.step_figures import answers_of, step_figures


class Tokenizer:
    def batch_decode(self, rows, skip_special_tokens):
        assert not skip_special_tokens
        return [" ".join(map(str, torch.as_tensor(row).tolist())) for row in rows]


@pytest.mark.parametrize(("count", "rows"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 1, 2])])
def test_answers_are_spread_over_the_rows(count, rows):
    found = answers_of(experience(), Tokenizer(), count)
    expected = [("7", "0 1 2", 1.0, 3), ("8 9", "", 2.0, 0), ("5 6", "6", 3.0, 1)]
    assert [(row.prompt, row.answer, row.score, row.tokens) for row in found] == [expected[row] for row in rows]


def ppo_of(trackers=("tensorboard",), rows=None) -> SimpleNamespace:
    sums = MetricSums()
    sums.add_counts(RATIO, bucket_counts(torch.ones(4), torch.ones(4, dtype=torch.bool), RATIO_EDGES))
    config = SimpleNamespace(run=SimpleNamespace(trackers=trackers), ppo=SimpleNamespace(report_answers=1))
    collection = SimpleNamespace(reward_scorer=SimpleNamespace(tokenizer=Tokenizer()))
    state = SimpleNamespace(experience=rows, sums=sums)
    return SimpleNamespace(config=config, collection=collection, state=state)


def test_figures_have_the_ratios_of_the_updates(monkeypatch):
    found = step_figures(ppo_of(rows=experience()))
    assert set(found.histograms) == {"policy/advantage", "policy/ratio", "rollout/length"}
    ratios = found.histograms["policy/ratio"]
    assert ratios.counts[RATIO_EDGES.index(0.999)] == sum(ratios.counts) == 4
    assert len(found.answers) == 1


def test_without_updates_there_is_no_histogram_of_ratios():
    ppo = ppo_of(rows=experience())
    ppo.state.sums = MetricSums()
    assert set(step_figures(ppo).histograms) == {"policy/advantage", "rollout/length"}


def test_there_are_no_figures_without_trackers_without_experience_and_on_other_ranks(monkeypatch):
    without = ppo_of(trackers=(), rows=experience())
    without.state.sums = None  # it is not reduced
    assert step_figures(without) is None
    assert step_figures(ppo_of(rows=None)) is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(MetricSums, "reduce_counts", lambda sums: calls.append(sums) or {})
    calls = []
    assert step_figures(ppo_of(rows=experience())) is None
    assert len(calls) == 1, "every rank takes part"
