"""The objective `process` of step 2: a reward model that scores each step of an answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor

from dschat_ppo.config.supervised_config import PreferenceConfig
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.features.process_rewards.batches import StepBatch, collate_steps
from dschat_ppo.features.process_rewards.flags import StepFlags
from dschat_ppo.features.process_rewards.scoring import SEPARATOR
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.objective import BuiltObjective, Objective, collator_on_device
from dschat_ppo.supervised.reward_objectives import score_statistics
from dschat_ppo.types import Model


def step_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """`-y log sigmoid(s) - (1 - y) log sigmoid(-s)` of each step: binary cross-entropy (Wang et al.
    2024, eq. 2). `scores` (N,), s; `labels` (N,) in [0, 1], y: a number between them is the
    probability that the step is right."""
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")


def process_loss(model: Model, batch: StepBatch, num_steps: Tensor, sums: MetricSums) -> Tensor:
    """Sum of the binary cross-entropy over the labelled steps, divided by `num_steps` of the whole
    optimizer step."""
    scores = model(batch.input_ids, batch.lengths, read_mask=batch.label_mask)  # (N,)
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


def process_objective(
    pad_id: int, device: torch.device, config: PreferenceConfig
) -> Objective[StepBatch]:
    """Mean loss over labelled steps; `describe` measures mean and spread of the scores at the last
    tokens, which score an answer unless step 3 aggregates the scores of its steps."""
    collate = collator_on_device(collate_steps, device, pad_id)

    def describe(model: Model, rows: TokenRows) -> dict[str, float | str]:
        def score(rows: Dataset, indices: Sequence[int]) -> Tensor:
            batch = collate(rows, indices)
            return model(batch.input_ids, batch.lengths, last_only=True).unsqueeze(1)  # (B, 1)

        statistics = score_statistics(model, rows, score, config.fit.per_device_eval_batch_size)
        return statistics | {SEPARATOR: config.of(StepFlags).separator}

    return Objective(
        collate,
        lambda batch: batch.label_mask,
        process_loss,
        ("loss", "accuracy"),
        describe=describe,
    )


OBJECTIVES = {"process": BuiltObjective(process_objective, StepBatch)}
