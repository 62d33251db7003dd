"""The health rules that all steps share."""

from __future__ import annotations

from typing import Any

from dschat_ppo.config.health_flags import FitHealthFlags, PPOHealthFlags
from dschat_ppo.monitor.health_rule import History, Rule, Seen


def updates_skipped(history: History, _: Any) -> Seen | None:
    """Updates were skipped because of NaN or infinity."""
    name = "optim/nonfinite_skipped"
    before = history.past[-1][1].get(name, 0.0) if history.past else 0.0
    count = history.now.get(name, 0.0)
    if count <= before:
        return None
    return Seen(f"{name} is {count:.0f}, up from {before:.0f}", history.step)


def fp16_overflows(history: History, _: Any) -> Seen | None:
    """Loss scaling skips an update of some role in at least every second step of the window."""
    for name, count in history.now.items():
        if name.startswith("optim/overflow/") and len(history.past) == history.window:
            skipped = count - history.past[0][1].get(name, count)
            if skipped >= history.window / 2:
                text = f"{name} grew by {skipped:.0f} within {history.window} steps"
                return Seen(text, history.past[0][0])
    return None


SMALLEST_NORM = 1e-6  # of a gradient that is not rounding noise


def gradient_explodes(history: History, flags: PPOHealthFlags | FitHealthFlags) -> Seen | None:
    """A gradient norm exceeds its mean over the window by a factor. (Infinity is an overflow of fp16; in a step whose
    scores are all equal, estimators that compare answers have a gradient of 0, which is no size to compare with.)"""
    for name, norm in history.now.items():
        if name == "grad_norm" or name.startswith("optim/grad_norm/"):
            mean = history.mean(name, above=SMALLEST_NORM)
            if mean is not None and flags.health_grad_growth * mean < norm < float("inf"):
                limit = f"{flags.health_grad_growth:g} times (--health_grad_growth) its mean over the previous steps"
                return Seen(f"{name} is {norm:.3g}, above {limit}, {mean:.3g}", history.step)
    return None


SKIPPED: Rule = Rule(
    "updates_skipped", "warning", updates_skipped,
    "a NaN or an infinity in a loss, gradient, reward or advantage; the update is skipped (--on_nonfinite skip)",
    "replay the batch that the warning names (docs/numbers.md); lower the learning rate, or use --dtype fp32",
)  # fmt: skip
OVERFLOWS: Rule = Rule(
    "fp16_overflows", "warning", fp16_overflows,
    "gradients overflow in fp16 even at small loss scales, so many updates are skipped",
    "use --dtype bf16 or fp32, or lower the learning rate",
)  # fmt: skip
