"""Coefficients that follow what they weigh: of the KL penalty and of the entropy bonus.

Each has `.value`, the coefficient to use now, `.update(measured, count)` after a PPO step, and its state as plain
numbers. Give every rank the same measurements (over all ranks' tokens), and all keep the same value.
"""

from __future__ import annotations


class FixedCoefficient:
    """A coefficient that stays as it is."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, measured: float, count: int) -> None:
        """Nothing follows from a measurement."""

    def state_dict(self) -> dict[str, float]:
        """Empty: the value comes from the configuration, which may change it between two runs."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to restore."""


class AdaptiveKL:
    """`value *= 1 + clip(KL / target - 1, -0.2, 0.2) * count / horizon` (Ziegler et al. 2019, section 2.2).

    An update over more than `horizon` answers counts as one over `horizon`: the factor stays within 0.8 and 1.2, where
    the plain formula would reach 0, from which no product returns, and then change the sign.

    Args:
        value: coefficient at the start.
        target: KL per token (or per row: the measure that `update` is given) to hold; above 0.
        horizon: answers over which the coefficient may change by a fifth; above 0.

    Raises:
        ValueError: `target` or `horizon` is not above 0.
    """

    def __init__(self, value: float, target: float, horizon: int) -> None:
        if target <= 0 or horizon <= 0:
            raise ValueError(f"target and horizon must be above 0, not {target} and {horizon}")
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, kl: float, count: int) -> None:
        """After a step over `count` answers with a mean KL of `kl` nats."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(count / self.horizon, 1)

    def state_dict(self) -> dict[str, float]:
        """What `load_state_dict` takes."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.value = state["value"]


class AdaptiveEntropy:
    """A coefficient that grows by `delta` after a step with an entropy of at most `target`, and shrinks after others.

    It stays within `smallest` and `largest` and is applied only while the last entropy is not above the target: an
    entropy bonus is there to stop a collapse, not to push further up (Skywork-OR1, He et al. 2025).

    Args:
        value: coefficient at the start, applied until the first entropy is known.
        target: entropy in nats per token.
        delta: change at each step, 0 or more.
        smallest: lower bound.
        largest: upper bound.
    """

    def __init__(self, value: float, target: float, delta: float, smallest: float, largest: float) -> None:
        self.target, self.delta, self.smallest, self.largest = target, delta, smallest, largest
        self._coefficient = value
        self._applied = True

    @property
    def value(self) -> float:
        """The coefficient, or 0 while the last entropy is above the target."""
        return self._coefficient if self._applied else 0.0

    def update(self, entropy: float, count: int) -> None:
        """After a step with a mean entropy of `entropy` nats; `count` answers change nothing here."""
        self._applied = entropy <= self.target
        moved = self._coefficient + (self.delta if self._applied else -self.delta)
        self._coefficient = min(max(moved, self.smallest), self.largest)

    def state_dict(self) -> dict[str, float]:
        """What `load_state_dict` takes."""
        return {"coefficient": self._coefficient, "applied": float(self._applied)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self._coefficient, self._applied = state["coefficient"], bool(state["applied"])
