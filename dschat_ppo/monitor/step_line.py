"""The line that a run prints about a step: a few numbers under short names, in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dschat_ppo.common.logging import logger
from dschat_ppo.common.progress import Progress
from dschat_ppo.config.run_flags import ConsoleFlags


@dataclass(frozen=True)
class Column:
    """A number of a step line."""

    label: str
    metric: str  # its name in metrics.jsonl
    form: str  # format specification with a width, such as "7.3f"


PPO_COLUMNS = (
    Column("score", "reward/score_mean", "7.3f"),
    Column("divergence", "distill/divergence", "7.4f"),
    Column("teacher KL", "distill/kl_k1", "7.4f"),
    Column("KL", "kl/ref_k1", "7.4f"),
    Column("entropy", "policy/entropy", "6.3f"),
    Column("explained", "value/explained_variance", "5.2f"),
    Column("length", "rollout/length_mean", "6.1f"),
)


def show_step(
    columns: Sequence[Column],
    metrics: Mapping[str, float],
    progress: Progress,
    console: ConsoleFlags,
) -> None:
    """Log the line of the step that `progress` has counted last, if `--logging_steps` asks for
    it."""
    if console.prints(progress.done, progress.total):
        logger().info(step_line(columns, metrics, progress))
        progress.line_printed()


def step_line(columns: Sequence[Column], metrics: Mapping[str, float], progress: Progress) -> str:
    """The line about the step that `progress` has counted last: the numbers that it has, the rate
    and the time left."""
    parts = [f"step {progress.done:>{len(str(progress.total))}}/{progress.total}"]
    parts += [
        f"{each.label} {format(metrics[each.metric], each.form)}"
        for each in columns
        if each.metric in metrics
    ]
    seconds, tokens = progress.rates
    parts.append(f"{tokens:7,.0f} tokens/s" if tokens else f"{seconds:6.2f} s" if seconds else "")
    return "  ".join(filter(None, [*parts, progress.left]))
