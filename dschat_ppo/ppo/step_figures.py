"""What trackers receive of a PPO step besides its metrics: histograms, and answers as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dschat_ppo.common import dist
from dschat_ppo.monitor.histograms import RATIO, RATIO_EDGES, experience_histograms
from dschat_ppo.monitor.trackers import Answer, Histogram, StepFigures
from dschat_ppo.ppo.state import PPOComponents


def step_figures(ppo: PPOComponents, samples: Sequence[dict[str, Any]]) -> StepFigures | None:
    """The figures of the PPO step in flight; None without trackers, without experience, and on ranks other than 0.

    `samples` are the answers that the step writes to `samples.jsonl`. Ratios are those of the tokens of all ranks that
    the policy loss counts, in all updates of the step. Collective with trackers.
    """
    experience = ppo.state.experience
    if not ppo.config.run.trackers:
        return None
    counts = ppo.state.sums.reduce_counts()
    if experience is None or not dist.is_main():
        return None
    histograms = experience_histograms(experience)
    if RATIO in counts:
        histograms[RATIO] = Histogram(RATIO_EDGES, counts[RATIO])
    answers = [Answer(line["prompt"], line["answer"], line["score"], line["length"]) for line in samples]
    return StepFigures(histograms, answers)
