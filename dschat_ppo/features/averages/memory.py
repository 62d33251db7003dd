"""Memory of the moving average, for the planner."""

from __future__ import annotations

from collections.abc import Sequence

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.averages.flags import AveragesFlags
from dschat_ppo.planner.phase_memory import Phase
from dschat_ppo.planner.role_memory import FP32, Role


def adjust(phase: Phase, config: StepConfig, roles: Sequence[Role]) -> None:
    """Add an fp32 average in host memory, divided over the ranks."""
    if isinstance(config, PPOConfig) and config.of(AveragesFlags).enable_ema:
        actor = roles[0]
        size = FP32 * actor.sizes.trained / actor.ranks
        phase.add("average", "weights", size, on_host=True)
