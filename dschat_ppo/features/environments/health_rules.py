"""Health rules of episodes."""

from __future__ import annotations

from dschat_ppo.config.health_flags import Rule

PPO_RULES = (
    Rule(
        "observations_invented",
        "warning",
        "episode/invented_observations",
        "above it",
        0.1,
        "the model writes what its tools or its environment would answer, instead of ending its"
        " turn, and goes on from that",
        "end its turn there (--stop_token_ids with the token that begins an observation), train"
        " step 1 on rows whose calls end the turn, or score such answers lower",
    ),
)
