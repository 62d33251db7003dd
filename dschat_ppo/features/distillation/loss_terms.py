"""The divergence from the teachers as a term of the actor's loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.distillation.flags import DistillationFlags
from dschat_ppo.features.distillation.teachers import Teachers, teachers_of
from dschat_ppo.ppo.loss_terms import ActorPass, LossTerm
from dschat_ppo.types import Experience, ForbiddenTokens, Model


def loss_term_of(
    config: PPOConfig, frozen: Callable[[str], Model], forbidden_tokens: ForbiddenTokens | None
) -> LossTerm | None:
    """The divergence of the actor from its teachers as a term of its loss; None if it is not in the
    loss. Arguments as `loss_terms`."""
    coef = config.of(DistillationFlags).loss_coef
    if coef == 0:
        return None
    return divergence_term(teachers_of(config, frozen, forbidden_tokens), coef)


def divergence_term(teachers: Teachers, coef: float) -> LossTerm:
    """The sum of the divergences from the teachers, of which each teaches its own rows."""

    def token_losses(rows: Experience, actor: ActorPass) -> Tensor:
        return torch.stack([*actor.divergences]).sum(dim=0)

    name = teachers.divergence.kind
    return LossTerm(name, coef, "distill/divergence", token_losses, teachers.teachings)
