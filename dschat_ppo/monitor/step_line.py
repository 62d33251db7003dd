"""The line that a run prints about a step: a few numbers under short names, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dschat_ppo.common.logging import logger
from dschat_ppo.common.progress import Progress
from dschat_ppo.config.run_flags import ConsoleFlags
from dschat_ppo.features import hooks


@dataclass(frozen=True)
class Column:
    """A number of a step line."""

    label: str
    metric: str  # its name in metrics.jsonl
    form: str  # format specification with a width, such as "7.3f"


# a feature offers `step_line.COLUMNS`, the values of a `Column` each
_OF_FEATURES = [Column(*values) for columns in hooks("step_line.COLUMNS") for values in columns]
PPO_COLUMNS = (
    Column("score", "reward/score_mean", "7.3f"),
    *_OF_FEATURES,
    Column("KL", "kl/ref_k1", "7.4f"),
    Column("entropy", "policy/entropy", "6.3f"),
    Column("explained", "value/explained_variance", "5.2f"),
    Column("length", "rollout/length_mean", "6.1f"),
)
_OF_OBJECTIVE = {
    "divergence": Column("divergence", "divergence", "7.4f"),
    "loss": Column("loss", "loss", "7.4f"),
    "accuracy": Column("accuracy", "accuracy", "5.3f"),
    "margin": Column("margin", "margin", "7.3f"),
    "kl": Column("KL", "kl", "7.4f"),
}


def supervised_columns(headline: Iterable[str]) -> list[Column]:
    """The columns of steps 1 and 2; `headline` names the objective's metrics."""
    columns = [_OF_OBJECTIVE.get(name, Column(name, name, "7.4g")) for name in headline]
    columns.append(Column("lr", "lr", "8.2e"))
    # the rates of features
    for rate in (*hooks("optimizers.SECOND_RATE"), *hooks("optimizers.OPTIMIZER")):
        columns.append(Column(rate.rate_label, rate.rate_name, "8.2e"))
    return [*columns, Column("grad norm", "grad_norm", "6.3g")]


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
    texts = [f"step {progress.done:>{len(str(progress.total))}}/{progress.total}"]
    for column in columns:
        if column.metric in metrics:
            texts.append(f"{column.label} {format(metrics[column.metric], column.form)}")
    seconds, tokens = progress.rates
    if tokens:
        texts.append(f"{tokens:7,.0f} tokens/s")
    elif seconds:
        texts.append(f"{seconds:6.2f} s")
    if progress.left:
        texts.append(progress.left)
    return "  ".join(texts)
