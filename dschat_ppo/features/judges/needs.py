"""What judges need of a run, or of an evaluation."""

from __future__ import annotations

from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.config.feature_needs import FurtherModel, Needs
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.judges.flags import JudgeFlags, TrainingJudgeFlags
from dschat_ppo.features.judges.spec import FLAG


def needs_of(config: StepConfig) -> Needs:
    """The models of the judges."""
    if config.kind != "ppo":
        return Needs()
    flags = config.of(TrainingJudgeFlags)
    whole_rows = None
    if flags.roles:
        whole_rows = FLAG
    return Needs(_judge_models(flags, flags.offload_judge_models), whole_rows=whole_rows)


def models_of_evaluation(features: HasFeatures) -> list[FurtherModel]:
    """The models of the judges of an evaluation."""
    return _judge_models(features.of(JudgeFlags), offload=False)


def _judge_models(flags: JudgeFlags, offload: bool) -> list[FurtherModel]:
    models = []
    for name, role in flags.roles.items():
        specs = [spec for spec in flags.all_specs if spec.model == name]
        sources: list[str] = []
        if all(spec.sources for spec in specs):
            sources = [source for spec in specs for source in spec.sources]
        models.append(
            FurtherModel(role, specs[0].flag, name, sources, offload, reads_tokens_of_actor=False)
        )
    return models
