"""Health rules of agents."""

from __future__ import annotations

from dschat_ppo.config.health_flags import Rule

PPO_RULES = (
    Rule(
        "agents_slow",
        "warning",
        "agent/idle_share",
        "above it",
        0.5,
        "the model waits for agents most of the rollout: their own time is long, or few of them"
        " run at a time",
        "raise --environment_workers (and the number of episodes of a rollout, if there are fewer),"
        " make tools of the agent faster (agent/own_seconds), or lower --environment_timeout; with"
        " --rollout_engine padded, take the continuous engine, which waits for no slow agent",
    ),
)
