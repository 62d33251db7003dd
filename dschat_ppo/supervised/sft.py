"""Step 1: supervised fine-tuning on answers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.config.supervised_config import SFTConfig
from dschat_ppo.data.batches import SFTBatch, collate_sft
from dschat_ppo.models.kernel_selection import apply_memory_flags
from dschat_ppo.models.loading import load_causal_lm
from dschat_ppo.models.tokenizers import filler_id
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.run.start_and_end import tool_command
from dschat_ppo.supervised.objective import Objective, on_device
from dschat_ppo.supervised.supervised_run import begin_supervised_run, train_and_save
from dschat_ppo.supervised.trainer import SupervisedTrainer
from dschat_ppo.types import Model


def sft_loss(model: Model, batch: SFTBatch, num_tokens: Tensor, sums: MetricSums) -> Tensor:
    """Sum of `-log p(token)` over the batch's `loss_mask`, divided by `num_tokens` of the whole optimizer step."""
    logprobs, _ = model(batch.input_ids, batch.loss_mask)  # (N,) of the tokens in the mask
    sums.add_mean("loss", -logprobs.detach())
    if len(sums.sources) > 1:
        assert batch.data_sources is not None
        of_tokens = batch.data_sources.repeat_interleave(batch.loss_mask.sum(dim=1))  # (N,)
        sums.add_by_source("loss", -logprobs, of_tokens)
    return -logprobs.sum() / num_tokens


def with_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """Add `perplexity = exp(loss)`."""
    return {**metrics, "perplexity": math.exp(min(metrics["loss"], 700.0))}


def sft_objective(pad_id: int, train_on_prompt: bool, device: torch.device) -> Objective[SFTBatch]:
    """Mean cross entropy over the tokens of the answers."""
    collate = on_device(collate_sft, device, pad_id, train_on_prompt)
    return Objective(collate, lambda batch: batch.loss_mask, sft_loss, ("loss",), summary=with_perplexity)


def train_sft(config: SFTConfig) -> dict[str, Any]:
    """Run step 1; returns the contents of `result.json`."""
    fit, flags, title = config.fit, config.run, "step 1: supervised fine-tuning"
    run = begin_supervised_run(config, "SFT", title)
    resize = flags.resize_vocabulary
    model = PolicyModel(load_causal_lm(run.folder, flags.dtype, run.ds_config, fit.dropout, resize, run.adapter))
    apply_memory_flags(model, config.memory, fit.gradient_checkpointing)
    objective = sft_objective(filler_id(run.tokenizer), config.sft.train_on_prompt, run.device)
    trainer = SupervisedTrainer(model, run.ds_config, run.rows, objective, config, run.nonfinite)
    chat = tool_command("chat", ["--model", str(run.output)])
    return train_and_save(trainer, run, chat)
