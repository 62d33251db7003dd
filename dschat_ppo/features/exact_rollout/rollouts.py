"""The check of `--exact_rollout` at the start of a run."""

from __future__ import annotations

from typing import Any

from dschat_ppo.common.logging import logger
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.features.exact_rollout.bits import check_bits
from dschat_ppo.features.exact_rollout.flags import ExactRolloutFlags
from dschat_ppo.models.backbone import unwrap
from dschat_ppo.ppo.rollout_sampler import RolloutSampler
from dschat_ppo.ppo.rollouts import SampleRollout, any_observes
from dschat_ppo.ppo.score import ForwardPasses


def with_models(
    sample_rollout: SampleRollout,
    config: PPOConfig,
    sampler: RolloutSampler,
    passes: ForwardPasses,
) -> SampleRollout:
    """`sample_rollout`, after rollouts were compared with training passes, bit for bit, if
    `--exact_rollout` asks for it. Collective.

    Args:
        sample_rollout: gives the responses of a task.
        config: the flags.
        sampler: of the run.
        passes: of scoring.

    Raises:
        UserError: they differ.
    """
    if config.of(ExactRolloutFlags).exact_rollout:
        policy: Any = unwrap(sampler.hybrid.engine)
        with sampler.hybrid.generating():
            check_bits(policy, sampler.config, any_observes(sampler.extensions))
        logger().info("rollout: log-probs equal those of training to the last bit")
    return sample_rollout
