"""Flags that do not fit judges."""

from __future__ import annotations

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.judges.flags import JudgeFlags
from dschat_ppo.features.judges.spec import FLAG, PAIRS, JudgeSpec


def refuse(config: StepConfig) -> None:
    """Refuse templates that cannot be used, and flags that divide rows or weights in another way
    than judges need."""
    if not isinstance(config, PPOConfig):
        return
    flags = config.of(JudgeFlags)
    if not flags.judge:
        return
    if config.ranks_of_row > 1:
        raise UserError(
            f"--sequence_parallel_size {config.ranks_of_row}: {FLAG} needs whole rows on a rank;"
            " use 1"
        )
    if flags.offload_judge_models and config.ppo.actor_zero_stage < 3:
        raise UserError(
            "--offload_judge_models needs --actor_zero_stage 3: only ZeRO-3 keeps parameters in"
            " host memory"
        )
    # here: without judges, the flags are read without Jinja
    from dschat_ppo.features.judges.templates import check_template

    for spec in flags.specs:
        check_template(spec)
        if spec.compare == PAIRS:
            _refuse_pairs(spec, config)


def _refuse_pairs(spec: JudgeSpec, config: PPOConfig) -> None:
    """Refuse pairs where a response has no other, or not so many as wanted, to meet."""
    samples = config.ppo.n_samples_per_prompt
    evaluation = config.validation
    if samples < 2:
        raise UserError(f"{spec}: compare={PAIRS} needs --n_samples_per_prompt 2 or more")
    if spec.rivals >= samples:
        raise UserError(
            f"{spec}: rivals={spec.rivals}: an answer has {samples - 1} others to meet"
            f" (--n_samples_per_prompt {samples})"
        )
    if config.algorithm.advantage_estimator == "remax":
        raise UserError(
            f"{spec}: compare={PAIRS} has no rival for the greedy answer of --advantage_estimator"
            " remax; use another estimator"
        )
    scores_evaluation = evaluation.eval_data_path and not evaluation.eval_reward_function
    if scores_evaluation and evaluation.eval_samples < 2:
        raise UserError(
            f"{spec}: compare={PAIRS} needs --eval_samples 2 or more, or --eval_reward_function for"
            " the held-out prompts"
        )
