"""`--step_separator` of step 2, and `--process_reward` of step 3 and of evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from dschat_ppo.config.feature_flags import FlagNotes
from dschat_ppo.config.schema import check_not_empty, check_values, flag


@dataclass(frozen=True)
class StepFlags:
    """Steps of answers."""

    step_separator: str = flag(
        "\\n",
        "process: text between two steps of an answer (\\n stands for a line break, \\t for a tab);"
        " the score of a step is read at the token that completes it, that of the last step at the"
        " answer's final token",
        check=partial(check_not_empty, "step_separator"),
    )

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def separator(self) -> str:
        """`--step_separator` with its line breaks and tabs."""
        return self.step_separator.replace("\\n", "\n").replace("\\t", "\t")


@dataclass(frozen=True)
class ProcessRewardFlags:
    """Process rewards."""

    process_reward: Literal["min", "mean", "last", "product"] | None = flag(
        None,
        "with a process reward model (step 2, --objective process): score an answer by the"
        " smallest, the mean, the last or the product of the probabilities that its steps are"
        " right. Not given: the raw score at the last token",
    )


FLAGS = {"reward": StepFlags, "ppo": ProcessRewardFlags, "evaluate": ProcessRewardFlags}
NOTES = FlagNotes(
    choices={
        "data_format": dict.fromkeys(("stepwise", "prm800k", "math_shepherd"), ""),
        "objective": {"process": "trains a reward model on labelled steps"},
    }
)
