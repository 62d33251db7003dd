"""Flags of models that are kept while a run trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dschat_ppo.config.schema import flag, require_not_negative


@dataclass(frozen=True)
class ExportFlags:
    """Hugging Face folders that a run writes before its end."""

    _argument_group_name: ClassVar[str] = "export"

    save_hf_steps: int = flag(
        "write Hugging Face folders every N optimizer steps (step 3: PPO steps), to `hf/step_N/`; 0 = off",
        0,
    )

    def __post_init__(self) -> None:
        require_not_negative(self, "save_hf_steps")


@dataclass(frozen=True)
class BestFlags:
    """The best model of steps 1 and 2."""

    _argument_group_name: ClassVar[str] = "best model"

    metric_for_best: str | None = flag(
        "metric of the evaluation whose best model is kept in `best/`, such as 'eval_accuracy'; not given: none",
        None,
    )
