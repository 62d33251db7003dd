"""The cache between generation and training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dschat_ppo.algorithms.masked import masked_whiten
from dschat_ppo.common import dist
from dschat_ppo.common.seeding import shared_generator
from dschat_ppo.types import Experience, concat_rows, pad_rows, select_rows


@dataclass(frozen=True)
class Update:
    """One optimizer step's experience on this rank.

    `num_tokens` is the count of valid response tokens over all micro-batches and ranks: the losses' denominator.
    """

    micro_batches: list[Experience]
    num_tokens: float


class MiniDataset:
    """Experience of one PPO step, served in shuffled mini-batches for several epochs.

    Every rank holds the rows of all ranks (they are small beside the models), and all shuffle alike. So the rows of an
    optimizer step, its denominator and the moments for whitening do not depend on the number of ranks, and shuffling
    moves single rows between micro-batches and ranks. An update never mixes two PPO steps.
    """

    def __init__(self, micro_batch: int, accumulation: int, seed: int):
        self._micro_batch = micro_batch
        self._accumulation = accumulation
        self._seed = seed
        self._parts: list[Experience] = []

    def add(self, experience: Experience) -> None:
        """Keep this rank's experience of one generation call."""
        self._parts.append(experience)

    def collect(self, whiten: bool) -> Experience:
        """All ranks' rows of this PPO step, with advantages whitened over all valid tokens; empties the cache.

        Collective: every rank calls it with the same number of rows.
        """
        rows = gather_rows(concat_rows(self._parts))
        self._parts = []
        if whiten:
            rows = replace(rows, advantages=masked_whiten(rows.advantages, rows.response_mask))
        return rows

    def updates(self, rows: Experience, ppo_epochs: int, step: int) -> Iterator[Update]:
        """Mini-batches of `rows` for `ppo_epochs` passes, shuffled anew in each, this rank's share of each.

        Args:
            rows: as given by `collect`; a multiple of the global mini-batch.
            ppo_epochs: passes.
            step: PPO step, part of the shuffle's seed.
        """
        count = rows.response_ids.shape[0]
        per_rank = self._micro_batch * self._accumulation
        per_update = per_rank * dist.world_size()
        if count % per_update:
            raise ValueError(f"{count} rows are not a multiple of {per_update} rows per update")
        for epoch in range(ppo_epochs):
            order = torch.randperm(count, generator=shared_generator(self._seed, step, epoch))
            for chosen in order.to(rows.response_ids.device).split(per_update):
                mine = chosen[dist.rank() * per_rank : (dist.rank() + 1) * per_rank]
                micro_batches = [select_rows(rows, part) for part in mine.split(self._micro_batch)]
                yield Update(micro_batches, max(1.0, float(rows.response_mask[chosen].sum())))


def gather_rows(rows: Experience) -> Experience:
    """The rows of all ranks, in rank order, padded to the longest. Collective."""
    lengths = torch.tensor([rows.prompt_ids.shape[1], rows.response_ids.shape[1]], device=rows.prompt_ids.device)
    prompt_length, response_length = dist.all_reduce(lengths, "max").tolist()
    padded = pad_rows(rows, prompt_length, response_length)

    def gathered(value: Tensor) -> Tensor:
        if value.dtype == torch.bool:  # not every backend carries booleans
            return dist.gather_cat(value.to(torch.uint8)).bool()
        return dist.gather_cat(value)

    return replace(padded, **{f.name: gathered(getattr(padded, f.name)) for f in fields(padded)})
