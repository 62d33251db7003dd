"""Combinations of flags that are refused."""

from __future__ import annotations

from typing import Any

from dschat_ppo.config.feature_flags import features_observe
from dschat_ppo.config.schema import require_used
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.distillation.flags import TEACHER, DistillationFlags, SFTTeacherFlags

_WITH_TEACHER = f"a teacher ({TEACHER})"


def refuse(config: StepConfig) -> None:
    """Refuse a teacher that the other flags leave without effect or that does not fit them, and
    flags of distillation without one."""
    if config.kind == "sft":
        _refuse_of_sft(config, config.of(SFTTeacherFlags))
    elif config.kind == "ppo":
        _refuse_of_ppo(config, config.of(DistillationFlags))


def _refuse_of_sft(config: Any, flags: SFTTeacherFlags) -> None:
    _check_offload(flags, "--zero_stage", config.fit.zero_stage)
    require_used(
        flags,
        "distill_coef distill_loss distill_topk",
        when=bool(flags.teachers),
        purpose=_WITH_TEACHER,
    )


def _check_offload(flags: Any, stage_flag: str, stage: int) -> None:
    """Refuse teachers in host memory at another ZeRO stage than 3."""
    if flags.offload_teacher_model and stage < 3:
        raise UserError(
            f"--offload_teacher_model needs {stage_flag} 3: only ZeRO-3 keeps parameters in host"
            " memory"
        )


def _refuse_of_ppo(config: Any, flags: DistillationFlags) -> None:
    if flags.distils and flags.coef == 0:
        raise UserError("--distill_coef 0 leaves the teacher without effect; omit it")
    evaluates = bool(config.validation.eval_data_path)
    has_scores = config.has_rewards or config.validation.eval_reward_function is not None
    has_scores = has_scores or bool(config.value("eval_judge"))
    if evaluates and not has_scores:
        raise UserError(
            "--eval_data_path: a teacher gives no score to held-out answers; give"
            " --eval_reward_function as well"
        )
    fits_responses_of_data = (
        config.algorithm.advantage_estimator == "none"
        and config.ppo.n_samples_per_prompt == 1
        and not features_observe(config)
        and not flags.distill_policy_gradient
    )
    if flags.sampled_share < 1 and not fits_responses_of_data:
        raise UserError(
            f"--distill_on {flags.distill_on}: answers of the data are no samples of the policy, so"
            " they take --advantage_estimator none and one answer to a prompt"
            " (--n_samples_per_prompt 1), and neither episodes nor --distill_policy_gradient"
        )
    _check_offload(flags, "--actor_zero_stage", config.ppo.actor_zero_stage)
    with_divergence_loss = _WITH_TEACHER
    if flags.distils:
        with_divergence_loss = (
            "the loss of a divergence, which --distill_policy_gradient replaces (omit that flag to"
            " have the loss)"
        )
    require_used(
        flags,
        "distill_coef distill_on distill_policy_gradient",
        when=flags.distils,
        purpose=_WITH_TEACHER,
    )
    require_used(
        flags,
        "distill_loss distill_topk",
        when=flags.loss_coef > 0,
        purpose=with_divergence_loss,
    )
