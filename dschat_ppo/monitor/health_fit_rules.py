"""The health rules of steps 1 and 2."""

from __future__ import annotations

from dschat_ppo.config.health_flags import FitHealthFlags
from dschat_ppo.monitor.health_common_rules import OVERFLOWS, SKIPPED, gradient_explodes
from dschat_ppo.monitor.health_rule import History, Rule, Seen

CHANCE = 0.55  # accuracy of a reward model on pairs; 0.5 is that of guessing
LEARNS_AFTER = 2  # windows; until then a small learning rate may not have had an effect
SMALL_LOSS = 0.05  # added before losses are compared, because the ratio of two losses near 0 is noise
WORSE = 0.002  # nats by which a held-out loss is higher by more than rounding


def loss_grows(history: History, flags: FitHealthFlags) -> Seen | None:
    """The mean training loss over the window exceeds its lowest value so far by a factor."""
    loss, lowest = history.mean("loss"), history.lowest.get("loss")
    if loss is None or lowest is None or loss + SMALL_LOSS <= flags.health_loss_growth * (lowest + SMALL_LOSS):
        return None
    limit = f"{flags.health_loss_growth:g} times (--health_loss_growth) the lowest such mean so far, {lowest:.3g}"
    text = f"the mean loss of {history.window} steps is {loss:.3g}, above {limit}"
    return Seen(text, history.past[0][0])


def overfits(history: History, flags: FitHealthFlags) -> Seen | None:
    """The last evaluations have a higher loss than the best one, while the training loss is lower than it was then."""
    count = flags.health_overfit_evals
    if len(history.evaluations) <= count or "eval_loss" not in history.now:
        return None
    best, *_ = sorted(history.evaluations, key=lambda evaluation: evaluation[1])
    last = history.evaluations[-count:]
    if (
        any(evaluation[0] <= best[0] or evaluation[1] <= best[1] + WORSE for evaluation in last)
        or last[-1][2] >= best[2]
    ):
        return None
    held_out = f"eval_loss is {last[-1][1]:.3g}, and was {best[1]:.3g} at step {best[0]}"
    text = f"{held_out}, while the mean training loss fell from {best[2]:.3g} to {last[-1][2]:.3g}"
    return Seen(f"{text}; {count} evaluations in a row are worse (--health_overfit_evals)", last[0][0])


def guesses(history: History, _: FitHealthFlags) -> Seen | None:
    """The accuracy on training pairs is that of guessing over a whole window, and not just at the start."""
    accuracy = history.mean("accuracy")
    if accuracy is None or accuracy >= CHANCE or history.step <= LEARNS_AFTER * history.window:
        return None
    text = f"the mean accuracy of {history.window} steps is {accuracy:.3g}, below {CHANCE:g}; guessing gives 0.5"
    return Seen(text, history.past[0][0])


FIT_RULES: tuple[Rule, ...] = (
    Rule(
        "loss_grows", "error", loss_grows,
        "training diverges: the learning rate is too high, or later rows differ from earlier ones",
        "resume from an earlier checkpoint with a lower --learning_rate or more --num_warmup_steps",
    ),
    Rule(
        "overfitting", "warning", overfits,
        "the model memorises the training rows",
        "stop here and use the best model (--metric_for_best eval_loss); use fewer --num_train_epochs, more rows or a "
        "lower --learning_rate",
    ),
    Rule(
        "accuracy_of_guessing", "warning", guesses,
        "the model does not learn which answer is preferred: the preferences look like noise to it, or the learning "
        "rate is too low",
        "look at the pairs (python -m dschat_ppo.tools.data), raise --learning_rate, or train longer",
    ),
    Rule(
        "gradient_explodes", "warning", gradient_explodes,
        "a batch with unusual rows, or a learning rate at which training is about to diverge",
        "if it repeats, lower --learning_rate or --max_grad_norm, and look at the rows",
    ),
    SKIPPED,
    OVERFLOWS,
)  # fmt: skip
