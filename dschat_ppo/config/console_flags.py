"""Flags of what a run prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dschat_ppo.config.schema import flag, require_positive


@dataclass(frozen=True)
class ConsoleFlags:
    """What a run prints."""

    _argument_group_name: ClassVar[str] = "console"

    logging_steps: int = flag(
        "print a line of metrics every N optimizer steps (step 3: every N PPO steps), and at the first and the last "
        "step; metrics.jsonl always has every step",
        10,
    )
    verbose: bool = flag("also print the informational messages of DeepSpeed and transformers, on every rank", False)

    def __post_init__(self) -> None:
        require_positive(self, "logging_steps")

    def prints(self, step: int, total: int) -> bool:
        """Whether the run prints a line after `step`, counted from 1, of `total`."""
        return step in (1, total) or step % self.logging_steps == 0


EVERY_TENTH_STEP = ConsoleFlags()
