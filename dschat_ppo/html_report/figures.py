"""The figures of the report: which metrics each one shows, and how to read it. The only table of metric names here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

NOT_PLOTTED = ("step", "time", "epoch")  # keys of a line that are not metrics

# The metrics of the overview, in its order: (name, its words in the table).
HEADLINES = [
    ("reward/score_mean", "score"),
    ("eval/score", "held-out score"),
    ("eval/pass@1", "held-out pass@1"),
    ("kl/ref_k1", "KL to the reference"),
    ("rollout/length_mean", "length"),
    ("policy/entropy", "entropy"),
    ("loss", "loss"),
    ("eval_loss", "held-out loss"),
    ("accuracy", "accuracy"),
    ("eval_accuracy", "held-out accuracy"),
]


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        section: heading under which it appears.
        title: its title.
        reading: one sentence on how to read it.
        metrics: patterns of metric names, in the order of the legend; of a "pair" the x metric and the y metric.
        kind: lines over steps; areas over steps, stacked; or one metric against another, one point per step.
        unit: of the vertical axis; "" for a number without one.
        without: patterns of names that `metrics` matches but the figure does not show.
    """

    section: str
    title: str
    reading: str
    metrics: tuple[str, ...]
    kind: Literal["lines", "stacked", "pair"] = "lines"
    unit: str = ""
    without: tuple[str, ...] = ()

    def names(self, known: Iterable[str]) -> list[str]:
        """The names among `known` that the figure shows, in the order of its patterns."""
        shown = [name for name in known if not any(fnmatchcase(name, pattern) for pattern in self.without)]
        found = [name for pattern in self.metrics for name in shown if fnmatchcase(name, pattern)]
        return list(dict.fromkeys(found))


_REWARD, _POLICY, _VALUE = "Reward and KL", "Policy", "Critic"
_FIT, _COST, _OTHER = "Loss and accuracy", "Time and memory", "Optimizer"

FIGURES = [
    Figure(
        _REWARD, "Reward",
        "The score of the responses should rise; if score_mean rises while total_mean falls, the KL penalty grows "
        "faster than the score.",
        ("reward/score_mean", "reward/total_mean"),
    ),
    Figure(
        _REWARD, "Held-out evaluation",
        "These are the same prompts at every evaluation: if the training score rises and this does not, the policy "
        "exploits the reward or memorises its prompts.",
        ("eval/score", "eval/pass@*", "eval/majority@*", "eval/score/*"),
    ),
    Figure(
        _REWARD, "Reward versus KL",
        "Each point is one step, and the ring marks the last: a line that climbs steeply is good, and a line that "
        "runs to the right without rising spends KL without earning reward.",
        ("kl/ref_k1", "reward/score_mean"), kind="pair",
    ),
    Figure(
        _REWARD, "Held-out evaluation by source",
        "One line for each reward source, on the held-out prompts: a source that falls is traded for the others.",
        ("eval/reward/*_mean", "eval/reward/*_mean/*", "eval/reward/*_share"),
    ),
    Figure(
        _REWARD, "KL to the reference",
        "The distance from the model that training started from: it grows slowly in a healthy run, and a jump to "
        "several times its value means that updates are too large.",
        ("kl/ref_k1", "kl/ref_k3", "eval/kl_ref_k1", "kl/ref_k1/*"), unit="nats per token",
    ),
    Figure(
        _REWARD, "Spread of the scores",
        "The standard deviation of the scores must stay above 0, because nothing is learned from answers that all "
        "score the same.",
        ("reward/score_std", "reward/clipped_std", "reward/clipped_share", "reward/equal_groups_share"),
    ),
    Figure(
        _REWARD, "Reward by source",
        "One line for each reward source or data set: a source that stays flat adds nothing, and one that falls is "
        "traded for the others.",
        ("reward/*_mean", "reward/score_mean/*", "reward/*_share"),
        without=("reward/score_mean", "reward/total_mean", "reward/equal_groups_share", "reward/clipped_share"),
    ),
    Figure(
        _POLICY, "Response length",
        "Length may change while the model learns; if length and score rise together without better answers, the "
        "reward favours long answers.",
        ("rollout/length_mean", "rollout/length_max", "eval/length_mean", "rollout/length_mean/*"), unit="tokens",
    ),
    Figure(
        _POLICY, "Responses that end",
        "The share of responses that end by themselves should be near 1, and the share of distinct responses should "
        "not collapse.",
        ("rollout/ended_share", "rollout/distinct_share", "eval/ended_share"),
    ),
    Figure(
        _POLICY, "Entropy",
        "Entropy falls slowly as the policy becomes sure; a fall to nearly 0 means that it repeats itself and can no "
        "longer explore.",
        ("policy/entropy",), unit="nats per token",
    ),
    Figure(
        _POLICY, "Clip fractions",
        "The share of tokens that the loss clips: the policy's is usually below 0.2, and above 0.3 its updates are too "
        "large; the critic's may be higher.",
        ("policy/clip_fraction", "value/clip_fraction"),
    ),
    Figure(
        _POLICY, "Size of the policy updates",
        "KL and log-ratios between the policy before and after its updates: they stay small and steady in a healthy "
        "run.",
        ("policy/approx_kl", "policy/kl_k3", "policy/log_ratio_abs_mean", "policy/first_log_ratio_abs_mean"),
    ),
    Figure(
        _POLICY, "Sampling versus training",
        "The difference between the log-probs of generation and of training should be near 0: above 0.1 the two do "
        "not compute the same model.",
        ("rollout/logprob_diff_mean",), unit="nats",
    ),
    Figure(
        _POLICY, "Policy loss",
        "It stays near 0 and says little: with normalised advantages it need not fall while the policy improves.",
        ("policy/loss", "policy/router_loss"),
    ),
    Figure(
        _VALUE, "Value loss",
        "It falls as the critic learns the returns, and rises for a while when the policy finds better responses.",
        ("value/loss",),
    ),
    Figure(
        _VALUE, "Explained variance",
        "The share of the returns' variance that the critic predicts: towards 1 is good, and 0 or less means that the "
        "critic does not help (which is harmless when all returns are nearly equal).",
        ("value/explained_variance",),
    ),
    Figure(
        _VALUE, "Values and returns",
        "The mean value should follow the mean return: a lasting gap means that the critic lags behind the policy.",
        ("value/mean", "value/return_mean"),
    ),
    Figure(
        _FIT, "Loss",
        "The loss should fall and level out; if the held-out loss rises while the other falls, the model overfits.",
        ("loss", "eval_loss", "loss/*", "eval_loss/*"),
    ),
    Figure(
        _FIT, "Accuracy",
        "The share of pairs in which the chosen response wins: 0.5 is a coin toss, and held-out accuracy counts.",
        ("accuracy", "eval_accuracy", "accuracy/*", "eval_accuracy/*"),
    ),
    Figure(
        _FIT, "Margin",
        "The distance between chosen and rejected responses: it grows while the model learns to tell them apart.",
        ("margin", "eval_margin"),
    ),
    Figure(
        _FIT, "Chosen and rejected",
        "The two lines should part; with DPO, if both fall together, chosen responses become less likely too.",
        ("chosen_score", "rejected_score", "chosen_reward", "rejected_reward", "eval_chosen_score",
         "eval_rejected_score", "eval_chosen_reward", "eval_rejected_reward"),
    ),
    Figure(
        _COST, "Time per step by phase",
        "The height is the time of a step and each band is one phase of it: the thickest band is the one to speed up.",
        ("time/*",), kind="stacked", unit="seconds", without=("time/*_tokens_per_s", "time/*_imbalance"),
    ),
    Figure(
        _COST, "Throughput",
        "Tokens per second of all ranks, by phase: a lasting fall usually comes from longer responses or a busy "
        "machine.",
        ("time/*_tokens_per_s",), unit="tokens per second",
    ),
    Figure(
        _COST, "Memory",
        "The memory of the fullest rank, by phase: it grows with the lengths, and at first on a CPU because the "
        "allocator keeps freed memory; a curve that never flattens at equal lengths points to a leak.",
        ("memory/*gib",), unit="GiB",
    ),
    Figure(
        _OTHER, "Gradient norm",
        "The norm before clipping: single spikes are clipped and harmless, and a steady rise announces divergence.",
        ("grad_norm", "optim/grad_norm/*"),
    ),
    Figure(
        _OTHER, "Skipped updates",
        "Updates that were skipped because of NaN, infinity or an fp16 overflow: rare single points are harmless; if "
        "there are more, look at the files in nonfinite/.",
        ("optim/nonfinite_skipped", "optim/overflow/*"),
    ),
    Figure(
        _OTHER, "Learning rate",
        "The schedule as it ran: compare its changes with changes in the other figures.",
        ("lr", "lora_lr", "optim/lr/*", "optim/lora_lr/*"),
    ),
]  # fmt: skip


def others(known: Iterable[str]) -> list[str]:
    """The names among `known` that no figure shows, sorted."""
    names = list(known)
    shown = {name for figure in FIGURES for name in figure.names(names)}
    return sorted(set(names) - shown - set(NOT_PLOTTED))
