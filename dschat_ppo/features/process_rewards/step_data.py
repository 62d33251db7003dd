"""What labelled steps need of the data of step 2."""

from __future__ import annotations

from dataclasses import replace

from dschat_ppo.config.data_flags import StepData
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.process_rewards.flags import StepFlags


def changed(config: StepConfig, data: StepData) -> StepData:
    """`data` with the text between two steps of an answer, if the run reads steps."""
    if data.use != "steps":
        return data
    return replace(data, use_settings=config.of(StepFlags).separator)
