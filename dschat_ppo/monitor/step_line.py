"""The line that a run prints about a step: a few numbers under short names, in columns."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
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

    def text(self, metrics: Mapping[str, float]) -> str:
        """Label and number; "-" in its width for a step without the metric."""
        width = int(self.form.split(".")[0].rstrip(","))
        value = metrics.get(self.metric)
        return f"{self.label} {'-'.rjust(width) if value is None else format(value, self.form)}"


PPO_COLUMNS = (
    Column("score", "reward/score_mean", "7.3f"),
    Column("KL", "kl/ref_k1", "7.4f"),
    Column("entropy", "policy/entropy", "6.3f"),
    Column("explained", "value/explained_variance", "5.2f"),
    Column("length", "rollout/length_mean", "6.1f"),
)
REFERENCE_COLUMN, CRITIC_COLUMN = PPO_COLUMNS[1], PPO_COLUMNS[3]
LEARNING_RATE, LORA_LEARNING_RATE = Column("lr", "lr", "8.2e"), Column("LoRA lr", "lora_lr", "8.2e")
_SUPERVISED = {
    "loss": Column("loss", "loss", "7.4f"),
    "accuracy": Column("accuracy", "accuracy", "5.3f"),
    "margin": Column("margin", "margin", "7.3f"),
    "kl": Column("KL", "kl", "7.4f"),
}
GRAD_NORM = Column("grad norm", "grad_norm", "6.3g")


def ppo_columns(has_reference: bool, has_critic: bool) -> list[Column]:
    """The columns of step 3."""
    without = [*([] if has_reference else [REFERENCE_COLUMN]), *([] if has_critic else [CRITIC_COLUMN])]
    return [column for column in PPO_COLUMNS if column not in without]


def supervised_columns(headline: Sequence[str], rates: Container[str]) -> list[Column]:
    """The columns of steps 1 and 2; `headline` names the objective's metrics, `rates` has "lr" or "lora_lr"."""
    known = [rate for rate in (LEARNING_RATE, LORA_LEARNING_RATE) if rate.metric in rates]
    return [*(_SUPERVISED.get(name, Column(name, name, "7.4g")) for name in headline), *known, GRAD_NORM]


def show_step(
    columns: Sequence[Column], metrics: Mapping[str, float], progress: Progress, console: ConsoleFlags
) -> None:
    """Log the line of the step that `progress` has counted last, if `--logging_steps` asks for it."""
    if console.prints(progress.done, progress.total):
        logger().info(step_line(columns, metrics, progress))
        progress.line_printed()


def step_line(columns: Sequence[Column], metrics: Mapping[str, float], progress: Progress) -> str:
    """The line about the step that `progress` has counted last: its numbers, the rate and the time left."""
    width = len(str(progress.total))
    parts = [f"step {progress.done:>{width}}/{progress.total}", *(column.text(metrics) for column in columns)]
    if tokens := progress.tokens_per_second:
        parts.append(f"{tokens:7,.0f} tokens/s")
    elif each := progress.seconds_per_step:
        parts.append(f"{each:6.2f} s")
    return "  ".join(parts + ([f"{progress.left} left"] if progress.done < progress.total else []))
