"""The KL to the teachers as a term of the advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat_ppo.algorithms.kl import kl_k1
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.distillation.flags import DistillationFlags
from dschat_ppo.ppo.advantages import AdvantageTerm
from dschat_ppo.types import RewardedRollout


def advantage_term_of(config: PPOConfig) -> AdvantageTerm | None:
    """Minus the KL to the teachers (k1) at each token, with `--distill_policy_gradient`: a reward
    that is received there, with discount 0 (Lu and Thinking Machines Lab 2025, "On-policy
    distillation")."""
    flags = config.of(DistillationFlags)
    if not flags.gives_advantages:
        return None
    coef = flags.coef

    def advantages(rows: RewardedRollout) -> Tensor:
        mask = rows.response_mask  # (N, R)
        kl = torch.where(mask, kl_k1(rows.policy_logprobs, rows.extra["teacher_logprobs"]), 0.0)
        has_teacher = torch.ones_like(mask[:, :1])  # (N, 1)
        if "teachers" in rows.extra:
            has_teacher = (rows.extra["teachers"] >= 0).unsqueeze(1)
        return -coef * kl * has_teacher

    return advantages
