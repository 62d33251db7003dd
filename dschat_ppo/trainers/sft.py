"""Step 1: supervised fine-tuning on responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.common.phases import announce
from dschat_ppo.config.batch_plan import plan_fit
from dschat_ppo.config.steps import SFTConfig
from dschat_ppo.data.collators import SFTBatch, collate_sft
from dschat_ppo.data.prepare import prepare
from dschat_ppo.models.loading import (
    check_length,
    check_vocabulary,
    filler_id,
    load_causal_lm,
    load_config,
    load_tokenizer,
    model_folder,
)
from dschat_ppo.models.policy import PolicyModel
from dschat_ppo.monitor.metrics import MetricSums
from dschat_ppo.trainers.dumps import Dumps
from dschat_ppo.trainers.fit import Fit, Objective, amounts_of, fit_ds_config, fit_inputs, train_to_the_end
from dschat_ppo.trainers.nonfinite import NonFiniteGuard
from dschat_ppo.trainers.session import open_session
from dschat_ppo.trainers.setup import begin
from dschat_ppo.types import to_device


def sft_loss(engine: Any, batch: SFTBatch, num_tokens: Tensor, sums: MetricSums) -> Tensor:
    """Sum of `-log p(token)` over the batch's `loss_mask`, divided by `num_tokens` of the whole optimizer step."""
    logprobs, _ = engine(batch.input_ids, batch.loss_mask)
    sums.add_mean("loss", -logprobs.detach())
    return -logprobs.sum() / num_tokens


def with_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """Adds `perplexity = exp(loss)`."""
    return {**metrics, "perplexity": math.exp(min(metrics["loss"], 700.0))}


def sft_objective(pad_id: int, train_on_prompt: bool, device: torch.device) -> Objective[SFTBatch]:
    """Token-mean cross entropy of responses."""

    def collate(rows: Dataset, indices: Sequence[int]) -> SFTBatch:
        return to_device(collate_sft(rows, indices, pad_id, train_on_prompt), device)

    return Objective(collate, lambda batch: batch.loss_mask.sum(), sft_loss, with_perplexity, ("loss",))


def train_sft(config: SFTConfig) -> dict[str, Any]:
    """Run step 1; returns the contents of `result.json`."""
    device, output = begin("sft", config, config.run, [config.fit.model_name_or_path])
    fit, sft = config.fit, config.sft
    folder = model_folder(fit.model_name_or_path, "--model_name_or_path")
    tokenizer = load_tokenizer(folder, "--model_name_or_path")
    check_vocabulary(tokenizer, load_config(folder, "--model_name_or_path"), "--model_name_or_path", folder)
    check_length(folder, fit.max_seq_len, "--max_seq_len")
    announce("prepare data")
    rows = prepare(
        "sft",
        tokenizer,
        config.data,
        fit.max_seq_len,
        sft.sft_only_data_path,
        fit.eval_data_path,
        fit.eval_fraction,
    )
    plan = plan_fit(fit, len(rows.train), dist.world_size())
    session = open_session("sft", output, config, fit_inputs(rows, folder, config.run), amounts_of(plan))
    announce("load models")
    ds_config = fit_ds_config(fit, config.run)
    model = PolicyModel(load_causal_lm(folder, config.run.dtype, ds_config, fit.dropout))
    if fit.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    objective = sft_objective(filler_id(tokenizer), sft.train_on_prompt, device)
    guard = NonFiniteGuard(config.safety, Dumps("sft", config, tokenizer))
    trainer = Fit(model, ds_config, rows, objective, fit, config.run, guard)
    return train_to_the_end(trainer, session, tokenizer, "SFT")
