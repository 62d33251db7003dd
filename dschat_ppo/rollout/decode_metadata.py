"""What a decode step knows about each of its rows, on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dschat_ppo.rollout.decode_batch import DecodeBatch


@dataclass(frozen=True)
class DecodeMetadata:
    """All (n,) int64. `answer` is the row of `SequenceBuffers`; `position` that of the token that is fed; `slot` where
    its key and value go in the store of its bank."""

    answer: Tensor
    position: Tensor
    slot: Tensor

    @classmethod
    def of(cls, banks: Sequence[DecodeBatch], device: torch.device) -> DecodeMetadata:
        """One lane for each row of the banks, in order."""
        names = ("answer", "position", "slot")
        facts = np.stack([np.concatenate([getattr(bank, name) for bank in banks]) for name in names])
        return cls(*torch.from_numpy(facts).to(device))

    def first(self, count: int) -> DecodeMetadata:
        """Views of the first lanes."""
        return DecodeMetadata(self.answer[:count], self.position[:count], self.slot[:count])
