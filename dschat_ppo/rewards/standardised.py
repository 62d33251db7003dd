"""A learned reward in units of its own spread."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dschat_ppo.errors import UserError
from dschat_ppo.rewards.reward_request import RewardRequest, RewardSource
from dschat_ppo.types import Rollout

STATISTICS = ("reward_mean", "reward_std")  # in the model's config, written by step 2


class StandardisedReward:
    """`(score - mean) / std` of another source.

    Args:
        source: gives the scores.
        mean, std: of scores on the reward model's own evaluation data; std above 0.
    """

    def __init__(self, source: RewardSource, mean: float, std: float):
        self.source = source
        self.mean = mean
        self.std = std

    @property
    def name(self) -> str:
        """The source's own."""
        return self.source.name

    def __call__(self, request: RewardRequest, rollout: Rollout) -> Tensor:
        """(B,) fp32."""
        return (self.source(request, rollout) - self.mean) / self.std


def saved_statistics(config: Any, folder: str) -> tuple[float, float]:
    """Mean and standard deviation that step 2 saved with a reward model.

    Args:
        config: the model's configuration.
        folder: of the model, for the message.

    Raises:
        UserError: the model has none, or a standard deviation of 0.
    """
    mean, std = (config.to_dict().get(name) for name in STATISTICS)
    if mean is None or std is None or not std > 0:
        raise UserError(
            f"--normalize_rewards model: {folder}/config.json has no {' and '.join(STATISTICS)} above 0; train the "
            "reward model with step 2, or use --normalize_rewards running"
        )
    return float(mean), float(std)
