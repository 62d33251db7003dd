"""The rows of all ranks, and the mini-batches that optimizer steps train on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.common import dist
from dschat_ppo.common.phases import block
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.models.micro_batches import RowPrompts, deal, padded_contexts, split_by_tokens
from dschat_ppo.models.step_passes import StepPasses, on_host
from dschat_ppo.types import (
    Experience,
    ForwardedRollout,
    RewardedRollout,
    ScoredRollout,
    pad_rows,
    row_lengths,
    select_rows,
    tensors_of,
    with_columns,
)

Forwarded = TypeVar("Forwarded", ForwardedRollout, ScoredRollout)
Rewarded = TypeVar("Rewarded", RewardedRollout, Experience)


@dataclass(frozen=True)
class MiniBatch(Generic[Rewarded]):
    """One optimizer step's experience on this rank."""

    micro_batches: list[Rewarded]  # as many as on every other rank; (b, R) tensors
    denominators: Denominators  # of the policy loss: counts over all micro-batches and ranks
    value_tokens: float  # denominator of the value loss
    metric_weight: float  # 1 / number of micro-batches of all ranks
    passes: StepPasses = field(default_factory=StepPasses)  # over the micro-batches


@dataclass(frozen=True)
class MiniDataset:
    """Experience of one PPO step, served in shuffled mini-batches for several epochs. Every rank
    holds the rows of all ranks and shuffles them in the same way, so the rows of an optimizer step,
    its denominators and the moments for whitening do not depend on the number of ranks."""

    rows_per_update: int  # of one optimizer step over all ranks
    micro_batch_tokens: int  # budget of `split_by_tokens`
    max_length: int  # longest response in tokens, for the constant denominator
    seed: int
    # the models run the prompt of several rows once: its responses stay together
    shares_prompts: bool = False
    packs_rows: bool = True  # the models run rows without padding

    def minibatches(
        self, rows: Rewarded, ppo_epochs: int, step: int
    ) -> Iterator[MiniBatch[Rewarded]]:
        """This rank's share of each mini-batch of `rows`, shuffled again in each of `ppo_epochs`
        passes. A mini-batch whose rows all have left their groups is left out.

        Args:
            rows: (N, ...), those of all ranks, a multiple of `rows_per_update`.
            ppo_epochs: passes over the rows.
            step: the PPO step, which the order derives from.

        Raises:
            ValueError: the number of rows is not a multiple of `rows_per_update`.
        """
        count = rows.response_ids.shape[0]
        if count % self.rows_per_update:
            raise ValueError(
                f"{count} rows are not a multiple of {self.rows_per_update} rows per update"
            )
        for epoch in range(ppo_epochs):
            order = torch.randperm(count, generator=shared_generator(self.seed, step, epoch))
            order = order.to(rows.response_ids.device)
            for row_indices in order.split(self.rows_per_update):
                update_rows = select_rows(rows, row_indices)
                if update_rows.has_score.any():
                    yield self._minibatch(update_rows)

    def _minibatch(self, rows: Rewarded) -> MiniBatch[Rewarded]:
        """This rank's share of one optimizer step's rows (n, ...), which are those of all ranks.

        Every rank computes the shares of all ranks, so ranks with fewer micro-batches add empty
        ones without a collective: the shortest row, its response empty.
        """
        lengths = row_lengths(rows)
        prompts = None
        if self.shares_prompts:
            prompts = prompts_of(rows)
        contexts = None
        if not self.packs_rows:
            contexts = padded_contexts(rows)
        splits = []  # for each rank the row indices of its micro-batches
        for rank_rows in deal(lengths, dist.data_ranks(), prompts):
            rank_prompts = prompts and prompts.at(rank_rows)
            rank_contexts = contexts and contexts.at(rank_rows)
            pieces = split_by_tokens(
                lengths[rank_rows], self.micro_batch_tokens, rank_prompts, rank_contexts
            )
            splits.append([rank_rows[piece] for piece in pieces])
        most_micro_batches = max(len(micro_batches) for micro_batches in splits)

        host_rows = on_host(rows)
        micro_batches = []
        host_copies = []
        for indices in splits[dist.data_rank()]:
            micro_batches.append(select_rows(rows, indices))
            host_copies.append(select_rows(host_rows, indices.cpu()))
        shortest = select_rows(rows, lengths.argmin().unsqueeze(0))
        empty_mask = torch.zeros_like(shortest.response_mask)
        empty = replace(shortest, response_mask=empty_mask, loss_mask=empty_mask)
        missing = most_micro_batches - len(micro_batches)
        micro_batches += missing * [empty]
        host_copies += missing * [on_host(empty)]

        loss_tokens = rows.loss_mask.sum(dim=1)  # (n,) tokens in the policy loss
        counts = torch.stack([loss_tokens.sum(), (loss_tokens > 0).sum(), rows.response_mask.sum()])
        at_least_one = [max(1.0, float(count)) for count in counts.tolist()]
        policy_tokens, policy_rows, value_tokens = at_least_one
        longest_possible = float(rows.has_score.sum() * self.max_length)
        return MiniBatch(
            micro_batches,
            Denominators(policy_tokens, policy_rows, constant=longest_possible),
            value_tokens,
            metric_weight=1 / (most_micro_batches * dist.data_ranks()),
            passes=StepPasses(micro_batches, host_copies),
        )


def prompts_of(rows: ForwardedRollout) -> RowPrompts:
    """Which rows are responses to the same prompt. Episodes of an agent may begin with other
    prompts than the rest of their group."""
    groups = rows.groups
    if rows.contexts is not None:
        ids = torch.where(rows.prompt_mask, rows.prompt_ids, -1)
        groups = ids.unique(dim=0, return_inverse=True)[1]
    return RowPrompts(groups, rows.prompt_mask.sum(dim=1))


def gather_rows(rows: Forwarded, of_group: bool = False) -> Forwarded:
    """The rows of all ranks (equally many each) in rank order, padded to the longest: (N, P) and
    (N, R). Collective. With `of_group` only of the ranks that share rows in training, where several
    do."""
    group = None
    if of_group:
        group = dist.row_group()
    widths = torch.tensor(
        [rows.prompt_ids.shape[1], rows.response_ids.shape[1]], device=rows.prompt_ids.device
    )
    prompt_length, response_length = dist.all_reduce(widths, "max").tolist()
    padded = pad_rows(rows, prompt_length, response_length)
    columns: dict[str, Tensor] = tensors_of(padded)
    with block("gather rows"):
        gathered = dist.gather_together([*columns.values()], group)
    return with_columns(padded, dict(zip(columns, gathered, strict=True)))
