"""Reward shaping: what happens to the score of an answer before it becomes the reward of the last token."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SCALE = 1e-8


def clip_scores(scores: Tensor, bound: float) -> Tensor:
    """(B,) fp32, `scores` clipped to +-`bound`; unchanged if `bound` is 0."""
    return scores.clamp(-bound, bound) if bound > 0 else scores


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Soft overlong penalty, to be added to scores (DAPO, Yu et al. 2025, eq. 13).

    `lengths` (B,) int64, response tokens -> (B,) fp32: 0 up to `max_length - buffer` tokens, then linear down to
    `-factor` at `max_length`, and constant beyond. `buffer` is at least 1.
    """
    excess = (lengths - (max_length - buffer)).clamp(0, buffer)
    return -factor * excess.float() / buffer


def missing_eos(ended: Tensor, penalty: float) -> Tensor:
    """(B,) fp32, to be added to scores: 0 where `ended` (B,) bool is True, else `-penalty`."""
    return torch.where(ended, 0.0, -penalty)


class RunningScale:
    """Running mean and standard deviation of all scores seen, to divide scores by the deviation without shifting them.

    Batches are merged by the parallel update of Chan et al. 1979, in Python floats, so that ranks that see the same
    scores hold the same state. The deviation is the unbiased one (n - 1).
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self._squares = 0.0  # sum of squared distances from the mean

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two scores."""
        return float((self._squares / (self.count - 1)) ** 0.5) if self.count > 1 else 0.0

    def update(self, scores: Tensor) -> None:
        """Add `scores`, (B,) fp32 of all ranks; B may be 0."""
        if scores.numel() == 0:
            return
        scores = scores.detach().double()
        count, mean = float(scores.numel()), float(scores.mean())
        squares, distance, total = float(((scores - mean) ** 2).sum()), mean - self.mean, self.count + count
        self._squares += squares + distance**2 * self.count * count / total
        self.mean += distance * count / total
        self.count = total

    def scale(self, scores: Tensor) -> Tensor:
        """(B,) fp32, `scores / std`; unchanged before two scores are seen, and while all are equal (std below 1e-8).
        The division would make the first different scores huge."""
        return scores / self.std if self.std >= SMALLEST_SCALE else scores

    def state_dict(self) -> dict[str, float]:
        """The state as plain numbers, for `load_state_dict`."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.count, self.mean, self._squares = state["count"], state["mean"], state["squares"]
