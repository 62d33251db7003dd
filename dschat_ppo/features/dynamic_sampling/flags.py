"""`--dynamic_sampling`, its range and its rounds, of step 3."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.feature_flags import FlagNotes
from dschat_ppo.config.schema import flag, positive, require_used
from dschat_ppo.errors import UserError


def _check_range(limits: list[float]) -> None:
    is_range = len(limits) == 2 and limits[0] < limits[1]
    if limits and not is_range:
        raise UserError(
            f"--dynamic_sampling_range {' '.join(map(str, limits))}: expected two numbers, the"
            " lower one first"
        )


@dataclass(frozen=True)
class DynamicSamplingFlags:
    """Dynamic sampling."""

    dynamic_sampling: bool = flag(
        False,
        "drop prompts whose answers all have the same score, and sample other prompts until the PPO"
        " step is full",
    )
    dynamic_sampling_rounds: int = positive(
        8,
        "maximum sampling rounds per PPO step; if prompts are still missing, dropped ones fill the"
        " step",
    )
    dynamic_sampling_range: list[float] = flag(
        [],
        "two numbers, LOW HIGH: --dynamic_sampling also drops prompts whose mean score is not above"
        " LOW and below HIGH; not given: off",
        commas=True,
        check=_check_range,
    )

    def __post_init__(self) -> None:
        require_used(
            self,
            "dynamic_sampling_rounds dynamic_sampling_range",
            when=self.dynamic_sampling,
            purpose="--dynamic_sampling",
        )


FLAGS = {"ppo": DynamicSamplingFlags}
NOTES = FlagNotes(
    their_names={
        "dynamic_sampling": "dynamic_filtering dynamic_filtering_enable",
        "dynamic_sampling_range": "dynamic_filtering_range dynamic_filtering_reward_range",
    }
)
