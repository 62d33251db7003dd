"""The rows of all ranks, and the mini-batches that optimizer steps train on; plain text for the PTX
loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from datasets import Dataset
from torch import Tensor

from dschat_ppo.algorithms.aggregation import Denominators
from dschat_ppo.common import dist
from dschat_ppo.common.phases import block
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.data.batches import IndexStream, SFTBatch, collate_sft
from dschat_ppo.models.micro_batches import RowPrompts, deal, split_by_tokens
from dschat_ppo.types import (
    Experience,
    RewardedRollout,
    ScoredRollout,
    pad_rows,
    row_lengths,
    select_rows,
    tensors_of,
    to_device,
)

Rewarded = TypeVar("Rewarded", RewardedRollout, Experience)


@dataclass(frozen=True)
class MiniBatch(Generic[Rewarded]):
    """One optimizer step's experience on this rank."""

    micro_batches: list[Rewarded]  # as many as on every other rank; (b, R) tensors
    denominators: Denominators  # of the policy loss: counts over all micro-batches and ranks
    value_tokens: float  # denominator of the value loss
    metric_weight: float  # 1 / number of micro-batches of all ranks


@dataclass(frozen=True)
class MiniDataset:
    """Experience of one PPO step, served in shuffled mini-batches for several epochs. Every rank
    holds the rows of all ranks and shuffles them in the same way, so the rows of an optimizer step,
    its denominators and the moments for whitening do not depend on the number of ranks."""

    rows_per_update: int  # of one optimizer step over all ranks
    micro_batch_tokens: int  # budget of `split_by_tokens`
    max_length: int  # longest answer in tokens, for the constant denominator
    seed: int
    # the models run the prompt of several rows once: its answers stay together
    shares_prompts: bool = False

    def minibatches(
        self, rows: Rewarded, ppo_epochs: int, step: int
    ) -> Iterator[MiniBatch[Rewarded]]:
        """This rank's share of each mini-batch of `rows`, which are those of all ranks and a
        multiple of `rows_per_update`, shuffled again in each of `ppo_epochs` passes. Every rank
        computes the shares of all ranks, so ranks with fewer micro-batches add empty ones without a
        collective: the shortest row, its response empty."""
        count = rows.response_ids.shape[0]
        if count % self.rows_per_update:
            raise ValueError(
                f"{count} rows are not a multiple of {self.rows_per_update} rows per update"
            )
        for epoch in range(ppo_epochs):
            order = torch.randperm(count, generator=shared_generator(self.seed, step, epoch))
            for index in order.to(rows.response_ids.device).split(self.rows_per_update):
                chosen = select_rows(rows, index)
                lengths = row_lengths(chosen)
                prompts = prompts_of(chosen) if self.shares_prompts else None
                shares = deal(lengths, dist.data_ranks(), prompts)
                budget = self.micro_batch_tokens
                splits = [
                    [
                        share[part]
                        for part in split_by_tokens(
                            lengths[share], budget, prompts and prompts.at(share)
                        )
                    ]
                    for share in shares
                ]
                micro_batches = [select_rows(chosen, part) for part in splits[dist.data_rank()]]
                most = max(len(parts) for parts in splits)
                shortest = select_rows(chosen, lengths.argmin().unsqueeze(0))
                nothing = torch.zeros_like(shortest.response_mask)
                empty = replace(shortest, response_mask=nothing, loss_mask=nothing)
                micro_batches += (most - len(micro_batches)) * [empty]
                counted = chosen.loss_mask.sum(dim=1)  # (n,) tokens in the policy loss
                numbers = torch.stack(
                    [counted.sum(), (counted > 0).sum(), chosen.response_mask.sum()]
                ).tolist()
                tokens, rows_counted, value_tokens = (max(1.0, float(number)) for number in numbers)
                denominators = Denominators(
                    tokens, rows_counted, constant=float(len(counted) * self.max_length)
                )
                yield MiniBatch(
                    micro_batches, denominators, value_tokens, 1 / (most * dist.data_ranks())
                )


def prompts_of(rows: ScoredRollout) -> RowPrompts:
    """Which rows answer the same prompt."""
    return RowPrompts(rows.groups, rows.prompt_mask.sum(dim=1))


def gather_rows(rows: ScoredRollout, of_group: bool = False) -> ScoredRollout:
    """The rows of all ranks (equally many each) in rank order, padded to the longest: (N, P) and
    (N, R). Collective. With `of_group` only of the ranks that share rows in training, where several
    do."""
    group = dist.sequence_group() if of_group else None
    lengths = torch.tensor(
        [rows.prompt_ids.shape[1], rows.response_ids.shape[1]], device=rows.prompt_ids.device
    )
    prompt_length, response_length = dist.all_reduce(lengths, "max").tolist()
    padded = pad_rows(rows, prompt_length, response_length)
    named = tensors_of(padded)
    with block("gather rows"):
        gathered = dist.gather_together([*named.values()], group)
    return replace(padded, **dict(zip(named, gathered, strict=True)))


@dataclass(eq=False)
class TextBatches:
    """Serves to each optimizer step as many blocks of text as the step has answers."""

    rows: Dataset  # of `data.prepare.text_blocks`
    rows_per_update: int  # over all ranks; a multiple of `micro_batch` times the ranks
    micro_batch: int
    seed: int
    pad_id: int  # any id; padding is masked
    device: torch.device

    def __post_init__(self) -> None:
        self.stream = IndexStream(self.rows, self.seed)

    def take(self) -> tuple[list[SFTBatch], Tensor]:
        """This rank's micro-batches of the next optimizer step, and the number of tokens of all
        ranks. Collective."""
        taken = self.stream.take(self.rows_per_update)[dist.data_rank() :: dist.data_ranks()]
        parts = [
            taken[start : start + self.micro_batch]
            for start in range(0, len(taken), self.micro_batch)
        ]
        batches = [
            to_device(collate_sft(self.rows, part, self.pad_id, True), self.device)
            for part in parts
        ]
        counts = torch.stack([batch.loss_mask.sum() for batch in batches])
        return batches, dist.all_reduce(counts.sum()) // dist.sequence_ranks()  # each block once
