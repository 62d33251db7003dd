"""Flags of the health warnings: their thresholds, and whether a warning ends the run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from dschat_ppo.config.schema import flag, require, require_fraction, require_positive

Stop = Literal["off", "error", "warning"]

_STOP = (
    "at the first health event of this level, save a checkpoint and end the run with exit code 6; 'error': errors "
    "only, 'warning': errors and warnings; the same command resumes the run"
)
_WINDOW = "number of steps that a trend covers; sudden changes are detected once half of them are done"
_GRAD_GROWTH = "warn if a gradient norm exceeds its mean over --health_window by this factor"


@dataclass(frozen=True)
class PPOHealthFlags:
    """Health warnings of step 3."""

    _argument_group_name: ClassVar[str] = "health warnings"

    stop_on_health: Stop = flag(_STOP, "off")
    health_window: int = flag(_WINDOW, 10)
    health_kl_spike: float = flag(
        "warn if the KL to the reference (nats per token) exceeds this value and three times its mean over "
        "--health_window; also the KL above which a rising score counts as exploitation of the reward",
        0.5,
    )
    health_negative_kl: float = flag("warn if the KL to the reference (nats per token) is below minus this value", 0.02)
    health_entropy_factor: float = flag(
        "warn if the entropy falls below its mean over --health_window divided by this factor, or rises above the mean "
        "times it",
        3.0,
    )
    health_score_std: float = flag("warn if the scores of a step have a standard deviation below this value", 1e-3)
    health_distinct_share: float = flag(
        "warn if fewer than this share of the answers are distinct (only if they have 8 tokens or more on average)", 0.5
    )
    health_length_growth: float = flag("warn if answers are longer than at the start of the run by this factor", 1.5)
    health_ended_drop: float = flag(
        "warn if the share of answers that end by themselves is this much below its mean over --health_window", 0.3
    )
    health_clip_fraction: float = flag("warn if the policy loss clips more than this share of the tokens", 0.3)
    health_first_log_ratio: float = flag(
        "warn if the mean absolute log-ratio before the first update of a step exceeds this value (nats per token)",
        0.05,
    )
    health_logprob_diff: float = flag(
        "warn if log-probs recorded while sampling differ from those of training by more than this on average (nats "
        "per token)",
        0.1,
    )
    health_rank_wait: float = flag(
        "warn if ranks wait for the slowest one for more than this share of the step, in every step of --health_window",
        0.3,
    )
    health_grad_growth: float = flag(_GRAD_GROWTH, 10.0)

    def __post_init__(self) -> None:
        require_positive(self, "health_kl_spike health_negative_kl health_score_std health_first_log_ratio")
        require_positive(self, "health_logprob_diff")
        require_fraction(
            self,
            "health_distinct_share health_ended_drop health_clip_fraction health_rank_wait",
        )
        _check_trends(self)


@dataclass(frozen=True)
class FitHealthFlags:
    """Health warnings of steps 1 and 2."""

    _argument_group_name: ClassVar[str] = "health warnings"

    stop_on_health: Stop = flag(_STOP, "off")
    health_window: int = flag(_WINDOW, 50)
    health_loss_growth: float = flag(
        "warn if the mean training loss over --health_window exceeds the lowest such mean so far by this factor", 1.5
    )
    health_overfit_evals: int = flag(
        "warn if the last N evaluations all have a higher loss than the best one while the training loss falls", 2
    )
    health_grad_growth: float = flag(_GRAD_GROWTH, 10.0)

    def __post_init__(self) -> None:
        require_positive(self, "health_overfit_evals")
        _check_trends(self)


def _check_trends(flags: PPOHealthFlags | FitHealthFlags) -> None:
    """Check the window, and that factors of growth are above 1."""
    require(flags.health_window >= 2, f"--health_window must be at least 2 steps, got {flags.health_window}")
    for field in fields(flags):
        value = getattr(flags, field.name)
        require(
            not field.name.endswith(("_growth", "_factor")) or 1 < value < float("inf"),
            f"--{field.name} is a factor and must be finite and above 1, got {value}",
        )
