"""What trackers receive of a PPO step besides its metrics: histograms, and answers as text."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from dschat_ppo.common import dist
from dschat_ppo.monitor.histograms import RATIO, RATIO_EDGES, experience_histograms
from dschat_ppo.monitor.trackers import Answer, Histogram, StepFigures
from dschat_ppo.ppo.score import texts_of
from dschat_ppo.ppo.state import PPOComponents
from dschat_ppo.types import Experience, select_rows


def step_figures(ppo: PPOComponents) -> StepFigures | None:
    """The figures of the PPO step in flight; None without trackers, without experience, and on ranks other than 0.

    Ratios are those of the tokens of all ranks that the policy loss counts, in all updates of the step. Collective with
    trackers.
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
    tokenizer = ppo.collection.reward_scorer.tokenizer
    return StepFigures(histograms, answers_of(experience, tokenizer, ppo.config.ppo.report_answers))


def answers_of(rows: Experience, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Answer]:
    """`count` rows as text (all, if they are fewer), spread evenly over the experience; special tokens are shown."""
    total = len(rows.scores)
    count = min(count, total)
    if count == 0:
        return []
    chosen = select_rows(rows, rows.groups.new_tensor([number * total // count for number in range(count)]))
    prompts = texts_of(tokenizer, chosen.prompt_ids, chosen.prompt_mask, skip_special_tokens=False)
    answers = texts_of(tokenizer, chosen.response_ids, chosen.response_mask, skip_special_tokens=False)
    scores, lengths = chosen.scores.tolist(), chosen.response_mask.sum(dim=1).tolist()
    return [Answer(*row) for row in zip(prompts, answers, scores, lengths, strict=True)]
