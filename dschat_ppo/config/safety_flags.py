"""Flags that all steps share: checkpoints, resuming, and what happens when something goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat_ppo.config.schema import flag, require, require_at_most, require_not_negative, require_positive

AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class SafetyFlags:
    """When the state of a run is saved, how it goes on, and how faults are met."""

    _argument_group_name: ClassVar[str] = "checkpoints and faults"

    save_steps: int = flag(
        "save a checkpoint every N steps (optimizer steps; in step 3 PPO steps); 0 = not by count", 0
    )
    save_minutes: float = flag("save a checkpoint when the last one is this old; 0 = not by time", 30.0)
    save_total_limit: int = flag(
        "keep the newest N checkpoints (and the best of those saved right after an evaluation)", 2
    )
    resume: str = flag(
        "'auto' resumes from the newest intact checkpoint in --output_dir, 'never' starts over, a folder names the "
        "checkpoint to resume from",
        AUTO,
    )
    resume_force: bool = flag("resume even if flags or data that affect the result have changed", False)
    collective_timeout: float = flag(
        "seconds without progress after which every rank prints its stack and the run ends", 1800.0
    )
    on_nonfinite: Literal["stop", "skip"] = flag(
        "a loss, gradient, reward or advantage that is not finite: stop before the update, or leave the update out; "
        "the batch is written to a file in both cases",
        "stop",
    )
    max_nonfinite_skips: int = flag("with --on_nonfinite skip: stop after this many skipped updates in a row", 3)

    def __post_init__(self) -> None:
        require_not_negative(self, "save_steps save_minutes")
        require_positive(self, "save_total_limit collective_timeout max_nonfinite_skips")
        require(
            self.collective_timeout >= 1,
            f"--collective_timeout {self.collective_timeout}: must be at least 1 second: progress is looked at twice a "
            "second",
        )
        require_at_most(self, "collective_timeout", 10**8, "10^8 seconds are three years")
