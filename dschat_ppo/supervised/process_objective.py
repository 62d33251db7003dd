"""Step 2, `--objective process`: train a reward model on labels of the steps of answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.algorithms.process_loss import step_losses
from dschat_ppo.config.steps import PreferenceConfig
from dschat_ppo.data.collators import StepBatch, collate_steps
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.forward import last_token_scores
from dschat_ppo.monitor.metric_sums import MetricSums, moments
from dschat_ppo.rewards.learned_reward import SEPARATOR
from dschat_ppo.supervised.objective import Objective, score_rows
from dschat_ppo.supervised.reward_objective import measured_rows
from dschat_ppo.types import Model, to_device


def process_loss(model: Model, batch: StepBatch, num_steps: Tensor, sums: MetricSums) -> Tensor:
    """Sum of the binary cross-entropy over the labelled steps, divided by `num_steps` of the whole optimizer step."""
    scores = model(batch.input_ids, batch.lengths, wanted=batch.label_mask)  # (N,)
    labels = batch.labels[batch.label_mask]  # (N,)
    losses = step_losses(scores, labels)
    good = labels >= 0.5
    right = ((scores > 0) == good).float()
    sums.add_mean("loss", losses.detach())
    sums.add_mean("accuracy", right)
    sums.add_mean_if_any("accuracy_good", right, good)
    sums.add_mean_if_any("accuracy_bad", right, ~good)
    sums.add_mean("good_share", good.float())
    if batch.data_sources is not None:
        of_steps = batch.data_sources.repeat_interleave(batch.label_mask.sum(dim=1))  # (N,)
        sums.add_by_source("loss", losses, of_steps)
        sums.add_by_source("accuracy", right, of_steps)
    return losses.sum() / num_steps


def step_size(batch: StepBatch) -> Tensor:
    """(2,) int64: rows of the batch that are not padding, and their tokens."""
    real = batch.label_mask.any(dim=1)
    return torch.stack([real.sum(), batch.lengths[real].sum()])


def process_objective(pad_id: int, device: torch.device, config: PreferenceConfig) -> Objective[StepBatch]:
    """Mean loss over labelled steps; `describe` measures mean and spread of the scores at the last tokens, which score
    an answer unless step 3 aggregates the scores of its steps."""

    def collate(rows: Dataset, indices: Sequence[int]) -> StepBatch:
        return to_device(collate_steps(rows, indices, pad_id), device)

    def describe(model: Model, rows: TokenRows) -> dict[str, float | str]:
        def score(rows: Dataset, indices: Sequence[int]) -> Tensor:
            batch = collate(rows, indices)
            return last_token_scores(model, batch.input_ids, batch.lengths).unsqueeze(1)  # (B, 1)

        size = config.fit.per_device_eval_batch_size
        mean, std = moments(score_rows(model, measured_rows(rows), score, size, "score statistics"))
        return {"reward_mean": mean, "reward_std": std, SEPARATOR: config.reward.separator}

    return Objective(
        collate, lambda batch: batch.label_mask.sum(), step_size, process_loss,
        lambda batch: batch.label_mask.any(dim=1), dict, ("loss", "accuracy"), describe=describe,
    )  # fmt: skip
