"""Rewards: from the score of a response, clipped, scaled and with penalties, to the rewards of its
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dschat_ppo.algorithms.aggregation import zero_outside
from dschat_ppo.algorithms.groups import ROUNDING

SMALLEST_SCALE = 1e-8


def clip_scores(scores: Tensor, bound: float) -> Tensor:
    """(B,) fp32, `scores` clipped to +-`bound`; unchanged if `bound` is 0."""
    if bound > 0:
        return scores.clamp(-bound, bound)
    return scores


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Soft overlong penalty, to be added to scores (DAPO, Yu et al. 2025, eq. 13).

    `lengths` (B,) int64, response tokens -> (B,) fp32: 0 up to `max_length - buffer` tokens, then
    linear down to `-factor` at `max_length`, and constant beyond. `buffer` is at least 1.
    """
    excess = (lengths - (max_length - buffer)).clamp(0, buffer)
    return -factor * excess.float() / buffer


def missing_eos(ended: Tensor, penalty: float) -> Tensor:
    """(B,) fp32, to be added to scores: 0 where `ended` (B,) bool is True, else `-penalty`."""
    return torch.where(ended, 0.0, -penalty)


class RunningScale:
    """Running mean and standard deviation of all scores seen, to divide scores by the deviation
    without shifting them.

    Batches are merged by the parallel update of Chan et al. 1979, in Python floats, so that ranks
    that see the same scores hold the same state. The deviation is the unbiased one (n - 1).
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self._squares = 0.0  # sum of squared distances from the mean

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two scores."""
        if self.count > 1:
            return float((self._squares / (self.count - 1)) ** 0.5)
        return 0.0

    def update(self, scores: Tensor) -> None:
        """Add `scores`, (B,) fp32 of all ranks; B may be 0."""
        if scores.numel() == 0:
            return
        scores = scores.detach().double()
        count = float(scores.numel())
        mean = float(scores.mean())
        squares = float(((scores - mean) ** 2).sum())
        distance = mean - self.mean
        total = self.count + count
        self._squares += squares + distance**2 * self.count * count / total
        self.mean += distance * count / total
        self.count = total

    @property
    def divisor(self) -> float | None:
        """The deviation; None before two scores are seen, and while all are equal but for rounding
        (std below 1e-8, or below 1e-6 of the mean): the division would make the first different
        scores huge."""
        if self.std < max(SMALLEST_SCALE, ROUNDING * abs(self.mean)):
            return None
        return self.std

    def scale(self, scores: Tensor) -> Tensor:
        """(B,) fp32, `scores` divided by the `divisor`; unchanged without."""
        if self.divisor is None:
            return scores
        return scores / self.divisor

    def state_dict(self) -> dict[str, float]:
        """The state as plain numbers, for `load_state_dict`."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.count = state["count"]
        self.mean = state["mean"]
        self._squares = state["squares"]


def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, kl_coef: float) -> Tensor:
    """`-kl_coef * kl` on each response token, plus the row's score on its last one (Ouyang et al.
    2022, eq. 2).

    `scores` (B,) and `kl` (B, R) fp32 -> (B, R) fp32, 0 outside `response_mask` (B, R) bool. The
    mask may have gaps; a row without a True has no reward at all.
    """
    # (B, 1) over (B, R)
    rewards = torch.where(is_last_token(response_mask), scores.unsqueeze(1), 0.0) - kl_coef * kl
    return zero_outside(rewards, response_mask)


def is_last_token(mask: Tensor) -> Tensor:
    """(B, R) bool, True on the last True token of each row."""
    return mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))
