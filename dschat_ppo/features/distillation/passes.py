"""The log-probs of the teachers, which the advantages need, as a forward pass of scoring."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.distillation.flags import DistillationFlags
from dschat_ppo.features.distillation.teachers import teachers_of
from dschat_ppo.ppo.score import ScoringPass
from dschat_ppo.types import ForbiddenTokens, ForwardedRollout, Model


def pass_of(
    config: PPOConfig, frozen: Callable[[str], Model], forbidden_tokens: ForbiddenTokens | None
) -> ScoringPass | None:
    """The pass of a run with `--distill_policy_gradient`. Arguments as `further_passes`."""
    if not config.of(DistillationFlags).gives_advantages:
        return None
    teachers = teachers_of(config, frozen, forbidden_tokens)

    def columns_of(rows: ForwardedRollout) -> dict[str, Tensor]:
        return {"teacher_logprobs": teachers.logprobs(rows)}

    return ScoringPass("teacher", columns_of)
