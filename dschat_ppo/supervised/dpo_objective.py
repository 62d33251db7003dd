"""Step 2, DPO and its variants: train the language model itself on pairs of answers.

The reference is the model before training. Its log-probs are computed once, before the first update, and stored in the
rows, so there is no second model in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.algorithms.preference_loss import PAIR_LOSSES, chosen_nll_loss, log_ratios, preference_loss
from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.config.steps import PreferenceConfig
from dschat_ppo.config.supervised_flags import PreferenceFlags
from dschat_ppo.data.collators import PreferenceBatch, collate_answers, collate_preferences, real_rows, with_reference
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.forward import answer_logprobs
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.objective import Objective, score_rows
from dschat_ppo.supervised.reward_objective import pair_size
from dschat_ppo.types import Model, to_device


def dpo_loss(
    model: Model, batch: PreferenceBatch, num_pairs: Tensor, sums: MetricSums, flags: PreferenceFlags
) -> Tensor:
    """Sum over pairs of the objective's loss of D, the difference between the log-ratios of policy to reference of the
    chosen and the rejected answer, divided by `num_pairs` of the whole optimizer step."""
    real, num_tokens = batch.pair_mask, batch.answer_mask.sum(dim=1)
    logprobs = answer_logprobs(model, batch.input_ids, batch.answer_mask)  # (2 B,): chosen, then rejected
    chosen, rejected = log_ratios(logprobs, batch.ref_logprobs, num_tokens, flags.objective)
    lead = chosen - rejected
    loss = preference_loss(flags.objective, lead, real, num_pairs, flags.strength, flags.label_smoothing)
    chosen_logprobs, rejected_logprobs = logprobs.chunk(2)
    if flags.objective == "dpo_nll":
        nll = chosen_nll_loss(chosen_logprobs, num_tokens.chunk(2)[0], real, num_pairs)
        sums.add_sum("nll", nll * num_pairs, real.sum())
        loss = loss + flags.nll_weight * nll
    with torch.no_grad():  # by data set
        losses = PAIR_LOSSES[flags.objective](lead, flags.strength, flags.label_smoothing)  # (B,)
        if flags.objective == "dpo_nll":
            losses = losses - flags.nll_weight * chosen_logprobs / num_tokens.chunk(2)[0].clamp_min(1)
        sums.add_by_source("loss", losses, batch.data_sources, real)
        sums.add_by_source("accuracy", (lead > 0).float(), batch.data_sources, real)
    sums.add_sum("loss", loss * num_pairs, real.sum())
    sums.add_mean("accuracy", (lead > 0).float(), real)
    sums.add_mean("margin", flags.strength * lead, real)
    sums.add_mean("chosen_reward", flags.strength * chosen, real)
    sums.add_mean("rejected_reward", flags.strength * rejected, real)
    sums.add_mean("chosen_logprob", chosen_logprobs, real)
    sums.add_mean("rejected_logprob", rejected_logprobs, real)
    return loss.float()


def add_reference(model: Model, rows: Dataset, pad_id: int, device: torch.device, batch_size: int) -> Dataset:
    """Add the log-probs of both answers under the current model, without dropout, to the rows. Collective."""

    def score(rows: Dataset, indices: Sequence[int]) -> Tensor:
        batch = to_device(collate_answers(rows, indices, pad_id), device)
        return answer_logprobs(model, batch.input_ids, batch.answer_mask).view(2, -1).T  # (B, 2)

    logprobs = score_rows(model, rows, score, batch_size, "reference log-probs")
    with main_rank_of_node_first():
        return with_reference(rows, logprobs)


def dpo_objective(pad_id: int, device: torch.device, config: PreferenceConfig) -> Objective[PreferenceBatch]:
    """Mean loss over pairs; `prepare` adds the log-probs of the reference to the rows."""

    def collate(rows: Dataset, indices: Sequence[int]) -> PreferenceBatch:
        return to_device(collate_preferences(rows, indices, pad_id), device)

    def prepare(model: Model, rows: TokenRows) -> TokenRows:
        size = config.fit.per_device_eval_batch_size
        train = add_reference(model, rows.train, pad_id, device, size)
        held_out = None if rows.eval is None else add_reference(model, rows.eval, pad_id, device, size)
        return replace(rows, train=train, eval=held_out)

    return Objective(
        collate, lambda batch: batch.pair_mask.sum(), pair_size, partial(dpo_loss, flags=config.reward),
        real_rows, dict,
        ("loss", "accuracy", "margin"), prepare=prepare,
    )  # fmt: skip
