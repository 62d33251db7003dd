"""`--exact_rollout`, of step 3 and of `dschat-evaluate`."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.feature_flags import FlagNotes
from dschat_ppo.config.schema import flag


@dataclass(frozen=True)
class ExactRolloutFlags:
    """Exact rollouts."""

    exact_rollout: bool = flag(
        False,
        "on a CPU, generate with the arithmetic of training: log-probs of sampling are those of the"
        " training pass before an update, bit for bit, and an answer depends on its prompt, its"
        " seed and the weights alone; the run checks this at its start",
    )


FLAGS = {"ppo": ExactRolloutFlags, "evaluate": ExactRolloutFlags}
NOTES = FlagNotes(
    descriptions={
        "evaluate": (
            "With --exact_rollout, on a CPU, an answer and its log-probs depend on its prompt, its"
            " seed and the\nweights alone, and are those of the same run of step 3.\n"
        )
    }
)
