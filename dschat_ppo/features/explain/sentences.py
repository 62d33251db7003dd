"""Where the advantage of a row comes from, in a sentence for each estimator, with the numbers of
the row's group."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from dschat_ppo.features.explain.record_files import GroupScores, RecordedRow, RecordedStep

Sentence = Callable[[RecordedRow, RecordedStep, GroupScores], str]


def advantage_sentence(row: RecordedRow, step: RecordedStep) -> str:
    """Where the row's advantages come from."""
    estimator = str(step.flags["advantage_estimator"])
    if row.group is None or not row.of_row["has_score"]:
        return f"{estimator}: the row has no score and has left its group, so it has none"
    if estimator not in SENTENCES:
        return f"{Path(estimator).name}, an estimator of the user"
    return f"{estimator}: {SENTENCES[estimator](row, step, row.group)}"


def _of_gae(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    flags = step.flags
    text = f"gamma {flags['gamma']:g}, lambda {flags['gae_lambda']:g}"
    return text + _whitened(step)


def _of_reinforce_plus_plus(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    gamma = f"gamma {step.flags['gamma']:g}"
    return f"the sum of the rewards from the token on ({gamma})" + _whitened(step)


def _of_reinforce_plus_plus_baseline(
    row: RecordedRow, step: RecordedStep, group: GroupScores
) -> str:
    if len(group.reward_sums) == 1:
        return f"0, {_ALONE}"
    mean = statistics.fmean(group.reward_sums)
    return (
        f"the sum of the rewards from the token on, less {mean:.3f}, the mean of the group"
        f"{_whitened(step)}; {_scores(group.reward_sums)}"
    )


def _of_remax(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    baseline = row.of_row["baselines"]
    return (
        f"the sum of the rewards from the token on, less {baseline:.3f}, the score of the greedy"
        " answer"
    )


def _of_grpo(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    if not step.flags["normalize_group_std"]:
        return _of_dr_grpo(row, step, group)
    if len(group.scores) == 1:
        return f"0, {_ALONE}"
    score = row.of_row["penalised_scores"]
    mean = statistics.fmean(group.scores)
    text = f"({score:.3f} - {mean:.3f}) / "
    if step.flags["group_std"] == "batch":
        text += "the deviation of all rows"
    else:
        text += f"({statistics.stdev(group.scores):.3f} + 1e-06)"
    return f"{text}{_with_penalties(step)}; {_scores(group.scores)}"


def _of_dr_grpo(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    if len(group.reward_sums) == 1:
        return f"0, {_ALONE}"
    mean = statistics.fmean(group.reward_sums)
    return f"{_reward_sum(row):.3f} - {mean:.3f}, the mean; {_scores(group.reward_sums)}"


def _of_rloo(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    count = len(group.reward_sums)
    if count == 1:
        return f"0, {_ALONE}"
    reward_sum = _reward_sum(row)
    mean_of_others = (sum(group.reward_sums) - reward_sum) / (count - 1)
    return f"{reward_sum:.3f} - {mean_of_others:.3f}, the mean of the others; " + _scores(
        group.reward_sums
    )


def _of_opo(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    return (
        f"{_reward_sum(row):.3f} less the mean of the group, in which a row counts by its length;"
        f" {_scores(group.reward_sums)}"
    )


def _of_gpg(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    mean = statistics.fmean(group.reward_sums)
    return (
        f"alpha ({_reward_sum(row):.3f} - {mean:.3f}), alpha = rows / rows of groups whose scores"
        f" differ; {_scores(group.reward_sums)}"
    )


def _of_grpo_pass_at_k(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    return (
        "of the group's best row, its score less the second best, standardised as in grpo; 0 of the"
        f" other rows; {_scores(group.scores)}"
    )


def _of_maxrl(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    score = row.of_row["penalised_scores"]
    mean = statistics.fmean(group.scores)
    if mean <= 0:
        return f"0, because the mean of the group is not above 0; {_scores(group.scores)}"
    return (
        f"({score:.3f} - {mean:.3f}) / {mean:.3f}{_with_penalties(step)}; {_scores(group.scores)}"
    )


def _of_gdpo(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    scores = []
    for name, score in zip(step.sources, row.of_row["source_scores"], strict=True):
        if score == score:  # not NaN: the source scores the row
            scores.append(f"{name} {score:.3f}")
    return (
        f"the score by each source ({', '.join(scores)}), standardised within the group, weighted,"
        " added, and divided by the deviation over all rows"
    )


def _of_none(row: RecordedRow, step: RecordedStep, group: GroupScores) -> str:
    return "0; the run has no policy loss"


SENTENCES: dict[str, Sentence] = {
    "gae": _of_gae,
    "grpo": _of_grpo,
    "dr_grpo": _of_dr_grpo,
    "rloo": _of_rloo,
    "opo": _of_opo,
    "gpg": _of_gpg,
    "grpo_pass_at_k": _of_grpo_pass_at_k,
    "maxrl": _of_maxrl,
    "gdpo": _of_gdpo,
    "reinforce_plus_plus": _of_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _of_reinforce_plus_plus_baseline,
    "remax": _of_remax,
    "none": _of_none,
}
_ALONE = "because no other answer of the group has a score"


def _reward_sum(row: RecordedRow) -> float:
    """The sum of the rewards of the row's tokens."""
    return float(row.tokens["rewards"].astype(float).sum())


def _scores(scores: list[float]) -> str:
    """The scores of a group as a clause."""
    texts = " ".join(f"{score:.4g}" for score in scores)
    return f"the {len(scores)} scores of the group are {texts}"


def _with_penalties(step: RecordedStep) -> str:
    """A clause on the KL penalty, if there is one."""
    if step.constants["kl_coef"] == 0:
        return ""
    return ", less the KL penalty compared in the group"


def _whitened(step: RecordedStep) -> str:
    """A clause on whitening, if the advantages are whitened."""
    if not step.flags["whiten_advantages"]:
        return ""
    moments = step.constants["whitening"]
    if moments is None:
        return ", whitened over the tokens of the step"
    return (
        f", whitened over {moments['tokens']:,} tokens (mean {moments['mean']:.3f}, deviation"
        f" {moments['std']:.3f})"
    )
