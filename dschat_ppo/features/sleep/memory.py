"""Memory of what sleeps, for the planner."""

from __future__ import annotations

from collections.abc import Sequence

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.sleep.flags import SleepFlags
from dschat_ppo.planner.phase_memory import ROLLOUT, Phase
from dschat_ppo.planner.role_memory import Role


def adjust(phase: Phase, config: StepConfig, roles: Sequence[Role]) -> None:
    """Keep host memory for what sleeps in a rollout: on a GPU optimizer states, and weights but the
    actor's. In a rollout only the actor's weights stay on the device."""
    if not isinstance(config, PPOConfig) or not config.of(SleepFlags).sleep_in_rollout:
        return
    if not roles[0].on_gpu:  # then all of it is in host memory
        return
    for (role, kind, on_host), size in list(phase.held.items()):
        is_copied = kind == "optimizer" or (kind == "weights" and role != "actor")
        if is_copied and not on_host:
            phase.add(role, kind, size, on_host=True)
    if phase.name == ROLLOUT:
        staying: dict[tuple[str, str, bool], int] = {}
        for (role, kind, on_host), size in phase.held.items():
            if on_host or (role, kind) == ("actor", "weights"):
                staying[role, kind, on_host] = size
        phase.held = staying
