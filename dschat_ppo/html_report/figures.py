"""Which figures a report has, and which metrics each shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dschat_ppo.html_report.run_folder import NOT_PLOTTED


@dataclass(frozen=True)
class Figure:
    """One figure."""

    section: str  # its heading
    title: str
    metrics: tuple[str, ...]  # patterns of metric names, in the order of the legend
    reading: str  # one sentence on how to read it
    unit: str = ""  # of the vertical axis; "" for a number without one
    # patterns of names that `metrics` matches but the figure does not show
    without: tuple[str, ...] = ()

    def names(self, known: Iterable[str]) -> list[str]:
        """The names among `known` that the figure shows, in the order of its patterns."""
        candidates = list(known)
        for pattern in self.without:
            candidates = [name for name in candidates if not fnmatchcase(name, pattern)]
        matches: list[str] = []
        for pattern in self.metrics:
            matches += [name for name in candidates if fnmatchcase(name, pattern)]
        return list(dict.fromkeys(matches))


_REWARD = "Reward and KL"
_POLICY = "Policy"
_VALUE = "Critic"
_FIT = "Loss and accuracy"
_COST = "Time and memory"
_OPTIMIZER = "Optimizer"

FIGURES = [
    Figure(
        _REWARD,
        "Reward",
        ("reward/score_mean", "reward/total_mean"),
        "The score should rise; if score_mean rises while total_mean falls, the KL penalty grows"
        " faster.",
    ),
    Figure(
        _REWARD,
        "Held-out evaluation",
        ("eval/score", "eval/pass@*", "eval/majority@*", "eval/score/*"),
        "The same prompts each time: if the training score rises and this does not, the policy"
        " exploits the reward or memorises its prompts.",
    ),
    Figure(
        _REWARD,
        "KL to the reference",
        ("kl/ref_k1", "kl/ref_k3", "eval/kl_ref_k1", "kl/ref_k1/*"),
        "The distance from the model that training started from: it grows slowly in a healthy run,"
        " and a jump to several times its value means that updates are too large.",
        "nats per token",
    ),
    Figure(
        _REWARD,
        "Spread of the scores",
        (
            "reward/score_std",
            "reward/clipped_std",
            "reward/clipped_share",
            "reward/equal_groups_share",
        ),
        "The standard deviation must stay above 0: nothing is learned from answers that all score"
        " the same.",
    ),
    Figure(
        _REWARD,
        "Reward by source",
        (
            "reward/*_mean",
            "reward/score_mean/*",
            "reward/*_share",
            "eval/reward/*_mean",
            "eval/reward/*_mean/*",
            "eval/reward/*_share",
        ),
        "One line for each reward source or data set: one that stays flat adds nothing, and one"
        " that falls is traded for the others.",
        without=(
            "reward/score_mean",
            "reward/total_mean",
            "reward/equal_groups_share",
            "reward/clipped_share",
        ),
    ),
    Figure(
        _POLICY,
        "Response length",
        ("rollout/length_mean", "rollout/length_max", "eval/length_mean", "rollout/length_mean/*"),
        "If length and score rise together without better answers, the reward favours long"
        " answers.",
        "tokens",
    ),
    Figure(
        _POLICY,
        "Responses that end",
        ("rollout/ended_share", "rollout/distinct_share", "eval/ended_share"),
        "The share that end by themselves should be near 1, and the share of distinct ones should"
        " not collapse.",
    ),
    Figure(
        _POLICY,
        "Entropy",
        ("policy/entropy",),
        "It falls slowly as the policy becomes sure; near 0 the policy repeats itself and no longer"
        " explores.",
        "nats per token",
    ),
    Figure(
        _POLICY,
        "Clip fractions",
        ("policy/clip_fraction", "value/clip_fraction"),
        "The share of tokens that the loss clips: the policy's is usually below 0.2, and above 0.3"
        " its updates are too large; the critic's may be higher.",
    ),
    Figure(
        _POLICY,
        "Size of the policy updates",
        (
            "policy/approx_kl",
            "policy/kl_k3",
            "policy/log_ratio_abs_mean",
            "policy/first_log_ratio_abs_mean",
        ),
        "The policy before and after its updates: the distances stay small and steady in a healthy"
        " run.",
    ),
    Figure(
        _POLICY,
        "Sampling versus training",
        ("rollout/logprob_diff_mean", "rollout/logprob_diff_max"),
        "The log-probs of generation and of training should be equal, on the mean and at the worst"
        " token: with a mean above 0.1 the two do not compute the same model.",
        "nats",
    ),
    Figure(
        _VALUE,
        "Value loss",
        ("value/loss",),
        "It falls as the critic learns the returns, and rises for a while when the policy finds"
        " better answers.",
    ),
    Figure(
        _VALUE,
        "Explained variance",
        ("value/explained_variance",),
        "The share of the returns' variance that the critic predicts: towards 1 is good, and 0 or"
        " less means that it does not help (which is harmless when all returns are nearly equal).",
    ),
    Figure(
        _FIT,
        "Loss",
        ("loss", "eval_loss", "loss/*", "eval_loss/*"),
        "It should fall and level out; if the held-out loss rises while the other falls, the model"
        " overfits.",
    ),
    Figure(
        _FIT,
        "Accuracy",
        ("accuracy", "eval_accuracy", "accuracy/*", "eval_accuracy/*"),
        "The share of pairs whose chosen response wins: 0.5 is a coin toss, and held-out accuracy"
        " counts.",
    ),
    Figure(
        _FIT,
        "Chosen and rejected",
        ("margin", "eval_margin", "chosen_*", "rejected_*", "eval_chosen_*", "eval_rejected_*"),
        "The lines should part, so that the margin grows; with DPO, if both fall together, chosen"
        " responses become less likely too.",
        without=("*_logprob", "*_logprob/*"),
    ),
    Figure(
        _COST,
        "Time per step by phase",
        ("time/*",),
        "Together they are the time of a step, and the highest line is the phase to speed up.",
        "seconds",
        without=("time/*_tokens_per_s", "time/*_imbalance", "time/*/*"),
    ),
    Figure(
        _COST,
        "Throughput",
        ("time/*_tokens_per_s",),
        "Of all ranks: a lasting fall usually comes from longer responses or a busy machine.",
        "tokens per second",
    ),
    Figure(
        _COST,
        "Memory",
        ("memory/*gib",),
        "Of the fullest rank: a curve that never flattens at equal lengths points to a leak.",
        "GiB",
    ),
    Figure(
        _OPTIMIZER,
        "Gradient norm",
        ("grad_norm", "optim/grad_norm/*"),
        "Before clipping: single spikes are clipped and harmless, and a steady rise announces"
        " divergence.",
    ),
    Figure(
        _OPTIMIZER,
        "Skipped updates",
        ("optim/nonfinite_skipped", "optim/overflow/*"),
        "Skipped for NaN, infinity or an fp16 overflow: rare ones are harmless; if there are more,"
        " look at the files in nonfinite/.",
    ),
    Figure(
        _OPTIMIZER,
        "Learning rate",
        ("lr", "*_lr", "optim/lr/*", "optim/*_lr/*"),
        "The schedule as it ran.",
    ),
]
OTHER_METRICS = "Other metrics"  # the section of the metrics that no figure shows, one figure each


def figures_of(known: Iterable[str]) -> list[tuple[Figure, list[str]]]:
    """The figures with the names among `known` that each shows, then one for each other metric,
    sorted by name."""
    names = list(known)
    rest = set(names) - set(NOT_PLOTTED)
    figures = []
    for figure in FIGURES:
        names_of_figure = figure.names(names)
        if names_of_figure:
            figures.append((figure, names_of_figure))
            rest -= set(names_of_figure)
    for name in sorted(rest):
        figures.append((Figure(OTHER_METRICS, name, (name,), ""), [name]))
    return figures
