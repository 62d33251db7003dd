"""What distillation needs of a run."""

from __future__ import annotations

from dschat_ppo.config.feature_needs import FurtherModel, Needs
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.distillation.flags import (
    TEACHER,
    DistillationFlags,
    SFTTeacherFlags,
    TeacherFlags,
)

_DIVERGENCE = "a divergence from a teacher"


def needs_of(config: StepConfig) -> Needs:
    """The teachers and, with their divergence as a loss, whole distributions of all policies."""
    if config.kind == "sft":
        flags = config.of(SFTTeacherFlags)
        models = _teacher_models(flags)
        if not models:
            return Needs()
        return Needs(
            models,
            whole_distributions=True,
            whole_rows=_DIVERGENCE,
            eval_metrics=["divergence"],
        )
    if config.kind == "ppo":
        return _needs_of_ppo(config.of(DistillationFlags))
    return Needs()


def _needs_of_ppo(flags: DistillationFlags) -> Needs:
    if not flags.distils:
        return Needs()
    whole_rows = None
    if flags.loss_coef > 0:
        whole_rows = _DIVERGENCE
    return Needs(
        models=_teacher_models(flags),
        reference=not flags.teachers,  # it is the teacher
        whole_distributions=flags.loss_coef > 0,
        whole_rows=whole_rows,
        policy_loss=flags.gives_advantages,
    )


def _teacher_models(flags: TeacherFlags) -> list[FurtherModel]:
    """The teachers as models of the run."""
    models = []
    for role, (sources, name) in zip(flags.roles, flags.teachers, strict=True):
        models.append(FurtherModel(role, TEACHER, name, sources, flags.offload_teacher_model))
    return models
