"""Step 2, ORPO, SimPO and CPO: train the language model on pairs of answers without a reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.algorithms.aggregation import masked_sum
from dschat_ppo.algorithms.reference_free_loss import cpo_pair_loss, orpo_pair_loss, simpo_pair_loss
from dschat_ppo.config.steps import PreferenceConfig
from dschat_ppo.config.supervised_flags import PreferenceFlags
from dschat_ppo.data.collators import AnswerBatch, collate_answers, real_rows
from dschat_ppo.models.forward import answer_logprobs
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.objective import Objective
from dschat_ppo.supervised.reward_objective import pair_size
from dschat_ppo.types import Model, to_device


def reference_free_loss(
    model: Model, batch: AnswerBatch, num_pairs: Tensor, sums: MetricSums, flags: PreferenceFlags
) -> Tensor:
    """Sum over pairs of the objective's loss, divided by `num_pairs` of the whole optimizer step. The NLL term is the
    mean of `-log p` over the tokens of the chosen answer; ORPO always has it, with the factor 1."""
    real = batch.pair_mask
    logprobs = answer_logprobs(model, batch.input_ids, batch.answer_mask)  # (2 B,): chosen, then rejected
    means = logprobs / batch.answer_mask.sum(dim=1).clamp_min(1)
    used = logprobs if flags.objective == "cpo" else means  # the others divide by the length of an answer
    chosen, rejected = used.chunk(2)  # (B,) each
    nll = -means.chunk(2)[0]  # (B,)
    if flags.objective == "orpo":
        contrast, nll_weight = orpo_pair_loss(chosen, rejected, flags.strength), 1.0
    elif flags.objective == "simpo":
        contrast, nll_weight = simpo_pair_loss(chosen, rejected, flags.strength, flags.simpo_gamma), flags.nll_weight
    else:
        contrast, nll_weight = cpo_pair_loss(chosen, rejected, flags.strength), flags.nll_weight
    losses = contrast + nll_weight * nll if nll_weight else contrast  # (B,)
    lead = chosen - rejected
    for name, values in (
        ("loss", losses),
        ("contrast", contrast),
        ("nll", nll),
        ("accuracy", (lead > 0).float()),
        ("margin", flags.strength * lead),
        ("chosen_reward", flags.strength * chosen),
        ("rejected_reward", flags.strength * rejected),
        ("chosen_logprob", logprobs.chunk(2)[0]),
        ("rejected_logprob", logprobs.chunk(2)[1]),
    ):
        sums.add_mean(name, values.detach(), real)
    sums.add_by_source("loss", losses, batch.data_sources, real)
    sums.add_by_source("accuracy", (lead > 0).float(), batch.data_sources, real)
    return (masked_sum(losses, real) / num_pairs).float()


def reference_free_objective(pad_id: int, device: torch.device, config: PreferenceConfig) -> Objective[AnswerBatch]:
    """Mean loss over pairs; nothing is computed before training."""

    def collate(rows: Dataset, indices: Sequence[int]) -> AnswerBatch:
        return to_device(collate_answers(rows, indices, pad_id), device)

    return Objective(
        collate, lambda batch: batch.pair_mask.sum(), pair_size, partial(reference_free_loss, flags=config.reward),
        real_rows, dict, ("loss", "accuracy", "margin"),
    )  # fmt: skip
