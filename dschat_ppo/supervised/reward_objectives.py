"""Step 2, the objective of a reward model on pairs of answers: `reward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.algorithms.supervised_losses import (
    bradley_terry_loss,
    bradley_terry_pair_loss,
    reward_centering_loss,
)
from dschat_ppo.config.supervised_config import PreferenceConfig
from dschat_ppo.config.supervised_flags import PreferenceFlags
from dschat_ppo.data.batches import GivenFor
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.data.supervised_batches import PairBatch, collate_pairs
from dschat_ppo.monitor.metric_sums import MetricSums, moments
from dschat_ppo.supervised.objective import Objective, collator_on_device, score_rows
from dschat_ppo.types import Model


def reward_loss(
    model: Model, batch: PairBatch, num_pairs: Tensor, sums: MetricSums, flags: PreferenceFlags
) -> Tensor:
    """Sum over pairs of the Bradley-Terry loss of the scores at the last real tokens, divided by
    `num_pairs` of the whole optimizer step."""
    scores = model(batch.input_ids, batch.lengths, last_only=True, given=batch.given)
    chosen, rejected = scores.chunk(2)
    real = batch.pair_mask
    margin = None
    if flags.use_margin:
        margin = batch.margin
    loss = bradley_terry_loss(chosen, rejected, real, num_pairs, margin)
    if flags.center_rewards_coef:
        centering = reward_centering_loss(chosen, rejected, real, num_pairs)
        sums.add_sum("centering_loss", centering * num_pairs, real.sum())
        loss = loss + flags.center_rewards_coef * centering
    sums.add_sum("loss", loss * num_pairs, real.sum())
    sums.add_mean("accuracy", (chosen > rejected).float(), real)
    sums.add_mean("margin", chosen - rejected, real)
    sums.add_mean("chosen_score", chosen, real)
    sums.add_mean("rejected_score", rejected, real)
    with torch.no_grad():  # by data set
        losses = bradley_terry_pair_loss(chosen, rejected, margin)  # (B,)
        losses = losses + flags.center_rewards_coef * (chosen + rejected) ** 2
        sums.add_by_source("loss", losses, batch.data_sources, real)
        sums.add_by_source("accuracy", (chosen > rejected).float(), batch.data_sources, real)
    return loss


def score_statistics(
    model: Model,
    rows: TokenRows,
    score: Callable[[Dataset, Sequence[int]], Tensor],
    batch_size: int,
) -> dict[str, float | str]:
    """Mean and spread of the scores of the rows for evaluation, or if there are none of those for
    training."""
    measured_rows = rows.eval
    if measured_rows is None:
        measured_rows = rows.at_hand
    mean, std = moments(score_rows(model, measured_rows, score, batch_size, "score statistics"))
    return {"reward_mean": mean, "reward_std": std}


def reward_objective(
    pad_id: int,
    device: torch.device,
    config: PreferenceConfig,
    given_for: GivenFor | None = None,
) -> Objective[PairBatch]:
    """Mean Bradley-Terry loss over pairs; `describe` measures mean and spread of the trained
    model's scores."""
    collate = collator_on_device(collate_pairs, device, pad_id, given_for)

    def score(model: Model, rows: Dataset, indices: Sequence[int]) -> Tensor:
        batch = collate(rows, indices)
        scores = model(batch.input_ids, batch.lengths, last_only=True, given=batch.given)
        return scores.view(2, -1).T  # (B, 2)

    def describe(model: Model, rows: TokenRows) -> dict[str, float | str]:
        return score_statistics(
            model, rows, partial(score, model), config.fit.per_device_eval_batch_size
        )

    return Objective(
        collate,
        lambda batch: batch.pair_mask,
        partial(reward_loss, flags=config.reward),
        ("loss", "accuracy", "margin"),
        rows_per_sample=2,
        describe=describe,
        score=score,
    )
