"""Step 2, objectives of the language model itself: DPO and its variants, KTO on single answers,
ORPO, SimPO and CPO.

The reference of DPO and KTO is the model before training. Its log-probs are computed once, before
the first update, and stored in the rows, so there is no second model in memory.

KTO compares the reward of an answer with a baseline, the KL from the reference, which it estimates
on mismatched rows: a prompt with the answer to another prompt. A row keeps its mismatched answer
for the whole run, as in TRL, so the reference's log-prob of it is computed once too. The estimate
is the mean over all rows of an optimizer step, so it does not depend on the number of ranks and
micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.algorithms.aggregation import masked_sum
from dschat_ppo.algorithms.supervised_losses import (
    PAIR_LOSSES,
    balanced_weights,
    chosen_nll_loss,
    cpo_pair_loss,
    kto_baseline,
    kto_losses,
    log_ratios,
    orpo_pair_loss,
    preference_loss,
    simpo_pair_loss,
)
from dschat_ppo.common import dist
from dschat_ppo.common.dist import main_rank_of_node_first
from dschat_ppo.common.heartbeat import heartbeat
from dschat_ppo.common.logging import logger
from dschat_ppo.config.supervised_config import PreferenceConfig
from dschat_ppo.config.supervised_flags import PreferenceFlags
from dschat_ppo.data.batches import GivenFor
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.data.supervised_batches import (
    OTHER_ROW,
    REF_LOGPROBS,
    LabelledBatch,
    PairBatch,
    collate_labelled,
    collate_pairs,
)
from dschat_ppo.models.backbone import unwrap
from dschat_ppo.models.given_embeddings import GivenEmbeddings
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.supervised.objective import Objective, UsedRows, collator_on_device, score_rows
from dschat_ppo.types import Model


def answer_logprobs(
    engine: Model, input_ids: Tensor, answer_mask: Tensor, given: GivenEmbeddings | None = None
) -> Tensor:
    """Log-prob of each row's whole answer: the sum over its tokens, (B,) fp64, with gradient if
    gradients are on. `input_ids` (B, T) right-padded; `answer_mask` (B, T) bool, False in the first
    column; a row without a True has the sum 0. The sum is in fp64 because training uses small
    differences of such sums. `given`: in place of the embeddings of some ids."""
    logprobs, _ = engine(input_ids, answer_mask, given=given)
    empty = torch.zeros(answer_mask.shape, dtype=torch.float64, device=input_ids.device)
    return empty.masked_scatter(answer_mask, logprobs.double()).sum(dim=1)


def dpo_loss(
    model: Model, batch: PairBatch, num_pairs: Tensor, sums: MetricSums, flags: PreferenceFlags
) -> Tensor:
    """Sum over pairs of the objective's loss of D, the difference between the log-ratios of policy
    to reference of the chosen and the rejected answer, divided by `num_pairs` of the whole
    optimizer step."""
    assert batch.ref_logprobs is not None
    real = batch.pair_mask
    # (2 B,) each: chosen, then rejected
    num_tokens = batch.answer_mask.sum(dim=1)
    logprobs = answer_logprobs(model, batch.input_ids, batch.answer_mask, batch.given)
    chosen_ratios, rejected_ratios = log_ratios(
        logprobs, batch.ref_logprobs, num_tokens, flags.objective
    )
    lead = chosen_ratios - rejected_ratios
    loss = preference_loss(
        flags.objective, lead, real, num_pairs, flags.strength, flags.label_smoothing
    )
    chosen_logprobs, rejected_logprobs = logprobs.chunk(2)
    chosen_tokens = num_tokens.chunk(2)[0]
    if flags.objective == "dpo_nll":
        nll = chosen_nll_loss(chosen_logprobs, chosen_tokens, real, num_pairs)
        sums.add_sum("nll", nll * num_pairs, real.sum())
        loss = loss + flags.nll_weight * nll
    with torch.no_grad():  # by data set
        losses = PAIR_LOSSES[flags.objective](lead, flags.strength, flags.label_smoothing)  # (B,)
        if flags.objective == "dpo_nll":
            losses = losses - flags.nll_weight * chosen_logprobs / chosen_tokens.clamp_min(1)
        sums.add_by_source("loss", losses, batch.data_sources, real)
        sums.add_by_source("accuracy", (lead > 0).float(), batch.data_sources, real)
    sums.add_sum("loss", loss * num_pairs, real.sum())
    sums.add_mean("accuracy", (lead > 0).float(), real)
    sums.add_mean("margin", flags.strength * lead, real)
    sums.add_mean("chosen_reward", flags.strength * chosen_ratios, real)
    sums.add_mean("rejected_reward", flags.strength * rejected_ratios, real)
    sums.add_mean("chosen_logprob", chosen_logprobs, real)
    sums.add_mean("rejected_logprob", rejected_logprobs, real)
    return loss.float()


def with_references(
    model: Model,
    rows: TokenRows,
    used: UsedRows,
    score: Callable[[Model, Dataset, Sequence[int]], Tensor],
    batch_size: int,
) -> TokenRows:
    """Add the column of the two log-probs of each row under the current model, without dropout:
    what `score` computes, (B, 2). Rows that are not used have NaN. Collective."""

    def with_logprobs(split: Any, used_rows: Sequence[int] | None) -> Dataset:
        """`used_rows`: row indices; None: all."""
        if used_rows is None:
            used_rows = range(len(split))
        logprobs = np.full((len(split), 2), np.nan)
        if len(used_rows):
            scores = score_rows(
                model, split, partial(score, model), batch_size, "reference log-probs", used_rows
            )
            logprobs[np.asarray(used_rows)] = scores.double().cpu().numpy()
        with main_rank_of_node_first():
            return split.add_column(REF_LOGPROBS, list(logprobs))

    evaluation = None
    if rows.eval is not None:
        evaluation = with_logprobs(rows.eval, used.eval)
    return replace(rows, train=with_logprobs(rows.train, used.train), eval=evaluation)


def dpo_objective(
    pad_id: int,
    device: torch.device,
    config: PreferenceConfig,
    given_for: GivenFor | None = None,
) -> Objective[PairBatch]:
    """Mean loss over pairs; `prepare` adds the log-probs of the reference to the rows."""
    collate = collator_on_device(collate_pairs, device, pad_id, given_for)

    def score(model: Model, rows: Dataset, indices: Sequence[int]) -> Tensor:
        batch = collate(rows, indices)
        logprobs = answer_logprobs(model, batch.input_ids, batch.answer_mask, batch.given)
        return logprobs.view(2, -1).T  # (B, 2)

    def prepare(model: Model, rows: TokenRows, used: UsedRows) -> TokenRows:
        return with_references(model, rows, used, score, config.fit.per_device_eval_batch_size)

    return Objective(
        collate,
        lambda batch: batch.pair_mask,
        partial(dpo_loss, flags=config.reward),
        ("loss", "accuracy", "margin"),
        rows_per_sample=2,
        prepare=prepare,
    )


MOST_RATIO = 4 / 3  # of the weights of desirable to undesirable answers, all together


def kto_loss(
    model: Model, batch: LabelledBatch, num_rows: Tensor, sums: MetricSums, flags: PreferenceFlags
) -> Tensor:
    """Sum over answers of the KTO loss, divided by `num_rows` of the whole optimizer step."""
    assert batch.ref_logprobs is not None and batch.baseline is not None
    real = batch.row_mask
    desirable = batch.desirable
    # (B,) fp64
    logprobs = answer_logprobs(model, batch.input_ids, batch.answer_mask, batch.given)
    ratios = logprobs - batch.ref_logprobs[:, 0]
    weights = (flags.kto_desirable_weight, flags.kto_undesirable_weight)
    losses = kto_losses(ratios, desirable, batch.baseline, flags.strength, *weights)
    right = ((ratios > batch.baseline) == desirable).float()
    rewards = (flags.strength * ratios).detach()
    sums.add_mean("loss", losses.detach(), real)
    sums.add_mean("kl", batch.baseline, real)
    sums.add_mean("accuracy", right, real)
    for name, mask in (("chosen", real & desirable), ("rejected", real & ~desirable)):
        sums.add_mean_if_any(f"{name}_reward", rewards, mask)
        sums.add_mean_if_any(f"{name}_logprob", logprobs, mask)
    sums.add_by_source("loss", losses, batch.data_sources, real)
    sums.add_by_source("accuracy", right, batch.data_sources, real)
    return (masked_sum(losses, real) / num_rows).float()


@torch.no_grad()
def with_baseline(model: Model, batches: list[LabelledBatch]) -> list[LabelledBatch]:
    """Add the KL estimate over the mismatched rows of all these batches (equally many on every
    rank), without dropout: the model is in eval mode meanwhile. Collective."""
    was_training = getattr(model, "training", True)
    model.eval()
    # sum of log-ratios, and rows
    total = torch.zeros(2, dtype=torch.float64, device=batches[0].input_ids.device)
    for batch in batches:
        assert batch.ref_logprobs is not None
        logprobs = answer_logprobs(model, batch.other_ids, batch.other_mask, batch.other_given)
        ratios = logprobs - batch.ref_logprobs[:, 1]
        total += torch.stack([masked_sum(ratios, batch.row_mask), batch.row_mask.sum().double()])
        heartbeat()
    model.train(was_training)
    log_ratios, rows = dist.all_reduce(total).unbind()
    baseline = kto_baseline(log_ratios, rows.clamp_min(1))
    return [
        replace(batch, baseline=baseline.expand(len(batch.row_mask)).clone()) for batch in batches
    ]


def mismatched_rows(rows: Dataset, given_by: Sequence[str] = ()) -> np.ndarray:
    """For each row the row whose answer it borrows: one with another prompt, (n,) int64. In the
    order of prompts (rows of a prompt together, prompts as they come first) each row borrows from
    the one so many rows before it as the most frequent prompt has: every answer is borrowed once.
    If all rows have one prompt, each borrows from the row before; if more than half have it, some
    of these borrow from each other. `given_by`: columns that, beside the ids, say what a prompt
    is."""
    prompt_indices: dict[int, int] = {}  # hash of a prompt -> its index, as prompts come first
    prompts: list[int] = []  # of each row
    columns = ["prompt_ids", *given_by]
    prompt_rows = rows.select_columns(columns)
    prompt_rows = prompt_rows.with_format("numpy", ["prompt_ids"], output_all_columns=True)
    for chunk in prompt_rows.iter(1000):
        for ids, *given_values in zip(*(chunk[name] for name in columns), strict=True):
            key = hash((np.asarray(ids, dtype=np.int64).tobytes(), str(given_values)))
            prompts.append(prompt_indices.setdefault(key, len(prompt_indices)))
    order = np.argsort(prompts, kind="stable")
    distance = max(Counter(prompts).values(), default=0)
    if distance == len(order):
        distance = 1
    lenders = np.empty(len(order), dtype=np.int64)
    lenders[order] = np.roll(order, distance)
    return lenders


def log_balance(rows: Dataset, flags: PreferenceFlags) -> None:
    """Log how many answers are desirable and undesirable; warn if the weights do not balance
    them."""
    chunks = rows.select_columns(["label"]).with_format("numpy").iter(10**6)
    labels = np.concatenate([chunk["label"] for chunk in chunks])
    desirable = int((labels > 0.5).sum())
    undesirable = len(labels) - desirable
    counts = f"kto: {desirable} desirable and {undesirable} undesirable answers"
    if not desirable or not undesirable:
        logger().warning(f"{counts}: KTO needs both to learn what distinguishes them")
        return
    weights = (flags.kto_desirable_weight, flags.kto_undesirable_weight)
    ratio, balanced = balanced_weights(desirable, undesirable, weights)
    counts = f"{counts}; together they weigh {ratio:.3g} : 1"
    if 1 <= round(ratio, 2) <= round(MOST_RATIO, 2):
        logger().info(counts)
        return
    logger().warning(
        f"{counts}; 1 to 1.33 is recommended: --kto_desirable_weight {balanced:.3g} to"
        f" {MOST_RATIO * balanced:.3g} with --kto_undesirable_weight {weights[1]:g}"
    )


def kto_objective(
    pad_id: int,
    device: torch.device,
    config: PreferenceConfig,
    given_for: GivenFor | None = None,
) -> Objective[LabelledBatch]:
    """Mean loss over answers; `prepare` adds the log-probs of the reference to the rows."""
    max_seq_len = config.fit.max_seq_len
    collate = collator_on_device(collate_labelled, device, pad_id, max_seq_len, given_for)

    def score(model: Model, rows: Dataset, indices: Sequence[int]) -> Tensor:
        batch = collate(rows, indices)
        logprobs = answer_logprobs(model, batch.input_ids, batch.answer_mask, batch.given)
        mismatched = answer_logprobs(model, batch.other_ids, batch.other_mask, batch.other_given)
        return torch.stack([logprobs, mismatched], dim=1)  # (B, 2)

    def prepare(model: Model, rows: TokenRows, used: UsedRows) -> TokenRows:
        assert isinstance(rows.train, Dataset)
        log_balance(rows.train, config.reward)
        evaluation = rows.eval
        given_by: tuple[str, ...] = ()
        source = getattr(unwrap(model), "given_source", None)
        if source is not None:
            given_by = source.columns
        with main_rank_of_node_first():
            lenders = mismatched_rows(rows.train, given_by)
            train = rows.train.add_column(OTHER_ROW, lenders)
            if evaluation is not None:
                lenders = mismatched_rows(evaluation, given_by)
                evaluation = evaluation.add_column(OTHER_ROW, lenders)
        rows = replace(rows, train=train, eval=evaluation)
        return with_references(model, rows, used, score, config.fit.per_device_eval_batch_size)

    def with_margin(metrics: dict[str, float]) -> dict[str, float]:
        if not {"chosen_reward", "rejected_reward"} <= metrics.keys():  # answers of one kind only
            return metrics
        return {**metrics, "margin": metrics["chosen_reward"] - metrics["rejected_reward"]}

    return Objective(
        collate,
        lambda batch: batch.row_mask,
        partial(kto_loss, flags=config.reward),
        ("loss", "accuracy", "kl"),
        summary=with_margin,
        prepare=prepare,
        complete=with_baseline,
    )


def reference_free_loss(
    model: Model, batch: PairBatch, num_pairs: Tensor, sums: MetricSums, flags: PreferenceFlags
) -> Tensor:
    """Sum over pairs of the objective's loss, divided by `num_pairs` of the whole optimizer step.
    The NLL term is the mean of `-log p` over the tokens of the chosen answer; ORPO always has it,
    with the factor 1."""
    real = batch.pair_mask
    # (2 B,): chosen, then rejected
    logprobs = answer_logprobs(model, batch.input_ids, batch.answer_mask, batch.given)
    means = logprobs / batch.answer_mask.sum(dim=1).clamp_min(1)
    log_likelihoods = means
    if flags.objective == "cpo":  # the others divide by the length of an answer
        log_likelihoods = logprobs
    chosen, rejected = log_likelihoods.chunk(2)  # (B,) each
    nll = -means.chunk(2)[0]  # (B,)
    nll_weight = flags.nll_weight
    if flags.objective == "orpo":
        contrast = orpo_pair_loss(chosen, rejected, flags.strength)  # (B,)
        nll_weight = 1.0
    elif flags.objective == "simpo":
        contrast = simpo_pair_loss(chosen, rejected, flags.strength, flags.simpo_gamma)
    else:
        contrast = cpo_pair_loss(chosen, rejected, flags.strength)
    losses = contrast
    if nll_weight:
        losses = contrast + nll_weight * nll
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


def reference_free_objective(
    pad_id: int,
    device: torch.device,
    config: PreferenceConfig,
    given_for: GivenFor | None = None,
) -> Objective[PairBatch]:
    """Mean loss over pairs; nothing is computed before training."""
    return Objective(
        collator_on_device(collate_pairs, device, pad_id, given_for),
        lambda batch: batch.pair_mask,
        partial(reference_free_loss, flags=config.reward),
        ("loss", "accuracy", "margin"),
        rows_per_sample=2,
    )
