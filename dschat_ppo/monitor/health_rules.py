"""What the health rules see, and what they look for: see the table of `config/health_flags.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dschat_ppo.config.health_flags import Rule

Metrics = Mapping[str, float]

SHORT_ANSWER = 8  # tokens on average; fewer distinct answers of such a length are expected, e.g. of numbers
RISE = 0.25  # of a score, in standard deviations, that is more than noise
WORSE = 0.002  # nats by which a held-out loss is higher by more than rounding
# Below these, numbers are noise: their ratio says nothing, and 0 would make each later number infinitely larger.
SMALL_KL = 0.01  # nats per token
SMALL_ENTROPY = 0.05  # nats per token
SMALL_LOSS = 0.05  # added before losses are compared
SMALLEST_NORM = 1e-6  # of a gradient that is not rounding noise


@dataclass(frozen=True)
class Seen:
    """What a rule has found. `text`: with the numbers; `since`: the first step of it."""

    text: str
    since: int


@dataclass(frozen=True)
class History:
    """The current step, with its metrics `now`, and those before it.

    Attributes:
        past: (step, metrics) of the last `window` steps before it, oldest first; fewer at the start of a run.
        start: metric -> mean over the first `window` steps of the run; {} until they are over.
        lowest: metric -> lowest mean of `window` steps in a row so far.
        evaluations: (step, held-out loss, mean training loss since the evaluation before) of the last evaluations and
            of the best one, oldest first.
        limits: rule -> threshold.
    """

    step: int
    now: Metrics
    past: Sequence[tuple[int, Metrics]]
    window: int
    start: Metrics
    lowest: Metrics
    evaluations: Sequence[tuple[int, float, float]]
    limits: Metrics

    def mean(self, name: str, above: float = -math.inf) -> float | None:
        """The mean of a metric over the window before this step; None until half of the window has it. Infinity does
        not count (it is the gradient norm of an fp16 overflow), and neither does what is not above the bound."""
        values = [metrics[name] for _, metrics in self.past if above < metrics.get(name, math.nan) < math.inf]
        return sum(values) / len(values) if 2 * len(values) >= self.window else None

    def halves(self, name: str) -> tuple[float, float] | None:
        """The means of a metric over the older and over the newer half of the window and this step, which is in the
        newer one; None before the window is full of it, or if this step does not have it."""
        values = [metrics[name] for metrics in (*(metrics for _, metrics in self.past), self.now) if name in metrics]
        if name not in self.now or len(values) <= self.window:
            return None
        middle = len(values) // 2
        older, newer = values[:middle], values[middle:]
        return sum(older) / len(older), sum(newer) / len(newer)

    @property
    def middle(self) -> int:
        """The first step of the newer half of the window."""
        steps = [*(step for step, _ in self.past), self.step]
        return steps[len(steps) // 2]


def find(rule: Rule, history: History) -> Seen | None:
    """What a rule finds at the current step."""
    if rule.name in MEANS:
        return _against_mean(rule, *MEANS[rule.name], history)
    if rule.name in TRENDS:
        return TRENDS[rule.name](history)
    text = _condition(rule, history.now, history.limits)
    if text is None or not rule.lasts:
        return None if text is None else Seen(text, history.step)
    before = [_condition(rule, metrics, history.limits) for _, metrics in history.past]
    if len(before) < history.window or None in before:
        return None
    return Seen(f"{text}, for {len(before) + 1} steps", history.past[0][0])


def _condition(rule: Rule, metrics: Metrics, limits: Metrics) -> str | None:
    """What is wrong with the metrics of one step."""
    if rule.name in CONDITIONS:
        return CONDITIONS[rule.name](metrics, limits)
    limit = limits[rule.name]
    value = metrics.get(rule.metric, limit)
    if not (value > limit if rule.comparison == "above" else value < limit):
        return None
    return f"{rule.metric} is {value:.3g}, {rule.comparison} {limit:g}"


# Conditions: (metrics of one step, thresholds) -> what is wrong with them, or None


def first_ratio_not_one(metrics: Metrics, limits: Metrics) -> str | None:
    """Log-ratios before the first update of a step are not 0. (If the old log-probs are those of sampling, they are
    the difference between rollout and training, for which `logprob_diff_high` is the rule.)"""
    name, limit = "policy/first_log_ratio_abs_mean", limits["first_ratio_not_one"]
    ratio = metrics.get(name, 0.0)
    if ratio <= limit or ratio == metrics.get("rollout/logprob_diff_mean"):
        return None
    largest = metrics.get("policy/first_log_ratio_abs_max", ratio)
    return f"{name} is {ratio:.3g} (at most {largest:.3g}), above {limit:g}"


def scores_equal(metrics: Metrics, limits: Metrics) -> str | None:
    """All answers score the same, or do once the scores are clipped."""
    limit = limits["scores_equal"]
    for name in ("reward/score_std", "reward/clipped_std"):
        spread = metrics.get(name, 1.0)
        if spread < limit and metrics.get("rollout/count", 1) >= 2:
            clipped, mean = metrics.get("reward/clipped_share", 0.0), metrics.get("reward/score_mean", 0.0)
            more = f"{clipped:.0%} are clipped" if name == "reward/clipped_std" else f"all score {mean:.3g}"
            return f"{name} is {spread:.3g}, below {limit:g}; {more}"
    return None


def source_constant(metrics: Metrics, limits: Metrics) -> str | None:
    """One of several reward sources gives all answers that it scores the same score."""
    limit, count, constant = limits["source_constant"], metrics.get("rollout/count", 1), []
    for name, spread in metrics.items():
        source = name.removesuffix("_std")
        if source == name or not name.startswith("reward/") or source in ("reward/score", "reward/clipped"):
            continue
        if spread < limit and count * metrics.get(f"{source}_share", 1.0) >= 2:
            constant.append(f"{name} is {spread:.3g}")
    return f"{', '.join(constant)}, below {limit:g}" if constant else None


def reward_faults(metrics: Metrics, limits: Metrics) -> str | None:
    """A reward function fails on many answers, which get the default score."""
    faults, count = metrics.get("reward/function_faults", 0.0), metrics.get("rollout/count", 0)
    if not faults or not count or faults < limits["reward_faults"] * count:
        return None
    return f"reward/function_faults is {faults:.0f}, of {count:.0f} answers"


def duplicate_answers(metrics: Metrics, limits: Metrics) -> str | None:
    """Many answers are equal although they are not short."""
    share, length = metrics.get("rollout/distinct_share", 1.0), metrics.get("rollout/length_mean", 0.0)
    limit = limits["duplicate_answers"]
    if share >= limit or length < SHORT_ANSWER:
        return None
    return f"rollout/distinct_share is {share:.3g}, below {limit:g}, with {length:.0f} tokens per answer"


def critic_lags(metrics: Metrics, limits: Metrics) -> str | None:
    """The mean value is further from the mean return than one standard deviation of the returns. (Where the returns are
    all equal, `scores_equal` is the rule.)"""
    names = ("value/mean", "value/return_mean", "value/return_std")
    if any(name not in metrics for name in names):
        return None
    value, target, spread = (metrics[name] for name in names)
    if abs(value - target) <= spread or spread < limits["scores_equal"]:
        return None
    return f"value/mean is {value:.3g}, but value/return_mean is {target:.3g} with a standard deviation of {spread:.3g}"


# Trends: what the steps of the window show

# Rules that compare a metric with its mean over the window before: (where the rule fires, of mean and threshold; words)
MEANS: dict[str, tuple[Callable[[float, float], float], str]] = {
    "kl_spike": (lambda mean, limit: max(limit, 3 * mean), "above {:g}"),
    "entropy_collapse": (
        lambda mean, factor: mean / factor if mean >= SMALL_ENTROPY else 0.0, "below its mean divided by {:g}"
    ),
    "entropy_explosion": (lambda mean, factor: max(mean, SMALL_ENTROPY) * factor, "above {:g} times its mean"),
    "fewer_answers_end": (lambda mean, drop: mean - drop, "more than {:g} below its mean"),
    "gradient_explodes": (lambda mean, factor: factor * mean, "above {:g} times its mean"),
}  # fmt: skip


def _against_mean(rule: Rule, bound: Callable[[float, float], float], words: str, history: History) -> Seen | None:
    """Compare the metric of a rule, for gradients those of all roles. A gradient of infinity is an overflow of fp16;
    where scores are all equal, estimators that compare answers have one of 0, which is no size to compare with."""
    is_norm, limit = rule.name == "gradient_explodes", history.limits[rule.name]
    prefix = rule.metric.removesuffix("ROLE")
    for name in [name for name in history.now if name.startswith(prefix)] if is_norm else [rule.metric]:
        value, mean = history.now.get(name), history.mean(name, above=SMALLEST_NORM if is_norm else -math.inf)
        if value is None or mean is None or (is_norm and value == math.inf):
            continue
        least = bound(mean, limit)
        if value > least if "above" in rule.comparison else value < least:
            text = f"{name} is {value:.3g}, {words.format(limit)}; its mean over the previous steps is {mean:.3g}"
            return Seen(text, history.step)
    return None


def reward_exploited(history: History) -> Seen | None:
    """The score rises within the window while the KL grows beyond its limit, or while the length climbs and the KL, if
    there is a reference, grows too."""
    names = ("reward/score_mean", "rollout/length_mean", "kl/ref_k1")
    halves = {name: pair for name in names if (pair := history.halves(name)) is not None}
    if names[0] not in halves or names[1] not in halves:
        return None
    (score, score_now), (length, length_now), (kl, kl_now) = (halves.get(name, (0.0, 0.0)) for name in names)
    limits, factor = history.limits, history.limits["length_creep"]
    rises = score_now - score > RISE * max(history.now.get("reward/score_std", 0.0), limits["scores_equal"])
    explodes = kl_now > max(limits["kl_spike"], 3 * kl)
    climbs = length_now > factor * length and (kl_now > factor * max(kl, SMALL_KL) or names[2] not in halves)
    if not rises or not (explodes or climbs):
        return None
    grown = ", ".join(f"{name} from {older:.3g} to {newer:.3g}" for name, (older, newer) in halves.items())
    return Seen(f"within {history.window + 1} steps {grown} (means of each half)", history.middle)


def length_creep(history: History) -> Seen | None:
    """Answers are longer than at the start of the run."""
    name, factor = "rollout/length_mean", history.limits["length_creep"]
    length, start = history.halves(name), history.start.get(name)
    if length is None or not start or length[1] <= factor * start:
        return None
    text = f"{name} is {length[1]:.3g} tokens, {length[1] / start:.2g} times that of the first {history.window} steps"
    return Seen(f"{text}, above {factor:g}", history.middle)


def updates_skipped(history: History) -> Seen | None:
    """Updates were skipped because of NaN or infinity."""
    name = "optim/nonfinite_skipped"
    before = history.past[-1][1].get(name, 0.0) if history.past else 0.0
    count = history.now.get(name, 0.0)
    return Seen(f"{name} is {count:.0f}, up from {before:.0f}", history.step) if count > before else None


def loss_grows(history: History) -> Seen | None:
    """The mean training loss over the window exceeds its lowest value so far by a factor."""
    loss, lowest, factor = history.mean("loss"), history.lowest.get("loss"), history.limits["loss_grows"]
    if loss is None or lowest is None or loss + SMALL_LOSS <= factor * (lowest + SMALL_LOSS):
        return None
    limit = f"{factor:g} times the lowest such mean so far, {lowest:.3g}"
    return Seen(f"the mean loss of {history.window} steps is {loss:.3g}, above {limit}", history.past[0][0])


def overfitting(history: History) -> Seen | None:
    """The last evaluations have a higher loss than the best one, while the training loss is lower than it was then."""
    count = int(history.limits["overfitting"])
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
    return Seen(f"{text}; {count} evaluations in a row are worse", last[0][0])


CONDITIONS: dict[str, Callable[[Metrics, Metrics], str | None]] = {
    function.__name__: function
    for function in (
        first_ratio_not_one, scores_equal, source_constant, reward_faults, duplicate_answers, critic_lags,
    )
}  # fmt: skip
TRENDS: dict[str, Callable[[History], Seen | None]] = {
    function.__name__: function
    for function in (
        reward_exploited, length_creep, updates_skipped, loss_grows, overfitting,
    )
}  # fmt: skip
