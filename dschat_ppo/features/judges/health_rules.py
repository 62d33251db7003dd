"""Health rules of judges."""

from __future__ import annotations

from dschat_ppo.config.health_flags import Rule

PPO_RULES = (
    Rule(
        "judge_silent",
        "warning",
        "judge/NAME/unscored_share",
        "above it",
        0.1,
        "a judge gives many answers no score: its template reads what rows lack, its positions are"
        " too few, what it writes (reads=text) has no verdict, or its address refuses questions",
        "read the first cause in logs/; correct the template or the data, or take another --judge",
    ),
    Rule(
        "judge_flips",
        "warning",
        "judge/NAME/flip_share",
        "above it",
        0.5,
        "a judge prefers a place and not an answer in most pairs, so that its scores are noise",
        "take a better model or a clearer template for --judge",
    ),
)
