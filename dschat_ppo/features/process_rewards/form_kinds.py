"""The forms of data sets with labelled steps."""

from __future__ import annotations

from dschat_ppo.data.form_kind import Kind
from dschat_ppo.features.process_rewards.step_readers import (
    LABELS_IN_STEPS,
    read_math_shepherd,
    read_prm800k,
    read_stepwise,
)

KINDS = (
    Kind(
        "stepwise",
        {
            "prompt": "prompt question problem",
            "response": "completions steps",
            "label": " ".join(
                (
                    "labels label",
                    *(f"steps.0.{key}" for key in LABELS_IN_STEPS),
                    *(f"completions.0.{key}" for key in LABELS_IN_STEPS),
                )
            ),
        },
        (("steps prompt", "prompt response label"),),
        read_stepwise,
        by_flag=True,
    ),
    Kind(
        "prm800k",
        {"prompt": "question.problem", "response": "label.steps"},
        (("steps prompt", "prompt response"),),
        read_prm800k,
    ),
    Kind(
        "math_shepherd",
        {"prompt": "input", "label": "label", "task": "task"},
        (("steps prompt", "prompt label task"),),
        read_math_shepherd,
        rendering="chat if possible",
        signs=("task",),
    ),
)
