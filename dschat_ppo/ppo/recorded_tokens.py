"""Log-probs or values of all rows, recorded from the forward passes of an update."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.types import RewardedRollout, Rollout


class RecordedTokens:
    """One number for each response token, from the micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[RewardedRollout, Tensor]] = {}

    def record(self, rows: RewardedRollout, numbers: Tensor) -> None:
        """Keep the numbers of a micro-batch, (b, R) fp32. A second pass over the same one replaces them."""
        self._parts[id(rows)] = (rows, numbers.detach())

    def gathered(self, rows: Rollout) -> Tensor:
        """The numbers of all ranks, (N, R) fp32 on the device of `rows`, 0 outside their mask. Collective.

        Args:
            rows: the N rows that the micro-batches of all ranks were taken from.
        """
        device = next(iter(self._parts.values()))[1].device
        found = torch.zeros(rows.response_mask.shape, device=device)
        for part, numbers in self._parts.values():
            assert part.numbers is not None
            columns = slice(numbers.shape[1])
            # a micro-batch that fills up this rank's share repeats a row, with no token in its mask
            found[part.numbers, columns] = torch.where(part.response_mask, numbers, found[part.numbers, columns])
        if dist.sequence_rank() > 0:  # another rank has recorded the same rows
            found.zero_()
        return dist.all_reduce(found).to(rows.response_mask.device)
