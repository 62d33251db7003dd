"""Answers of several models to the same prompts, their scores, and the accuracy of a reward model on pairs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat_ppo.algorithms.win_rate import accuracy_of, wilson_interval, win_shares
from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.config.reward_flags import RewardSourceFlags
from dschat_ppo.data.collators import collate_pairs, collate_prompts
from dschat_ppo.errors import UserError, in_one_line
from dschat_ppo.models.loading import load_causal_lm, load_config, load_sequence_classifier
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.ppo.evaluation import STREAM, Answered, answered_rows
from dschat_ppo.ppo.generate import end_ids, greedily
from dschat_ppo.ppo.score import RewardScorer
from dschat_ppo.rewards.build_rewards import build_sources
from dschat_ppo.rewards.learned_reward import (
    ModelReward,
    RetokenizedModelReward,
    StepScoring,
    most_tokens,
    saved_separator,
    scores_in_batches,
)
from dschat_ppo.rewards.reward_mixture import RewardMixture
from dschat_ppo.rewards.reward_source import RewardRequest, RewardSource
from dschat_ppo.rollout.generator import GenerationConfig, generate
from dschat_ppo.rollout.self_check import choose_engine
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria
from dschat_ppo.tools.chat_model import CheckedModel
from dschat_ppo.tools.sampling_settings import SamplingSettings
from dschat_ppo.types import Rollout, to_device

REWARD_FLAG = "--reward_model_name_or_path"
PAIRS_AT_A_TIME = 256


@dataclass(frozen=True)
class RewardModel:
    """A loaded reward model.

    Attributes:
        folder: local folder of the model.
        tokenizer: its own.
        model: scores rows.
        flags: length and aggregation of steps.
        batch_tokens: most tokens of a forward pass.
    """

    folder: str
    tokenizer: PreTrainedTokenizerBase
    model: ScalarModel
    flags: RewardSourceFlags
    batch_tokens: int

    @classmethod
    def load(
        cls, folder: str, tokenizer: PreTrainedTokenizerBase, dtype: str, flags: RewardSourceFlags, batch_tokens: int
    ) -> RewardModel:
        """Load it from a folder that has been checked."""
        classifier = load_sequence_classifier(folder, dtype, None, new_head=False)
        return cls(folder, tokenizer, ScalarModel(classifier).to(dist.device()).eval(), flags, batch_tokens)

    def source(self, tokenizer: PreTrainedTokenizerBase) -> RewardSource:
        """Scores answers of a model with this tokenizer: its tokens as they are, or else their text, as in step 3."""
        config, how, steps = load_config(self.folder, REWARD_FLAG), self.flags.process_reward, None
        shared = tokenizer.get_vocab() == self.tokenizer.get_vocab()
        if how is not None:
            steps = StepScoring(tokenizer if shared else self.tokenizer, saved_separator(config, self.folder), how)
        if shared:
            return ModelReward(self.model, self.batch_tokens, steps)
        return RetokenizedModelReward(
            self.model, self.tokenizer, most_tokens(config), dist.device(), self.batch_tokens, steps
        )


class Unscored:
    """The reward source of an evaluation without rewards: all scores are NaN."""

    name = "none"

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32, NaN."""
        return torch.full((len(request),), torch.nan)


@dataclass(frozen=True)
class Answers:
    """The answers of one model with one way of decoding.

    Attributes:
        model: its name, as the user gave it.
        label: its short name.
        decoding: "greedy" or "sampled".
        rows: one for each prompt; the scores are NaN if nothing scores them.
        sources: names of the reward sources.
        by_source: (prompts * n, K) fp32, see `Scores`.
        failed: answers whose reward function failed, or that no source scored.
    """

    model: str
    label: str
    decoding: str
    rows: list[Answered]
    sources: list[str]
    by_source: Tensor
    failed: int

    @property
    def scores(self) -> Tensor:
        """(prompts, n) fp64."""
        return torch.tensor([row.scores for row in self.rows], dtype=torch.float64)


@dataclass(frozen=True)
class Plan:
    """How models answer: `decodings` of "greedy" and "sampled", `samples` of the second to each prompt."""

    decodings: Sequence[str]
    samples: int
    batch_size: int
    settings: SamplingSettings
    dtype: str


def answers_of(
    checked: CheckedModel, prompts: Dataset, names: Sequence[str], plan: Plan, rewards: RewardSourceFlags | None,
    reward_model: RewardModel | None,
) -> list[Answers]:  # fmt: skip
    """Load a model and answer all prompts; one entry for each way of decoding.

    Answers depend on seed and prompt alone, not on batches; step 3 evaluates with the same seeds.

    Args:
        checked: the model.
        prompts: its token rows.
        names: of the data sets.
        plan: how to answer.
        rewards: reward sources; None for none.
        reward_model: the learned reward of `rewards`, if it has one.

    Raises:
        UserError: generation does not support the model; or see `RewardScorer`.
    """
    loaded: Any = load_causal_lm(checked.folder, plan.dtype, None)
    model = loaded.to(dist.device()).eval()
    stopping = StoppingCriteria(plan.settings.max_tokens, end_ids(checked.tokenizer, model))
    try:
        config = choose_engine(model, GenerationConfig(plan.settings.sampling, stopping, plan.samples))
    except RuntimeError as problem:
        raise UserError(f"{checked.flag} {checked.name}: {in_one_line(problem)}") from None
    learned = None if reward_model is None else reward_model.source(checked.tokenizer)
    with closing(build_sources(rewards, learned) if rewards else RewardMixture([(Unscored(), 1.0)])) as mixture:
        scorer = RewardScorer(mixture, prompts, checked.tokenizer)
        return [_answer(checked, model, names, plan, config, how, scorer) for how in plan.decodings]


def _answer(
    checked: CheckedModel, model: Any, names: Sequence[str], plan: Plan, config: GenerationConfig, decoding: str,
    scorer: RewardScorer,
) -> Answers:  # fmt: skip
    """The answers of a loaded model with one way of decoding."""
    config = replace(greedily(config), samples=1) if decoding == "greedy" else config
    each = f"{config.samples} answers to each" if config.samples > 1 else "one answer to each"
    logger().info(f"{checked.label}: {decoding}, {len(scorer.prompts)} prompts, {each}")
    prompts, rows, parts = scorer.prompts, list[Answered](), list[Tensor]()
    for first in range(0, len(prompts), plan.batch_size):
        indices = list(range(first, min(first + plan.batch_size, len(prompts))))
        seeds = row_seeds(first * config.samples, len(indices) * config.samples, plan.settings.seed, STREAM, 0, 0)
        batch = to_device(collate_prompts(prompts, indices, filler_id(checked.tokenizer)), dist.device())
        rollout = generate(model, batch, seeds.to(dist.device()), config)
        request = scorer.request(rollout, indices, 0)
        scores = scorer(request, rollout)
        of_prompts = [names[number] if len(names) > 1 else None for number in prompts[indices]["source"]]
        shown, sources = scorer.shown_prompts(rollout, len(indices)), scorer.mixture.names
        rows += answered_rows(indices, rollout, shown, request.responses, scores, None, of_prompts, sources)
        parts.append(scores.by_source.cpu())
    return Answers(
        checked.name, checked.label, decoding, rows, scorer.mixture.names, torch.cat(parts), scorer.count_failed_rows()
    )  # fmt: skip


@dataclass(frozen=True)
class Share:
    """A share of `count` prompts or pairs, with its 95 % confidence interval."""

    share: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, share: float, count: int) -> Share:
        """With Wilson's interval."""
        return cls(share, *wilson_interval(share, count), count)


def win_rate(answers: Answers, baseline: Answers) -> Share:
    """How often a model scores higher than another one, paired by prompt; a tie counts half."""
    shares = win_shares(answers.scores, baseline.scores)
    return Share.of(float(shares.mean()), len(shares))


def score_pairs(reward_model: RewardModel, rows: Dataset) -> Tensor:
    """(pairs, 2) fp32: the scores of the chosen and of the rejected answers."""
    parts = []
    for first in range(0, len(rows), PAIRS_AT_A_TIME):
        indices = range(first, min(first + PAIRS_AT_A_TIME, len(rows)))
        batch = to_device(collate_pairs(rows, indices, filler_id(reward_model.tokenizer)), dist.device())
        scores = scores_in_batches(reward_model.model, batch.input_ids, batch.lengths, reward_model.batch_tokens)
        parts.append(scores.view(2, -1).T.cpu())
    return torch.cat(parts)


def accuracies(scores: Tensor, sources: Sequence[int], names: Sequence[str]) -> dict[str, Share]:
    """Accuracy over all pairs, under the name "all", and of each data set if there are several.

    Args:
        scores: (pairs, 2), from `score_pairs`.
        sources: number of each pair's data set.
        names: of the data sets.
    """
    of = torch.tensor(sources)
    groups = {"all": torch.ones_like(of, dtype=torch.bool)}
    if len(names) > 1:
        groups |= {name: of == number for number, name in enumerate(names) if bool((of == number).any())}
    return {name: Share.of(accuracy_of(*scores[mask].unbind(dim=1)), int(mask.sum())) for name, mask in groups.items()}
