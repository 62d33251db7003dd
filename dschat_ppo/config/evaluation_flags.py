"""Flags of the evaluation during step 3."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import ClassVar

from dschat_ppo.config.schema import flag, flag_list, require, require_not_negative, require_positive


@dataclass(frozen=True)
class EvaluationFlags:
    """Answers to held-out prompts, before, during and after training."""

    _argument_group_name: ClassVar[str] = "validation"

    eval_data_path: list[str] = flag_list("data sets of held-out prompts, used whole; none given: no evaluation", list)
    eval_interval: int = flag(
        "evaluate every N PPO steps, besides before the first and after the last; 0: only there", 0
    )
    eval_samples: int = flag("answers to each held-out prompt, for pass@k and majority@n", 1)
    eval_greedy: bool = flag("answer greedily instead of sampling as in training", False)
    eval_batch_size: int = flag("held-out prompts answered at a time on one device", 64)
    eval_max_prompts: int = flag("most held-out prompts, the first of the data; 0 = all", 0)
    eval_pass_score: float = flag("an answer passes if its score is at least this", 1.0)
    eval_reward_function: str | None = flag(
        "the true score: a function as for --reward_function, for evaluation alone; not given: the training reward",
        None,
    )
    save_best: bool = flag("keep the models of the best evaluation in `best/` inside --output_dir", True)

    def __post_init__(self) -> None:
        require_not_negative(self, "eval_interval eval_max_prompts")
        require_positive(self, "eval_samples eval_batch_size")
        values = asdict(self)
        others = [field for field in fields(self) if field.name != "eval_data_path"]
        given = [f"--{field.name}" for field in others if values[field.name] != field.default]
        require(
            bool(self.eval_data_path) or not given,
            f"{', '.join(given)}: for the evaluation of --eval_data_path, which is not given",
        )
        require(
            not (self.eval_greedy and self.eval_samples > 1),
            "--eval_greedy gives the same answer each time: leave --eval_samples out",
        )
