"""Health warnings: metrics of each step are compared with the rules; what they find is logged and
recorded. What is compared, and what the findings mean, is in the table of
`config/health_flags.py`."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from dschat_ppo.common.atomic_files import storage_errors, write_file
from dschat_ppo.common.dist import is_main
from dschat_ppo.common.logging import logger
from dschat_ppo.common.paths import HEALTH
from dschat_ppo.config.health_flags import HealthFlags, Level, Rule, thresholds

CALM = 3  # steps without a warning after which it is over
# a step without any of them made no update
COMPLETE = ("reward/score_std", "policy/counted_share", "loss")
LENGTH = "rollout/length_mean"
LONGER = 1.5  # factor of the length of responses, or of the KL, that is more than noise
# tokens on average; fewer distinct responses of such a length are expected, e.g. of numbers
SHORT_RESPONSE = 8
RISE = 0.25  # of a score, in standard deviations, that is more than noise
WORSE = 0.002  # nats by which a held-out loss is higher by more than rounding
# Below these, numbers are noise: their ratio says nothing, and 0 would make each later number
# infinitely larger.
SMALL_KL = 0.01  # nats per token
SMALL_ENTROPY = 0.05  # nats per token
SMALL_LOSS = 0.05  # added before losses are compared
SMALLEST_NORM = 1e-6  # of a gradient that is not rounding noise
Metrics = Mapping[str, float]


@dataclass
class History:
    """The current step, and what is known of those before it."""

    window: int  # steps
    limits: Metrics  # rule -> threshold
    # of the last `window` steps before it, oldest first; fewer at the start of a run
    past: deque[Metrics]
    now: Metrics = field(default_factory=dict)
    lowest_loss: float = math.inf  # the lowest mean loss of `window` steps in a row so far
    # (step, held-out loss, mean training loss since the evaluation before), oldest first
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    # sum and number of training losses since the last evaluation
    losses: tuple[float, int] = (0.0, 0)

    def begin_step(self, step: int, metrics: Metrics) -> None:
        """The metrics of the current step; those of an evaluation of steps 1 and 2 with the
        training loss before it."""
        self.now = {name: value for name, value in metrics.items() if not math.isnan(value)}
        total, count = self.losses
        if "loss" in self.now:
            total = total + self.now["loss"]
            count = count + 1
        if "eval_loss" in self.now and count:
            self.evaluations.append((step, self.now["eval_loss"], total / count))
            total = 0.0
            count = 0
        self.losses = (total, count)

    def end_step(self) -> None:
        """Add the current step to the past ones, if it made an update."""
        if not any(name in self.now for name in COMPLETE):
            return
        self.past.append(self.now)
        losses = [metrics["loss"] for metrics in self.past if "loss" in metrics]
        if len(losses) == self.window:
            self.lowest_loss = min(self.lowest_loss, sum(losses) / self.window)

    def mean(self, name: str, above: float = -math.inf) -> float | None:
        """The mean of a metric over the window before this step; None until half of the window has
        it. Infinity does not count (it is the gradient norm of an fp16 overflow), and neither does
        what is not above the bound."""
        values = [
            metrics[name] for metrics in self.past if above < metrics.get(name, math.nan) < math.inf
        ]
        if 2 * len(values) >= self.window:
            return sum(values) / len(values)
        return None

    def halves(self, name: str) -> tuple[float, float] | None:
        """The means of a metric over the older and over the newer half of the window and this step,
        which is in the newer one; None before the window is full of it, or if this step does not
        have it."""
        values = [metrics[name] for metrics in (*self.past, self.now) if name in metrics]
        if name not in self.now or len(values) <= self.window:
            return None
        middle = len(values) // 2
        older = values[:middle]
        newer = values[middle:]
        return sum(older) / len(older), sum(newer) / len(newer)


def find(rule: Rule, history: History) -> str | None:
    """What a rule finds at the current step, with the numbers."""
    check = CHECKS.get(rule.name, partial(_beyond_bound, rule))
    finding = check(history)
    if finding is None or not rule.lasts:
        return finding
    earlier = [check(replace(history, now=metrics)) for metrics in history.past]
    if len(earlier) < history.window or None in earlier:
        return None
    return f"{finding}, for {len(earlier) + 1} steps"


# `Rule.comparison` -> the bound, of (threshold, mean of the metric over the window before)
BOUNDS: dict[str, Callable[[float, float], float]] = {
    "above it": lambda limit, mean: limit,
    "below it": lambda limit, mean: limit,
    "above it and three times the mean": lambda limit, mean: max(limit, 3 * mean),
    "above the mean times it": lambda limit, mean: limit * mean,
    "below the mean divided by it": lambda limit, mean: mean / limit,
    "below the mean minus it": lambda limit, mean: mean - limit,
}


def _beyond_bound(rule: Rule, history: History) -> str | None:
    """What the comparison of a rule with its bound finds, for the first metric that is beyond it:
    the norms of gradients are those of several roles."""
    for name, value in history.now.items():
        is_norm = "grad_norm" in rule.metric and name.startswith(rule.metric.removesuffix("ROLE"))
        is_metric = fnmatchcase(name, rule.metric.replace("NAME", "*"))
        if not is_metric and not is_norm:
            continue
        if is_norm and value == math.inf:  # an overflow of fp16
            continue
        finding = _compared(rule, history, name, value)
        if finding is not None:
            return finding
    return None


def _compared(rule: Rule, history: History, name: str, value: float) -> str | None:
    """What the rule finds if this `value` of the metric `name` is beyond its bound."""
    limit = history.limits[rule.name]
    is_above = rule.comparison.startswith("above")
    finding = f"{name} is {value:.3g}, {rule.comparison.replace(' it', f' {limit:g}')}"
    mean = limit
    if "mean" in rule.comparison:
        smallest = -math.inf
        if "grad_norm" in rule.metric:
            # where scores are all equal, estimators that compare responses have a norm of 0, which
            # is no size to compare with
            smallest = SMALLEST_NORM
        mean_before = history.mean(name, above=smallest)
        if mean_before is None:
            return None
        mean = mean_before
        finding += f"; its mean over the previous steps is {mean:.3g}"
    # too small to fall by a factor, and to rise from
    if "entropy" in rule.metric and mean < SMALL_ENTROPY:
        mean = SMALL_ENTROPY if is_above else 0.0
    bound = BOUNDS[rule.comparison](limit, mean)
    is_beyond = value > bound if is_above else value < bound
    return finding if is_beyond else None


# Checks of rules that no comparison with the threshold alone can say


def first_ratio_not_one(history: History) -> str | None:
    """Log-ratios before the first update of a step are not 0. (If the old log-probs are those of
    sampling, they are the difference between rollout and training, for which `logprob_diff_high` is
    the rule.)"""
    now = history.now
    name = "policy/first_log_ratio_abs_mean"
    limit = history.limits["first_ratio_not_one"]
    ratio = now.get(name, 0.0)
    if ratio <= limit or ratio == now.get("rollout/logprob_diff_mean"):
        return None
    return (
        f"{name} is {ratio:.3g} (at most {now.get('policy/first_log_ratio_abs_max', ratio):.3g}),"
        f" above {limit:g}"
    )


def scores_equal(history: History) -> str | None:
    """All responses score the same, or do once the scores are clipped."""
    now = history.now
    limit = history.limits["scores_equal"]
    clipped = now.get("reward/clipped_share", 0.0)
    mean = now.get("reward/score_mean", 0.0)
    if now.get("rollout/count", 1) < 2:
        return None
    spread = now.get("reward/score_std", 1.0)
    if spread < limit:
        return f"reward/score_std is {spread:.3g}, below {limit:g}; all score {mean:.3g}"
    spread = now.get("reward/clipped_std", 1.0)
    if spread < limit:
        return f"reward/clipped_std is {spread:.3g}, below {limit:g}; {clipped:.0%} are clipped"
    return None


def groups_equal(history: History) -> str | None:
    """The responses to each prompt score alike, and an estimator compares them: there is no critic.
    Where all responses score alike, `scores_equal` says so."""
    now = history.now
    limit = history.limits["groups_equal"]
    share = now.get("reward/equal_groups_share", 0.0)
    has_critic = "value/explained_variance" in now
    all_equal = now.get("reward/score_std", 0.0) < history.limits["scores_equal"]
    if share <= limit or has_critic or all_equal:
        return None
    return f"reward/equal_groups_share is {share:.3g}, above {limit:g}"


def reward_faults(history: History) -> str | None:
    """A reward function fails on many responses, which get the default score."""
    faults = history.now.get("reward/function_faults", 0.0)
    count = history.now.get("rollout/count", 0)
    if faults and count and faults >= history.limits["reward_faults"] * count:
        return f"reward/function_faults is {faults:.0f}, of {count:.0f} answers"
    return None


def duplicate_answers(history: History) -> str | None:
    """Many responses are equal although they are not short."""
    share = history.now.get("rollout/distinct_share", 1.0)
    length = history.now.get(LENGTH, 0.0)
    limit = history.limits["duplicate_answers"]
    if share >= limit or length < SHORT_RESPONSE:
        return None
    return (
        f"rollout/distinct_share is {share:.3g}, below {limit:g}, with {length:.0f} tokens per"
        " answer"
    )


def reward_exploited(history: History) -> str | None:
    """The score rises within the window while the KL grows beyond its limit, or while the length
    climbs and the KL, if there is a reference, grows too."""
    scores = history.halves("reward/score_mean")
    lengths = history.halves(LENGTH)
    kls = history.halves("kl/ref_k1")
    if scores is None or lengths is None:
        return None
    limits = history.limits
    spread = max(history.now.get("reward/score_std", 0.0), limits["scores_equal"])
    score_rises = scores[1] - scores[0] > RISE * spread
    kl_explodes = False
    kl_grows = True  # as far as is known without a reference
    if kls is not None:
        kl_explodes = kls[1] > max(limits["kl_spike"], 3 * kls[0])
        kl_grows = kls[1] > LONGER * max(kls[0], SMALL_KL)
    length_climbs = lengths[1] > LONGER * lengths[0]
    if not score_rises or not (kl_explodes or (length_climbs and kl_grows)):
        return None
    changes = []
    for name, halves in (("reward/score_mean", scores), (LENGTH, lengths), ("kl/ref_k1", kls)):
        if halves is not None:
            changes.append(f"{name} from {halves[0]:.3g} to {halves[1]:.3g}")
    return f"within {history.window + 1} steps {', '.join(changes)} (means of each half)"


def updates_skipped(history: History) -> str | None:
    """Updates were skipped because of NaN or infinity."""
    name = "optim/nonfinite_skipped"
    before = 0.0
    if history.past:
        before = history.past[-1].get(name, 0.0)
    count = history.now.get(name, 0.0)
    if count > before:
        return f"{name} is {count:.0f}, up from {before:.0f}"
    return None


def loss_grows(history: History) -> str | None:
    """The mean training loss over the window exceeds its lowest value so far by a factor."""
    loss = history.mean("loss")
    lowest = history.lowest_loss
    factor = history.limits["loss_grows"]
    if loss is None or loss + SMALL_LOSS <= factor * (lowest + SMALL_LOSS):
        return None
    limit = f"{factor:g} times the lowest such mean so far, {lowest:.3g}"
    return f"the mean loss of {history.window} steps is {loss:.3g}, above {limit}"


def overfitting(history: History) -> str | None:
    """The last evaluations have a higher loss than the best one, while the training loss is lower
    than it was then."""
    count = int(history.limits["overfitting"])
    if len(history.evaluations) <= count or "eval_loss" not in history.now:
        return None
    best_step, best, trained_then = min(history.evaluations, key=lambda evaluation: evaluation[1])
    _, held_out, trained = history.evaluations[-1]
    if trained >= trained_then:
        return None
    for step, loss, _ in history.evaluations[-count:]:
        if step <= best_step or loss <= best + WORSE:
            return None
    return (
        f"eval_loss is {held_out:.3g}, and was {best:.3g} at step {best_step}, while the mean"
        f" training loss fell from {trained_then:.3g} to {trained:.3g}; {count} evaluations in a"
        " row are worse"
    )


CHECKS: dict[str, Callable[[History], str | None]] = {
    function.__name__: function
    for function in (
        first_ratio_not_one,
        scores_equal,
        groups_equal,
        reward_faults,
        duplicate_answers,
        reward_exploited,
        updates_skipped,
        loss_grows,
        overfitting,
    )
}


@dataclass(frozen=True)
class Event:
    """A line of `health.jsonl`: an event of a rule, what was `seen`, with numbers, its likely
    cause, and what to change."""

    step: int
    name: str
    level: Level
    seen: str
    cause: str
    change: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.seen}. Likely cause: {self.cause}. What to change: {self.change}"
        )


class HealthWatch:
    """Applies rules to the metrics of each step. A warning that persists is one event; after `CALM`
    steps without it, it is over and would be a new one. A `StorageError` of `health.jsonl` is
    raised on rank 0 only."""

    def __init__(self, flags: HealthFlags):
        window, limits, off = thresholds(flags)
        self.rules = [rule for rule in flags.rules if rule.name not in off]
        self.stop = flags.stop_on_health
        self.history = History(window, limits, deque(maxlen=window))
        self.events: list[Event] = []  # of the whole run
        self._standing: dict[str, int] = {}  # name -> step at which it was last found
        self._reason_to_stop: str | None = None  # by --stop_on_health, at the last step
        self._file: Path | None = None

    def begin(self, folder: Path) -> None:
        """Write `health.jsonl` with the events so far, so that a resumed run has those up to its
        checkpoint."""
        self._file = folder / HEALTH
        self._write_events()

    def check(self, step: int, metrics: Metrics) -> list[Event]:
        """The new events at a step with these metrics (as in `metrics.jsonl`); they are logged and
        recorded."""
        self.history.begin_step(step, metrics)
        fresh = []
        for rule in self.rules:
            finding = find(rule, self.history)
            if finding is None:
                continue
            if rule.name not in self._standing:
                fresh.append(Event(step, rule.name, rule.level, finding, rule.cause, rule.change))
            self._standing[rule.name] = step
        for event in fresh:
            level = " (error)" if event.level == "error" else ""
            logger().warning(f"health: step {step}{level}: {event}")
        for name, last in list(self._standing.items()):
            if step - last >= CALM:
                del self._standing[name]
                logger().info(f"health: step {step}: {name} is over")
        self.history.end_step()
        if fresh:
            self.events += fresh
            self._write_events()
        self._reason_to_stop = None
        for event in fresh:
            if self.stop in ("warning", event.level):
                self._reason_to_stop = f"--stop_on_health {self.stop}: step {step}: {event}"
                break
        return fresh

    def stop_if_due(self, checkpointer: Any) -> None:
        """Give the `CheckpointManager` the reason to stop at the last step, unless
        `--stop_on_health` is off. Collective."""
        if self.stop != "off":
            checkpointer.stop_if(self._reason_to_stop)

    def state_dict(self) -> dict[str, Any]:
        """The state, for `load_state_dict`."""
        history = self.history
        lowest = {}
        if history.lowest_loss < math.inf:
            lowest["loss"] = history.lowest_loss
        return {
            "past": [dict(metrics) for metrics in history.past],
            "standing": dict(self._standing),
            "lowest": lowest,
            "evaluations": list(history.evaluations),
            "losses": history.losses,
            "events": [asdict(event) for event in self.events],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.history = replace(
            self.history,
            past=deque(state["past"], self.history.window),
            lowest_loss=state["lowest"].get("loss", math.inf),
            evaluations=list(state["evaluations"]),
            losses=state["losses"],
        )
        self._standing = dict(state["standing"])
        self.events = [Event(**event) for event in state["events"]]

    def _write_events(self) -> None:
        """Write `health.jsonl` on rank 0, durably: all of it, because events are rare."""
        if self._file is not None and is_main():
            lines = "".join(f"{json.dumps(asdict(event))}\n" for event in self.events)
            with storage_errors(self._file):
                write_file(self._file, lines.encode())
