"""The health rules of step 3: what each one looks for, the likely cause, and what to change."""

from __future__ import annotations

from dschat_ppo.config.health_flags import PPOHealthFlags
from dschat_ppo.monitor.health_common_rules import OVERFLOWS, SKIPPED, gradient_explodes
from dschat_ppo.monitor.health_rule import History, Metrics, Rule, Seen, above, at_once, for_a_window

SHORT_ANSWER = 8  # tokens on average; fewer distinct answers of such a length are expected, e.g. of numbers
FAULTY_SHARE = 0.1  # of the answers on which a reward function may fail
NEVER_ENDS = 0.1  # share of answers; a tenth of few answers is still above 0 in each step
RISE = 0.25  # of a score, in standard deviations, that is more than noise
# Below these, numbers are noise: their ratio says nothing, and 0 would make each later number infinitely larger.
SMALL_KL = 0.01  # nats per token
SMALL_ENTROPY = 0.05  # nats per token
EXPLAINED = 0.02  # share of the returns' variance


def ratio_not_one(metrics: Metrics, flags: PPOHealthFlags) -> str | None:
    """Log-ratios before the first update of a step are not 0. (If the old log-probs are those of sampling, they are
    the difference between rollout and training, for which `logprob_diff_high` is the rule.)"""
    name, limit = "policy/first_log_ratio_abs_mean", flags.health_first_log_ratio
    ratio = metrics.get(name, 0.0)
    if ratio <= limit or ratio == metrics.get("rollout/logprob_diff_mean"):
        return None
    largest = metrics.get("policy/first_log_ratio_abs_max", ratio)
    return f"{name} is {ratio:.3g} (at most {largest:.3g}), above {limit:g} (--health_first_log_ratio)"


def negative_kl(metrics: Metrics, flags: PPOHealthFlags) -> str | None:
    """The mean of log p - log p_ref over tokens sampled from p estimates a KL divergence, which is not negative."""
    kl, limit = metrics.get("kl/ref_k1", 0.0), -flags.health_negative_kl
    return f"kl/ref_k1 is {kl:.3g}, below {limit:g} (--health_negative_kl)" if kl < limit else None


def kl_spike(history: History, flags: PPOHealthFlags) -> Seen | None:
    """The KL exceeds the flag and three times its mean over the window."""
    kl, mean = history.now.get("kl/ref_k1", 0.0), history.mean("kl/ref_k1")
    if mean is None or kl <= max(flags.health_kl_spike, 3 * mean):
        return None
    text = f"kl/ref_k1 is {kl:.3g}; its mean over the previous steps is {mean:.3g} (--health_kl_spike)"
    return Seen(text, history.step)


def entropy_collapse(history: History, flags: PPOHealthFlags) -> Seen | None:
    """The entropy is a fraction of its mean over the window."""
    entropy, mean = history.now.get("policy/entropy"), history.mean("policy/entropy")
    if entropy is None or mean is None or entropy * flags.health_entropy_factor >= mean or mean < SMALL_ENTROPY:
        return None
    text = f"policy/entropy is {entropy:.3g}, less than its mean over the previous steps, {mean:.3g}, divided by "
    return Seen(f"{text}{flags.health_entropy_factor:g} (--health_entropy_factor)", history.step)


def entropy_explosion(history: History, flags: PPOHealthFlags) -> Seen | None:
    """The entropy is a multiple of its mean over the window."""
    entropy, mean = history.now.get("policy/entropy"), history.mean("policy/entropy")
    if entropy is None or mean is None or entropy <= max(mean, SMALL_ENTROPY) * flags.health_entropy_factor:
        return None
    text = f"policy/entropy is {entropy:.3g}, more than {flags.health_entropy_factor:g} times (--health_entropy_factor)"
    return Seen(f"{text} its mean over the previous steps, {mean:.3g}", history.step)


def equal_scores(metrics: Metrics, flags: PPOHealthFlags) -> str | None:
    """All answers score the same, or do once the scores are clipped."""
    for name in ("reward/score_std", "reward/clipped_std"):
        spread = metrics.get(name, 1.0)
        if spread < flags.health_score_std and metrics.get("rollout/count", 1) >= 2:
            clipped, mean = metrics.get("reward/clipped_share", 0.0), metrics.get("reward/score_mean", 0.0)
            text = f"{name} is {spread:.3g}, below {flags.health_score_std:g} (--health_score_std); "
            return text + (f"{clipped:.0%} are clipped" if name == "reward/clipped_std" else f"all score {mean:.3g}")
    return None


def constant_source(metrics: Metrics, flags: PPOHealthFlags) -> str | None:
    """One of several reward sources gives all answers that it scores the same score."""
    count, constant = metrics.get("rollout/count", 1), []
    for name, spread in metrics.items():
        source = name.removesuffix("_std")
        if source == name or not name.startswith("reward/") or source in ("reward/score", "reward/clipped"):
            continue
        if spread < flags.health_score_std and count * metrics.get(f"{source}_share", 1.0) >= 2:
            constant.append(f"{name} is {spread:.3g}")
    return f"{', '.join(constant)}, below {flags.health_score_std:g} (--health_score_std)" if constant else None


def duplicates(metrics: Metrics, flags: PPOHealthFlags) -> str | None:
    """Many answers are equal although they are not short."""
    share, length = metrics.get("rollout/distinct_share", 1.0), metrics.get("rollout/length_mean", 0.0)
    if share >= flags.health_distinct_share or length < SHORT_ANSWER:
        return None
    limit = f"{flags.health_distinct_share:g} (--health_distinct_share)"
    return f"rollout/distinct_share is {share:.3g}, below {limit}, with {length:.0f} tokens per answer"


def exploited_reward(history: History, flags: PPOHealthFlags) -> Seen | None:
    """The score rises within the window while the KL grows beyond its limit, or while the length climbs and the KL, if
    there is a reference, grows too."""
    names = ("reward/score_mean", "rollout/length_mean", "kl/ref_k1")
    halves = {name: pair for name in names if (pair := history.halves(name)) is not None}
    if names[0] not in halves or names[1] not in halves:
        return None
    (score, score_now), (length, length_now), (kl, kl_now) = (halves.get(name, (0.0, 0.0)) for name in names)
    rises = score_now - score > RISE * max(history.now.get("reward/score_std", 0.0), flags.health_score_std)
    explodes = kl_now > max(flags.health_kl_spike, 3 * kl)
    factor = flags.health_length_growth
    climbs = length_now > factor * length and (kl_now > factor * max(kl, SMALL_KL) or names[2] not in halves)
    if not rises or not (explodes or climbs):
        return None
    grown = ", ".join(f"{name} from {older:.3g} to {newer:.3g}" for name, (older, newer) in halves.items())
    return Seen(f"within {history.window + 1} steps {grown} (means of each half)", history.middle)


def length_creep(history: History, flags: PPOHealthFlags) -> Seen | None:
    """Answers are longer than at the start of the run."""
    name = "rollout/length_mean"
    length, start = history.halves(name), history.start.get(name)
    if length is None or not start or length[1] <= flags.health_length_growth * start:
        return None
    text = f"{name} is {length[1]:.3g} tokens, {length[1] / start:.2g} times that of the first {history.window} steps"
    return Seen(f"{text}, above {flags.health_length_growth:g} (--health_length_growth)", history.middle)


def fewer_end(history: History, flags: PPOHealthFlags) -> Seen | None:
    """The share of answers that end by themselves falls below its mean over the window."""
    name, mean = "rollout/ended_share", history.mean("rollout/ended_share")
    share = history.now.get(name, 1.0)
    if mean is None or share >= mean - flags.health_ended_drop:
        return None
    text = f"{name} is {share:.3g}; its mean over the previous steps is {mean:.3g} (--health_ended_drop)"
    return Seen(text, history.step)


def never_ends(metrics: Metrics, _: PPOHealthFlags) -> str | None:
    """Hardly any answer ends before the length limit."""
    share = metrics.get("rollout/ended_share", 1.0)
    return f"rollout/ended_share is {share:.3g}: hardly any answer ends by itself" if share < NEVER_ENDS else None


def explains_nothing(metrics: Metrics, _: PPOHealthFlags) -> str | None:
    """The critic's values explain hardly any variance of the returns; a little more than 0 is chance."""
    explained = metrics.get("value/explained_variance", 1.0)
    return f"value/explained_variance is {explained:.3g}, below {EXPLAINED:g}" if explained < EXPLAINED else None


def critic_lags(metrics: Metrics, flags: PPOHealthFlags) -> str | None:
    """The mean value is further from the mean return than one standard deviation of the returns. (Where the returns are
    all equal, `scores_equal` is the rule.)"""
    names = ("value/mean", "value/return_mean", "value/return_std")
    if any(name not in metrics for name in names):
        return None
    value, target, spread = (metrics[name] for name in names)
    if abs(value - target) <= spread or spread < flags.health_score_std:
        return None
    return f"value/mean is {value:.3g}, but value/return_mean is {target:.3g} with a standard deviation of {spread:.3g}"


def logprob_diff_grows(history: History, flags: PPOHealthFlags) -> Seen | None:
    """The difference between rollout and training triples within the window, and is no longer small."""
    name, halves = "rollout/logprob_diff_mean", history.halves("rollout/logprob_diff_mean")
    if halves is None or halves[1] <= max(3 * halves[0], flags.health_logprob_diff / 5):
        return None
    text = f"{name} grew from {halves[0]:.3g} to {halves[1]:.3g} within {history.window + 1} steps (means of each half)"
    return Seen(text, history.middle)


def ranks_wait(metrics: Metrics, flags: PPOHealthFlags) -> str | None:
    """Share of the time of all phases that ranks wait for the slowest one: 1 - mean / maximum, weighted by time."""
    phases = {name: (metrics[f"time/{name}"], metrics[key]) for key in metrics
              if (name := key.removeprefix("time/").removesuffix("_imbalance")) and f"time/{name}" in metrics
              and key == f"time/{name}_imbalance"}  # fmt: skip
    waits = {name: seconds * (1 - 1 / max(ratio, 1.0)) for name, (seconds, ratio) in phases.items()}
    total = sum(seconds for seconds, _ in phases.values())
    if not total or sum(waits.values()) <= flags.health_rank_wait * total:
        return None
    share, worst = sum(waits.values()) / total, max(waits, key=lambda name: waits[name])
    text = (
        f"ranks wait {share:.0%} of the time, above {flags.health_rank_wait:.0%} (--health_rank_wait); most in phase "
    )
    tokens = metrics.get(f"time/{worst}_tokens_imbalance")
    return f"{text}'{worst}', where the slowest rank takes {phases[worst][1]:.2g} times the mean" + (
        "" if tokens is None else f" and the rank with the most tokens has {tokens:.2g} times the mean"
    )


def faulty_function(metrics: Metrics, _: PPOHealthFlags) -> str | None:
    """A reward function fails on many answers, which get the default score."""
    faults, count = metrics.get("reward/function_faults", 0.0), metrics.get("rollout/count", 0)
    if not count or faults < FAULTY_SHARE * count:
        return None
    return f"reward/function_faults is {faults:.0f}, of {count:.0f} answers"


PPO_RULES: tuple[Rule, ...] = (
    Rule(
        "kl_negative", "error", at_once(negative_kl),
        "sampling and scoring use different settings or models, so that answers are not samples of the scored policy",
        "compare --temperature, --top_p and --top_k with what you expect; try --rollout_engine padded and --dtype fp32",
    ),
    Rule(
        "kl_spike", "warning", kl_spike,
        "the last updates were too large, or a single kind of answer suddenly pays off",
        "lower --actor_learning_rate or --ppo_epochs, raise --kl_coef, or set --target_kl",
    ),
    Rule(
        "entropy_collapse", "error", entropy_collapse,
        "the policy puts nearly all probability on few answers and stops exploring",
        "lower --actor_learning_rate, raise --entropy_coef or --kl_coef, or sample with a higher --temperature",
    ),
    Rule(
        "entropy_explosion", "error", entropy_explosion,
        "the policy falls apart: its updates are too large, or nothing holds it near the reference",
        "resume from an earlier checkpoint with a lower --actor_learning_rate, a higher --kl_coef or a lower "
        "--entropy_coef",
    ),
    Rule(
        "scores_equal", "warning", at_once(equal_scores),
        "the reward does not tell the answers apart: it is constant, fails on all of them, is clipped, or the task is "
        "solved",
        "read the answers (--print_answers) and test the reward on them; raise --reward_clip if it clips them; use "
        "harder prompts, a higher --temperature or more --n_samples_per_prompt",
    ),
    Rule(
        "source_constant", "warning", for_a_window(constant_source),
        "this reward source gives every answer the same score, so it teaches nothing",
        "test the source on some answers; correct it, or remove it from --reward_function",
    ),
    Rule(
        "reward_faults", "warning", at_once(faulty_function),
        "a reward function raises an exception or exceeds --reward_timeout; such answers get --reward_default",
        "read the first traceback in logs/rank_R.log and correct the function or raise --reward_timeout",
    ),
    Rule(
        "duplicate_answers", "warning", at_once(duplicates),
        "the policy collapses to few answers, or the sampling is nearly greedy",
        "raise --kl_coef or --entropy_coef, or sample with a higher --temperature, --top_p or --top_k",
    ),
    Rule(
        "reward_exploited", "error", exploited_reward,
        "the policy exploits a weakness of the reward: it scores higher by length or by moving far from the reference",
        "read the answers; raise --kl_coef, lower --actor_learning_rate, stop at an earlier checkpoint, or correct the "
        "reward (a length penalty: --overlong_buffer)",
    ),
    Rule(
        "length_creep", "warning", length_creep,
        "longer answers score higher, or the loss favours them; this is expected when you train reasoning",
        "check whether the longer answers are better; if not, use a reward that ignores length, --overlong_buffer, or "
        "--loss_aggregation token_mean",
    ),
    Rule(
        "fewer_answers_end", "warning", fewer_end,
        "answers run into the length limit, and the reward does not penalise that",
        "raise --missing_eos_penalty or --max_answer_seq_len",
    ),
    Rule(
        "answers_never_end", "error", for_a_window(never_ends),
        "the SFT model has not learned its end token, or --max_answer_seq_len is shorter than any answer",
        "check the end of the rows of step 1 (python -m dschat_ppo.tools.data), train step 1 longer, set "
        "--stop_token_ids, or raise --max_answer_seq_len",
    ),
    Rule(
        "clip_fraction_high", "warning", at_once(above("policy/clip_fraction", "health_clip_fraction")),
        "the policy moves far within one PPO step, so that the loss clips its updates",
        "lower --actor_learning_rate or --ppo_epochs, or raise --per_device_training_batch_size",
    ),
    Rule(
        "first_ratio_not_one", "warning", at_once(ratio_not_one),
        "before any update, training computes different log-probs from scoring or sampling: dropout, rounding, or "
        "different kernels",
        "train without --actor_dropout and --lora_dropout, or with --dtype fp32; if it persists, report it as a bug",
    ),
    Rule(
        "critic_explains_nothing", "warning", for_a_window(explains_nothing),
        "the critic does not learn, or the score is noise to it",
        "raise --critic_learning_rate or --critic_warmup_rollouts, check the reward, or use an --advantage_estimator "
        "without a critic",
    ),
    Rule(
        "critic_lags", "warning", for_a_window(critic_lags),
        "the critic is too slow for the returns, which change faster or have another scale",
        "raise --critic_learning_rate or --critic_warmup_rollouts, widen --value_clip_eps, or scale the scores "
        "(--normalize_rewards running)",
    ),
    Rule(
        "logprob_diff_high", "warning", at_once(above("rollout/logprob_diff_mean", "health_logprob_diff")),
        "the precision is too low, or generation and training run different weights or kernels",
        "use --dtype fp32 or --rollout_engine padded to find out which; correct for it with --importance_correction",
    ),
    Rule(
        "logprob_diff_grows", "warning", logprob_diff_grows,
        "rounding matters more as the policy gets sharper, or generation does not see all updates",
        "watch it; correct for it with --importance_correction, or use --dtype fp32",
    ),
    Rule(
        "gradient_explodes", "warning", gradient_explodes,
        "a batch with extreme rewards, ratios or values; the gradient is clipped to --max_grad_norm",
        "if it repeats, lower the learning rate of this model, clip the scores (--reward_clip), or lower "
        "--max_grad_norm",
    ),
    SKIPPED,
    OVERFLOWS,
    Rule(
        "ranks_uneven", "warning", for_a_window(ranks_wait),
        "one rank has longer answers, slower rewards or a slower device than the others",
        "raise --reward_workers for slow rewards, check the load of the machine, and use --rollout_engine auto for "
        "answers of different lengths",
    ),
)  # fmt: skip
