"""Names of metrics: those of earlier versions and what they are called today, and those that trackers show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

# No new name matches another pattern.
_RENAMED = [
    (re.compile(r"^answers/"), "rollout/"),
    (re.compile(r"^dynamic_sampling/"), "rollout/dynamic_sampling_"),
    (re.compile(r"^seconds/"), "time/"),
    (re.compile(r"^tokens_per_second/(.+)$"), r"time/\1_tokens_per_s"),
    (re.compile(r"^peak_memory_gib/(.+)$"), r"memory/\1_peak_gib"),
    (re.compile(r"^time/describe$"), "time/score_statistics"),
    (re.compile(r"^memory/describe_peak_gib$"), "memory/score_statistics_peak_gib"),
    (re.compile(r"^coef/kl$"), "kl/coef"),
    (re.compile(r"^coef/entropy$"), "policy/entropy_coef"),
    (re.compile(r"^ptx/loss$"), "policy/ptx_loss"),
    (re.compile(r"^advantage/(mean|std)$"), r"policy/advantage_\1"),
    (re.compile(r"^return/(mean|std)$"), r"value/return_\1"),
    (re.compile(r"^reference/moved$"), "kl/reference_moved"),
    (re.compile(r"^(grad_norm|overflow|lr|lora_lr)/(.+)$"), r"optim/\1/\2"),
    (re.compile(r"^nonfinite/skipped$"), "optim/nonfinite_skipped"),
]


def present_name(name: str) -> str:
    """The name that a metric has today; a name of an earlier version is mapped, any other is returned as it is."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def with_present_names(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """The metrics, each under the name of `present_name`."""
    return {present_name(name): value for name, value in metrics.items()}


NAME_SPACES = ("reward", "kl", "policy", "value", "rollout", "time", "memory", "optim", "eval")
_OPTIMIZER = ("lr", "lora_lr", "grad_norm")


def tracked_name(name: str) -> str:
    """The name of a metric in a tracker, whose charts are in sections: `eval/loss` for `eval_loss`, `optim/lr` for
    `lr`, and `train/loss` for `loss` (steps 1 and 2). A name of step 3 is `SECTION/...` already."""
    if name.split("/")[0] in NAME_SPACES:
        return name
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"optim/{name}" if name in _OPTIMIZER else f"train/{name}"
