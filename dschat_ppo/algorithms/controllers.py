"""Fixed and adaptive coefficients of the KL penalty and the entropy bonus.

Each has `.value`, the current coefficient, `.update(measured, count)`, called after a PPO step, and
a state of plain numbers. Every rank must pass the same measurements (over the tokens of all ranks),
so that all hold the same value.
"""

from __future__ import annotations


class FixedCoefficient:
    """A constant coefficient."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, measured: float, count: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        """Empty: the value comes from the configuration, which may change when a run resumes."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing."""


class AdaptiveKL:
    """`value *= 1 + clip(KL / target - 1, -0.2, 0.2) * count / horizon` (Ziegler et al. 2019,
    section 2.2).

    `target` is per token or per row, like the KL of `update`; over `horizon` responses the
    coefficient changes by 20 % at most. An update over more responses counts as one over `horizon`,
    so that the factor stays between 0.8 and 1.2: at 0 or below, the product could not recover.
    """

    def __init__(self, value: float, target: float, horizon: int) -> None:
        self.value = value
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, count: int) -> None:
        """Adapt the coefficient after a PPO step over `count` responses with a mean KL of `kl`
        nats."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(count / self.horizon, 1)

    def state_dict(self) -> dict[str, float]:
        """The state, for `load_state_dict`."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.value = state["value"]


class AdaptiveEntropy:
    """A coefficient that grows by `delta` after a step with an entropy of at most `target`, and
    else shrinks by it.

    It starts at `value`, stays between 0 and `largest`, and is 0 while the last entropy (nats per
    token) is above the target: the bonus shall stop a collapse and not raise the entropy further
    (Skywork-OR1, He et al. 2025).
    """

    def __init__(self, value: float, target: float, delta: float, largest: float) -> None:
        self.target = target
        self.delta = delta
        self.largest = largest
        self._coefficient = value
        self._applied = True

    @property
    def value(self) -> float:
        """The coefficient, or 0 while the last entropy is above the target."""
        return self._coefficient if self._applied else 0.0

    def update(self, entropy: float, count: int) -> None:
        """Adapt the coefficient after a PPO step with a mean entropy of `entropy` nats; `count` is
        not used."""
        self._applied = entropy <= self.target
        if self._applied:
            coefficient = self._coefficient + self.delta
        else:
            coefficient = self._coefficient - self.delta
        self._coefficient = min(max(coefficient, 0.0), self.largest)

    def state_dict(self) -> dict[str, float]:
        """The state, for `load_state_dict`."""
        return {"coefficient": self._coefficient, "applied": float(self._applied)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self._coefficient = state["coefficient"]
        self._applied = bool(state["applied"])
