"""Flags of the evaluation in step 3."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import ClassVar

from dschat_ppo.config.schema import VALIDATE_ONLY, flag, flag_list, require, require_not_negative, require_positive


@dataclass(frozen=True)
class EvaluationFlags:
    """Evaluation on held-out prompts before, during and after training."""

    _argument_group_name: ClassVar[str] = "evaluation"

    eval_data_path: list[str] = flag_list(
        "data sets of held-out prompts, used whole; not given: no evaluation", list, commas=True
    )
    eval_interval: int = flag(
        "evaluate every N PPO steps, and always before the first and after the last; 0 = only these two", 0
    )
    eval_samples: int = flag("number of answers to each held-out prompt, for pass@k and majority@n", 1)
    eval_greedy: bool = flag("decode greedily instead of sampling as in training", False)
    eval_batch_size: int = flag("held-out prompts per generation batch and device", 64)
    eval_max_prompts: int = flag("maximum number of held-out prompts, taken from the start of the data; 0 = all", 0)
    eval_pass_score: float = flag("minimum score of an answer that passes", 1.0)
    eval_reward_function: str | None = flag(
        "reward function for evaluation, written as for --reward_function; not given: the training reward", None
    )
    validate_only: bool = flag(VALIDATE_ONLY, False)
    save_best: bool = flag("keep the models of the best evaluation in `best/` inside --output_dir", True)

    def __post_init__(self) -> None:
        require_not_negative(self, "eval_interval eval_max_prompts")
        require_positive(self, "eval_samples eval_batch_size")
        require(
            bool(self.eval_data_path) or not self.validate_only,
            "--validate_only needs held-out prompts: give --eval_data_path",
        )
        values = asdict(self)
        others = [field for field in fields(self) if field.name != "eval_data_path"]
        given = [f"--{field.name}" for field in others if values[field.name] != field.default]
        require(
            bool(self.eval_data_path) or not given,
            f"{', '.join(given)}: has no effect without --eval_data_path; omit it, or give --eval_data_path",
        )
        require(
            not (self.eval_greedy and self.eval_samples > 1),
            "--eval_greedy gives the same answer every time: omit --eval_samples",
        )
