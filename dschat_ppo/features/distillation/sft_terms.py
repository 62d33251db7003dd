"""The divergence from a teacher as a term of the loss of step 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dschat_ppo.algorithms.divergence import Divergence
from dschat_ppo.config.supervised_config import SFTConfig
from dschat_ppo.data.batches import SFTBatch
from dschat_ppo.features.distillation.flags import SFTTeacherFlags
from dschat_ppo.models.backbone import unwrap
from dschat_ppo.models.pass_observers import observed
from dschat_ppo.models.wrapped_models import Teaching
from dschat_ppo.supervised.sft import SFTTerm
from dschat_ppo.types import Model


def sft_term_of(config: SFTConfig, frozen: Callable[[str], Model]) -> SFTTerm | None:
    """The divergence from the teacher, if there is one; without `--distill_coef` it is the whole
    loss. Arguments as `sft_terms`."""
    flags = config.of(SFTTeacherFlags)
    if not flags.teachers:
        return None
    [role] = flags.roles
    share = 1.0
    if flags.distill_coef is not None:
        share = flags.distill_coef
    divergence = Divergence(flags.kind, flags.distill_beta, flags.distill_topk)
    return sft_divergence_term(frozen(role), divergence, share)


def sft_divergence_term(teacher: Model, divergence: Divergence, share: float) -> SFTTerm:
    """The divergence from the distributions of the `teacher`, with this share of the loss."""

    @torch.no_grad()
    def distribution(batch: SFTBatch) -> Teaching:
        policy: Any = unwrap(teacher)
        given_embeddings = None
        if policy.given_source is not None:
            given_embeddings = policy.given_source.for_same_rows(batch.given)
        with observed(None):  # observers read the passes of the model that trains
            _, _, hidden = teacher(
                batch.input_ids, batch.loss_mask, states=True, given=given_embeddings
            )
        return Teaching(policy.output_layer(hidden), divergence)

    return SFTTerm("divergence", share, distribution)
