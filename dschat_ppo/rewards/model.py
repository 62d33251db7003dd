"""The learned reward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dschat_ppo.models.forward import last_token_scores
from dschat_ppo.types import Rollout, full_sequences


class ModelReward:
    """Scores a rollout with a reward model that shares the actor's vocabulary."""

    def __init__(self, engine: Any):
        self.engine = engine

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Tensor:
        """Score at the last real token of `[prompt | response]` (EOS, or the token where the limit cut), (B,) fp32.

        A row whose response is empty is scored at the last token of its prompt.
        """
        return last_token_scores(self.engine, *full_sequences(rollout))
