"""Step 2: a reward model from pairs of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.algorithms.preference_loss import bradley_terry_loss
from dschat_ppo.common.phases import announce
from dschat_ppo.config.steps import RewardConfig
from dschat_ppo.data.collators import PairBatch, collate_pairs
from dschat_ppo.data.prepare import prepare
from dschat_ppo.models.forward import last_token_scores
from dschat_ppo.models.loading import (
    check_length,
    check_vocabulary,
    filler_id,
    load_config,
    load_sequence_classifier,
    load_tokenizer,
    model_folder,
)
from dschat_ppo.models.scalar_head import ScalarModel
from dschat_ppo.monitor.metrics import MetricSums
from dschat_ppo.trainers.fit import Fit, Objective, fit_ds_config
from dschat_ppo.trainers.setup import begin, open_outputs
from dschat_ppo.types import to_device


def reward_loss(engine: Any, batch: PairBatch, num_pairs: Tensor, sums: MetricSums) -> Tensor:
    """Bradley-Terry on the scores at the last real tokens, divided by `num_pairs` of the whole optimizer step."""
    chosen, rejected = last_token_scores(engine, batch.input_ids, batch.lengths).chunk(2)
    real = batch.pair_mask
    loss = bradley_terry_loss(chosen, rejected, real, num_pairs, batch.margin)
    sums.add_sum("loss", loss * num_pairs, real.sum())
    sums.add_mean("accuracy", (chosen > rejected).float(), real)
    sums.add_mean("margin", chosen - rejected, real)
    sums.add_mean("chosen_score", chosen, real)
    sums.add_mean("rejected_score", rejected, real)
    return loss


def reward_objective(pad_id: int, device: torch.device) -> Objective[PairBatch]:
    """Mean Bradley-Terry loss over pairs."""

    def collate(rows: Dataset, indices: Sequence[int]) -> PairBatch:
        return to_device(collate_pairs(rows, indices, pad_id), device)

    return Objective(collate, lambda batch: batch.pair_mask.sum(), reward_loss, dict, ("loss", "accuracy", "margin"))


def train_reward(config: RewardConfig) -> dict[str, Any]:
    """Run step 2; returns the contents of `result.json`."""
    device, output = begin("reward", config, config.run, [config.fit.model_name_or_path])
    fit = config.fit
    folder = model_folder(fit.model_name_or_path, "--model_name_or_path")
    tokenizer = load_tokenizer(folder, "--model_name_or_path")
    check_vocabulary(tokenizer, load_config(folder, "--model_name_or_path"), "--model_name_or_path", folder)
    check_length(folder, fit.max_seq_len, "--max_seq_len")
    announce("prepare data")
    rows = prepare("preference", tokenizer, config.data, fit.max_seq_len, None, fit.eval_data_path, fit.eval_fraction)
    announce("load models")
    open_outputs(output, config, config.run)
    ds_config = fit_ds_config(fit, config.run)
    model = ScalarModel(
        load_sequence_classifier(folder, config.run.dtype, ds_config, new_head=True, dropout=fit.dropout)
    )
    if fit.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    objective = reward_objective(filler_id(tokenizer), device)
    return Fit(model, ds_config, rows, objective, fit, config.run).run(output, tokenizer, "reward model")
