"""Flags that do not fit judges."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.judges.flags import JudgeFlags, TrainingJudgeFlags
from dschat_ppo.features.judges.spec import EVALUATION_FLAG, PAIRS, JudgeSpec


def refuse(config: StepConfig) -> None:
    """Refuse judges that cannot be used, or not with the other flags."""
    if not isinstance(config, PPOConfig):
        return
    flags = config.of(TrainingJudgeFlags)
    if not flags.all_specs:
        return
    if flags.offload_judge_models and config.ppo.actor_zero_stage < 3:
        raise UserError(
            "--offload_judge_models needs --actor_zero_stage 3: only ZeRO-3 keeps parameters in"
            " host memory"
        )
    evaluation = config.validation
    if flags.eval_judge and not evaluation.eval_data_path:
        raise UserError(f"{EVALUATION_FLAG} scores held-out prompts: give --eval_data_path")
    if flags.eval_judge and evaluation.eval_reward_function:
        raise UserError(
            f"{EVALUATION_FLAG} and --eval_reward_function both score the held-out prompts; omit"
            " one"
        )
    _check_templates(flags.all_specs)
    if config.algorithm.advantage_estimator == "remax":
        _refuse_pairs_of(flags.specs, "--advantage_estimator", "another one than remax")
    _refuse_pairs(flags.specs, "--n_samples_per_prompt", config.ppo.n_samples_per_prompt)
    if evaluation.eval_data_path and not evaluation.eval_reward_function:
        specs = flags.evaluation_specs or flags.specs
        _refuse_pairs(specs, "--eval_samples", evaluation.eval_samples)


def refuse_evaluation(args: argparse.Namespace, features: HasFeatures) -> None:
    """Refuse templates that cannot be used, and pairs where a prompt has one answer."""
    specs = features.of(JudgeFlags).specs
    _check_templates(specs)
    if args.decoding != "sampled":
        _refuse_pairs_of(specs, "--decoding", "sampled, since greedy decoding has one answer")
    _refuse_pairs(specs, "--samples", args.samples)


def _check_templates(specs: Sequence[JudgeSpec]) -> None:
    if not specs:
        return
    # here: without judges, the flags are read without Jinja
    from dschat_ppo.features.judges.templates import check_template

    for spec in specs:
        check_template(spec)


def _refuse_pairs(specs: Sequence[JudgeSpec], flag: str, samples: int) -> None:
    """Refuse pairs where a response has not as many others to meet as wanted. `samples`: the value
    of the `flag`."""
    if samples < 2:
        _refuse_pairs_of(specs, flag, "2 or more")
    for spec in specs:
        if spec.rivals >= samples:
            raise UserError(
                f"{spec}: rivals={spec.rivals}: an answer has {samples - 1} others to meet"
                f" ({flag} {samples})"
            )


def _refuse_pairs_of(specs: Sequence[JudgeSpec], flag: str, needed: str) -> None:
    for spec in specs:
        if spec.compare == PAIRS:
            raise UserError(f"{spec}: compare={PAIRS} needs {flag} {needed}")
