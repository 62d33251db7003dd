"""What flags, logs and reports know of the objective `process`."""

from __future__ import annotations

from dschat_ppo.config.objective_kinds import ObjectiveKind

OBJECTIVE_KINDS = {
    "process": ObjectiveKind(
        "process reward model",
        "trains a reward model on labels of the steps of answers",
        ("loss", "accuracy", "accuracy_good", "accuracy_bad", "good_share"),
        use="steps",
        trains_classifier=True,
    )
}
