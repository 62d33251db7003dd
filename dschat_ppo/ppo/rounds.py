"""The rounds of sampling that give the rows of a PPO step: one, unless a feature asks for more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features import hooks
from dschat_ppo.ppo.advantages import AdvantageComputation
from dschat_ppo.types import ScoredRollout


class Rounds(Protocol):
    """Decides how many prompts a round takes, and whether the rows of the rounds are enough; the
    same on every rank."""

    metrics: dict[str, float]  # of the rounds of the last PPO step

    def prompts_per_rank(self) -> int:
        """How many prompts the next round takes on each rank."""

    def rows_of_step(self, rows: ScoredRollout, rounds_done: int) -> ScoredRollout | None:
        """Take the rows of a round, of all ranks. Returns those of the PPO step once they are
        enough; None: another round follows. `rounds_done`: in this step, with this one."""

    def state_dict(self) -> dict[str, Any] | None:
        """What stays for the next PPO step, between two steps; None: nothing."""

    def load_state_dict(self, state: dict[str, Any] | None, device: torch.device) -> None:
        """Restore `state_dict()` at the beginning of a step, on `device`."""


@dataclass(eq=False)
class OneRound:
    """The rows of one round are those of the PPO step."""

    prompts: int  # of a rank
    metrics: dict[str, float] = field(default_factory=dict)

    def prompts_per_rank(self) -> int:
        return self.prompts

    def rows_of_step(self, rows: ScoredRollout, rounds_done: int) -> ScoredRollout:
        return rows

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: Any, device: torch.device) -> None:
        """There is nothing to restore."""


def rounds_of_run(config: PPOConfig, plan: PPOPlan, advantages: AdvantageComputation) -> Rounds:
    """The rounds that the flags ask for. A feature with rounds of its own offers
    `rounds.rounds_of` with these arguments, which returns them or None. `advantages`: what
    compares the scores of the rows later."""
    for rounds_of in hooks("rounds.rounds_of"):
        rounds: Rounds | None = rounds_of(config, plan, advantages)
        if rounds is not None:
            return rounds
    return OneRound(plan.prompts_per_rank)
