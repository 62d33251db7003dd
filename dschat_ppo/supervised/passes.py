"""Steps 1 and 2 on a CPU: a micro-batch runs in passes of as many tokens as step 3 has at a time.

A larger pass leaves the caches, and the system takes the memory of its activations back after each
use. A GPU runs a micro-batch in one pass, and so do lazy rows, whose lengths are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset

from dschat_ppo.common import dist
from dschat_ppo.config.batch_plan import tokens_on_cpu
from dschat_ppo.data.batches import PADDING_ROW
from dschat_ppo.data.lazy_rows import TrainingRows
from dschat_ppo.data.supervised_batches import sample_tokens
from dschat_ppo.models.micro_batches import split_by_tokens
from dschat_ppo.supervised.objective import Batch, MicroBatches


@dataclass(frozen=True)
class Passes:
    """How micro-batches are divided into passes."""

    tokens: np.ndarray  # (n,) int64, of each training sample
    budget: int  # most tokens of a pass; a longer sample is one by itself

    def divide(self, micro_batches: MicroBatches) -> MicroBatches:
        """Row numbers of the passes of a step. A micro-batch within the budget stays as it is; rows
        of another are divided by length, so that padding is short."""
        passes: MicroBatches = []
        for indices in micro_batches:
            # a padding row, -1, is a copy of row 0
            lengths = torch.from_numpy(self.tokens[np.maximum(indices, 0)])
            if int(lengths.sum()) <= self.budget:
                passes.append(indices)
                continue
            for positions in split_by_tokens(lengths, self.budget):
                passes.append([indices[position] for position in positions.tolist()])
        return passes


def passes_for(rows: TrainingRows, max_seq_len: int) -> Passes | None:
    """How micro-batches of the training rows are divided; None: not at all. `max_seq_len`: tokens
    of the longest row, of which a pair has two."""
    if dist.on_gpu() or not isinstance(rows, Dataset):
        return None
    longest = max_seq_len * len(rows[0]["answers"])
    return Passes(sample_tokens(rows), tokens_on_cpu(longest, dist.world_size()))


def filled_up(
    passes: MicroBatches, batches: list[Batch], collate: Callable[[Sequence[int]], Batch]
) -> tuple[MicroBatches, list[Batch]]:
    """The passes of a step and their batches, with passes of a padding row until all ranks have
    equally many. Collective."""
    device = dist.device()
    most = int(dist.all_reduce(torch.tensor(len(batches), device=device), "max"))
    missing = most - len(batches)
    if missing == 0:
        return passes, batches
    filler = [PADDING_ROW]
    return passes + missing * [filler], batches + missing * [collate(filler)]
