"""Flags that all steps share: checkpoints, resuming and failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat_ppo.config.schema import flag, require, require_at_most, require_not_negative, require_positive

AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class SafetyFlags:
    """Checkpoints, resuming, timeouts and non-finite numbers."""

    _argument_group_name: ClassVar[str] = "checkpoints and failures"

    save_steps: int = flag("save a checkpoint every N optimizer steps (in step 3: every N PPO steps); 0 = off", 0)
    save_minutes: float = flag("save a checkpoint when the last one is this many minutes old; 0 = off", 30.0)
    save_total_limit: int = flag(
        "number of checkpoints to keep: the newest, and in addition the best of those saved right after an evaluation",
        2,
    )
    keep_final_checkpoint: bool = flag(
        "keep the checkpoints of a finished run, so that it can be continued with a higher --max_steps or "
        "--num_train_epochs; without the flag they are removed once the models are saved",
        False,
    )
    resume: str = flag(
        "'auto' resumes from the newest intact checkpoint in --output_dir; 'never' starts from the beginning; a folder"
        " names the checkpoint to resume from",
        AUTO,
    )
    resume_force: bool = flag("resume even if flags or data that affect the result have changed", False)
    local_checkpoints: bool = flag(
        "with several machines: each keeps the checkpoint files of its ranks on its own disk, in --output_dir; without "
        "this flag, the machines must share that folder",
        False,
    )
    collective_timeout: float = flag(
        "seconds after which the run ends if no rank makes progress (every rank then prints its stack) or if another "
        "machine does not answer",
        1800.0,
    )
    on_nonfinite: Literal["stop", "skip"] = flag(
        "on a NaN or infinite loss, gradient, reward or advantage, stop before the update or skip the update; either "
        "way the batch is written to a file",
        "stop",
    )
    max_nonfinite_skips: int = flag("with --on_nonfinite skip: stop after this many skipped updates in a row", 3)

    def __post_init__(self) -> None:
        require_not_negative(self, "save_steps save_minutes")
        require_positive(self, "save_total_limit collective_timeout max_nonfinite_skips")
        require(
            self.collective_timeout >= 1,
            f"--collective_timeout {self.collective_timeout}: must be at least 1 second, because progress is checked "
            "every half second",
        )
        require_at_most(self, "collective_timeout", 10**8, "10^8 seconds are three years")
