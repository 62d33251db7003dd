"""What flags, logs and reports know of the objective `process`."""

from __future__ import annotations

from dschat_ppo.config.objective_kinds import ObjectiveKind
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.process_rewards.flags import StepFlags


def separator_of(config: StepConfig) -> str:
    """The text between two steps of an answer, by which the rows of step 2 are made."""
    return config.of(StepFlags).separator


OBJECTIVE_KINDS = {
    "process": ObjectiveKind(
        "process reward model",
        "trains a reward model on labels of the steps of answers",
        ("loss", "accuracy", "accuracy_good", "accuracy_bad", "good_share"),
        use="steps",
        use_settings=separator_of,
        trains_classifier=True,
    )
}
