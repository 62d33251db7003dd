"""What judges need of a run."""

from __future__ import annotations

from dschat_ppo.config.feature_needs import FurtherModel, Needs
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.features.judges.flags import JudgeFlags
from dschat_ppo.features.judges.spec import FLAG


def needs_of(config: StepConfig) -> Needs:
    """The models of the judges."""
    if config.kind != "ppo":
        return Needs()
    flags = config.of(JudgeFlags)
    models = []
    for name, role in flags.roles.items():
        routes = [spec.sources for spec in flags.specs if spec.model == name]
        sources: list[str] = []
        if all(routes):
            sources = [source for route in routes for source in route]
        models.append(
            FurtherModel(
                role, FLAG, name, sources, flags.offload_judge_models, reads_tokens_of_actor=False
            )
        )
    return Needs(models)
