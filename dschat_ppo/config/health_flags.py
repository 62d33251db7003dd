"""The health rules as one table, and the flags that change their thresholds or end a run at an
event."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

from dschat_ppo.config.schema import flag
from dschat_ppo.errors import UserError, reading
from dschat_ppo.features import hooks

Stop = Literal["off", "error", "warning"]
Level = Literal["warning", "error"]
WINDOW, OFF = "window", "off"
PPO_WINDOW = 10  # steps
FIT_WINDOW = 50


@dataclass(frozen=True)
class Rule:
    """One rule. `monitor/health.py` holds what no comparison with the threshold alone can say."""

    name: str
    level: Level  # "error" if training on is likely wasted
    metric: str  # NAME in it stands for any name
    # of the metric with the threshold ("it"); "mean" is that over the window before the step
    comparison: str
    threshold: float | None  # its default; None if there is none to choose
    cause: str
    change: str  # what to change; flags by name
    lasts: bool = False  # whether it must hold at this step and at each one of the window before it


_SKIPPED = Rule(
    "updates_skipped",
    "warning",
    "optim/nonfinite_skipped",
    "grows",
    None,
    "a NaN or an infinity in a loss, gradient, reward or advantage; the update is skipped"
    " (--on_nonfinite skip)",
    "replay the batch that the warning names (docs/reliability.md); lower the learning rate, or use"
    " --dtype fp32",
)
CORE_PPO_RULES: tuple[Rule, ...] = (
    Rule(
        "kl_negative",
        "error",
        "kl/ref_k1",
        "below it",
        -0.02,
        "sampling and scoring use different settings or models, so that answers are not samples of"
        " the scored policy",
        "compare --temperature, --top_p and --top_k with what you expect; try --rollout_engine"
        " padded and --dtype fp32",
    ),
    Rule(
        "kl_spike",
        "warning",
        "kl/ref_k1",
        "above it and three times the mean",
        0.5,
        "the last updates were too large, or a single kind of answer suddenly pays off",
        "lower --actor_learning_rate or --ppo_epochs, raise --kl_coef, or set --target_kl",
    ),
    Rule(
        "entropy_collapse",
        "error",
        "policy/entropy",
        "below the mean divided by it",
        3.0,
        "the policy puts nearly all probability on few answers and stops exploring",
        "lower --actor_learning_rate, raise --entropy_coef or --kl_coef, or sample with a higher"
        " --temperature",
    ),
    Rule(
        "entropy_explosion",
        "error",
        "policy/entropy",
        "above the mean times it",
        3.0,
        "the policy falls apart: its updates are too large, or nothing holds it near the reference",
        "resume from an earlier checkpoint with a lower --actor_learning_rate, a higher --kl_coef"
        " or a lower --entropy_coef",
    ),
    Rule(
        "scores_equal",
        "warning",
        "reward/score_std",
        "below, also of the clipped scores",
        0.001,
        "the reward does not tell the answers apart: it is constant, fails on all of them, is"
        " clipped, or the task is solved",
        "read the answers (--print_answers) and test the reward on them; raise --reward_clip if it"
        " clips them; use harder prompts, a higher --temperature or more --n_samples_per_prompt",
    ),
    Rule(
        "groups_equal",
        "warning",
        "reward/equal_groups_share",
        "above it, without a critic",
        0.9,
        "the answers to one prompt score alike, although those to other prompts differ, so nearly"
        " all groups teach nothing: the prompts are too easy or too hard, or the answers are the"
        " same",
        "use --dynamic_sampling, harder or easier prompts, more --n_samples_per_prompt or a higher"
        " --temperature",
        lasts=True,
    ),
    Rule(
        "reward_faults",
        "warning",
        "reward/function_faults",
        "at least this share of the answers",
        0.1,
        "a reward function raises an exception or exceeds --reward_timeout; what such answers get"
        " is --reward_default",
        "read the first traceback in logs/rank_R.log and correct the function or raise"
        " --reward_timeout",
    ),
    Rule(
        "answers_unscored",
        "warning",
        "rollout/unscored_share",
        "above it",
        0.1,
        "no reward source scores many answers: every function returns None for them, or its route"
        " is of other data",
        "score each answer in some function, correct the routes of --reward_function, or leave"
        " such rows out of --data_path",
    ),
    Rule(
        "answers_left",
        "warning",
        "rollout/left_share",
        "above it",
        0.1,
        "many answers have no score and leave their groups, so that failing costs the policy less"
        " than a bad score",
        "let the reward function, or whatever else the warnings name, catch what the model's text"
        " can cause, and score it; or give such answers a score with --reward_default NUMBER",
    ),
    Rule(
        "duplicate_answers",
        "warning",
        "rollout/distinct_share",
        "below, if not short",
        0.5,
        "the policy collapses to few answers, or the sampling is nearly greedy",
        "raise --kl_coef or --entropy_coef, or sample with a higher --temperature, --top_p or"
        " --top_k",
    ),
    Rule(
        "reward_exploited",
        "error",
        "reward/score_mean",
        "rises while the KL or the length does",
        None,
        "the policy exploits a weakness of the reward: it scores higher by length or by moving far"
        " from the reference",
        "read the answers; raise --kl_coef, lower --actor_learning_rate, stop at an earlier"
        " checkpoint, or correct the reward (a length penalty: --overlong_buffer)",
    ),
    Rule(
        "fewer_answers_end",
        "warning",
        "rollout/ended_share",
        "below the mean minus it",
        0.3,
        "answers run into the length limit, and the reward does not penalise that",
        "raise --missing_eos_penalty or --max_answer_seq_len",
    ),
    Rule(
        "answers_never_end",
        "error",
        "rollout/ended_share",
        "below it",
        0.1,
        "the SFT model has not learned its end token, or --max_answer_seq_len is shorter than any"
        " answer",
        "check the end of the rows of step 1 (python -m dschat_ppo.tools.data), train step 1"
        " longer, set --stop_token_ids, or raise --max_answer_seq_len",
        lasts=True,
    ),
    Rule(
        "clip_fraction_high",
        "warning",
        "policy/clip_fraction",
        "above it",
        0.3,
        "the policy moves far within one PPO step, so that the loss clips its updates",
        "lower --actor_learning_rate or --ppo_epochs, or raise --per_device_training_batch_size",
    ),
    Rule(
        "first_ratio_not_one",
        "warning",
        "policy/first_log_ratio_abs_mean",
        "above, in training",
        0.05,
        "before any update, training computes different log-probs from scoring or sampling:"
        " dropout, rounding, or different kernels",
        "train without --actor_dropout and --lora_dropout, or with --dtype fp32; if it persists,"
        " report it as a bug",
    ),
    Rule(
        "critic_explains_nothing",
        "warning",
        "value/explained_variance",
        "below it",
        0.02,
        "the critic does not learn, or the score is noise to it",
        "raise --critic_learning_rate or --critic_warmup_rollouts, check the reward, or use an"
        " --advantage_estimator without a critic",
        lasts=True,
    ),
    Rule(
        "logprob_diff_high",
        "warning",
        "rollout/logprob_diff_mean",
        "above it",
        0.1,
        "the precision is too low, or generation and training run different weights or kernels",
        "use --dtype fp32 or --rollout_engine padded to find out which; correct for it with"
        " --importance_correction",
    ),
    Rule(
        "gradient_explodes",
        "warning",
        "optim/grad_norm/ROLE",
        "above the mean times it",
        10.0,
        "a batch with extreme rewards, ratios or values; the gradient is clipped to"
        " --max_grad_norm",
        "if it repeats, lower the learning rate of this model, clip the scores (--reward_clip), or"
        " lower --max_grad_norm",
    ),
    _SKIPPED,
)
# those of step 3, with those that features offer
PPO_RULES: tuple[Rule, ...] = (
    *CORE_PPO_RULES,
    *chain.from_iterable(hooks("health_rules.PPO_RULES")),
)
FIT_RULES: tuple[Rule, ...] = (
    Rule(
        "loss_grows",
        "error",
        "loss",
        "mean above the lowest mean so far times it",
        1.5,
        "training diverges: the learning rate is too high, or later rows differ from earlier ones",
        "resume from an earlier checkpoint with a lower --learning_rate or more --num_warmup_steps",
    ),
    Rule(
        "overfitting",
        "warning",
        "eval_loss",
        "this many evaluations are worse than the best",
        2,
        "the model memorises the training rows",
        "stop here and use the best model (--metric_for_best eval_loss); use fewer"
        " --num_train_epochs, more rows or a lower --learning_rate",
    ),
    Rule(
        "gradient_explodes",
        "warning",
        "grad_norm",
        "above the mean times it",
        10.0,
        "a batch with unusual rows, or a learning rate at which training is about to diverge",
        "if it repeats, lower --learning_rate or --max_grad_norm, and look at the rows",
    ),
    _SKIPPED,
)
_STOP = (
    "at the first health event of this level, save a checkpoint and end the run with exit code 6;"
    " 'error': errors only, 'warning': errors and warnings; the same command resumes the run"
)


def _help(rules: Sequence[Rule], window: int) -> str:
    """The help of `--health`, with the default of each rule."""
    names = []
    for rule in rules:
        if rule.threshold is None:
            names.append(rule.name)
        else:
            names.append(f"{rule.name}={rule.threshold:g}")
    return (
        "thresholds of the health warnings as NAME=VALUE, NAME=off for none"
        " (docs/troubleshooting.md); window: steps that a trend covers. Defaults:"
        f" {WINDOW}={window}, {', '.join(names)}"
    )


@dataclass(frozen=True)
class HealthFlags:
    """What the flags of all steps share."""

    rules: ClassVar[tuple[Rule, ...]]
    default_window: ClassVar[int]  # steps

    stop_on_health: Stop = flag("off", _STOP)
    health: list[str] = flag([], "", commas=True)

    def __post_init__(self) -> None:
        thresholds(self)  # refuse invalid values now


@dataclass(frozen=True)
class PPOHealthFlags(HealthFlags):
    """Health warnings of step 3."""

    rules = PPO_RULES
    default_window = PPO_WINDOW
    health: list[str] = flag(
        [],
        _help(PPO_RULES, default_window),
        commas=True,
        check=lambda texts: parse_thresholds(texts, PPO_RULES, PPO_WINDOW),
    )


@dataclass(frozen=True)
class FitHealthFlags(HealthFlags):
    """Health warnings of steps 1 and 2."""

    rules = FIT_RULES
    default_window = FIT_WINDOW
    health: list[str] = flag(
        [],
        _help(FIT_RULES, default_window),
        commas=True,
        check=lambda texts: parse_thresholds(texts, FIT_RULES, FIT_WINDOW),
    )


def thresholds(flags: HealthFlags) -> tuple[int, dict[str, float], set[str]]:
    """(window, threshold of each rule that has one, rules that are off)."""
    return parse_thresholds(flags.health, flags.rules, flags.default_window)


def parse_thresholds(
    texts: Sequence[str], rules: Sequence[Rule], window: int
) -> tuple[int, dict[str, float], set[str]]:
    """What `thresholds` returns, of the texts of `--health`; `window`: the default."""
    defaults = {rule.name: rule.threshold for rule in rules}
    off = set[str]()
    limits = dict(defaults)
    for text in texts:
        name, _, value = text.partition("=")
        if name not in (WINDOW, *limits):
            raise UserError(
                f"--health {text}: there is no rule {name!r}, but {WINDOW}, {', '.join(limits)}"
            )
        limit = defaults.get(name)
        if name == WINDOW:
            if not value.isdecimal() or int(value) < 2:
                raise UserError(f"--health {text}: {WINDOW} takes a whole number of 2 or more")
            window = int(value)
        elif value == OFF:
            off.add(name)
        elif limit is None:
            raise UserError(f"--health {text}: {name} takes off")
        else:
            with reading(f"--health {text}: {name} takes a number, or off"):
                threshold = float(value)
            # A default above 1 is a factor or a count, which 1 bounds. Others are sizes: 0 bounds
            # them, from above if the default is below 0.
            bound = 1 if limit > 1 else 0
            size = threshold * math.copysign(1, limit)
            counts_evaluations = name == "overfitting"
            is_fraction = counts_evaluations and not threshold.is_integer()
            if is_fraction or not bound <= size < math.inf:
                side = "below" if limit < 0 else "above"
                kind = "whole numbers of " if counts_evaluations else ""
                raise UserError(f"--health {text}: {name} takes {kind}{bound} or {side}, or off")
            limits[name] = threshold
            off.discard(name)
    return window, {name: limit for name, limit in limits.items() if limit is not None}, off
