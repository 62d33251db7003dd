"""Flags of models that are kept while a run trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dschat_ppo.config.schema import flag, require, require_not_negative

EVAL = "eval_"
_LOWER, _HIGHER = ("loss", "perplexity", "nll"), ("accuracy", "margin")


@dataclass(frozen=True)
class BestMetric:
    """The metric that decides which model of a run is the best.

    Attributes:
        name: as in `metrics.jsonl`, such as "eval_loss".
        higher: whether a higher value is better.
    """

    name: str
    higher: bool

    def is_better(self, value: float, best: float) -> bool:
        """Whether `value` is better than `best`; NaN never is."""
        return value > best if self.higher else value < best


LOWEST_LOSS = BestMetric("eval_loss", higher=False)


@dataclass(frozen=True)
class ExportFlags:
    """Hugging Face folders that a run writes before its end."""

    _argument_group_name: ClassVar[str] = "export"

    save_hf_steps: int = flag(
        "also save the model as a Hugging Face folder every N optimizer steps, to hf/step_N in --output_dir (step 3: "
        "every N PPO steps, with actor, critic and actor_ema in it); all folders are kept; 0 = off",
        0,
    )

    def __post_init__(self) -> None:
        require_not_negative(self, "save_hf_steps")


@dataclass(frozen=True)
class BestFlags:
    """The best model of steps 1 and 2."""

    _argument_group_name: ClassVar[str] = "best model"

    metric_for_best: str | None = flag(
        "keep the model with the best value of this metric, such as eval_loss or eval_accuracy, in best/ in "
        "--output_dir. Loss and perplexity are better lower, accuracy and margin higher; for others write NAME:min or "
        "NAME:max. Not given: no model is kept, and the best checkpoint is that of the lowest eval_loss",
        None,
    )

    def __post_init__(self) -> None:
        _ = self.best_metric  # checked before anything is loaded

    @property
    def best_metric(self) -> BestMetric:
        """The metric of `--metric_for_best`, or the loss."""
        if self.metric_for_best is None:
            return LOWEST_LOSS
        text, _, direction = self.metric_for_best.rpartition(":")
        if direction not in ("min", "max"):
            text, direction = self.metric_for_best, ""
        name = f"{EVAL}{text.removeprefix(EVAL)}"
        kind = name.split("/")[0].rpartition("_")[2]  # what is measured, without the name of a data set
        known = kind in (*_LOWER, *_HIGHER)
        require(
            bool(direction) or known,
            f"--metric_for_best {self.metric_for_best}: is a higher or a lower value better? Write {name}:max or "
            f"{name}:min",
        )
        return BestMetric(name, direction == "max" if direction else kind in _HIGHER)

    def require_metric(self, metrics: Sequence[str]) -> None:
        """Check that the metric is one of an evaluation, or one of them for a data set, such as "loss/NAME".

        Raises:
            UserError: it is not among `metrics`, names without "eval_".
        """
        require(
            self.metric_for_best is None or self.best_metric.name.removeprefix(EVAL).split("/")[0] in metrics,
            f"--metric_for_best {self.metric_for_best}: the evaluation has no {self.best_metric.name}; it has "
            f"{', '.join(f'{EVAL}{name}' for name in metrics)}",
        )
