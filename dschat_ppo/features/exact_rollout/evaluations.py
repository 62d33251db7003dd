"""`--exact_rollout` in `dschat-evaluate`."""

from __future__ import annotations

from dschat_ppo.common.logging import logger
from dschat_ppo.config.feature_flags import FeatureFlags
from dschat_ppo.features.exact_rollout.bits import check_bits
from dschat_ppo.features.exact_rollout.flags import ExactRolloutFlags
from dschat_ppo.features.exact_rollout.runs import begin_exact_rollouts
from dschat_ppo.models.kernel_selection import select_kernels
from dschat_ppo.models.wrapped_models import PolicyModel
from dschat_ppo.rollout.generation_request import GenerationConfig


def begin(features: FeatureFlags) -> None:
    """Begin exact rollouts of this process, if the flags ask for them."""
    if features.of(ExactRolloutFlags).exact_rollout:
        begin_exact_rollouts()


def check_model(
    features: FeatureFlags, policy: PolicyModel, config: GenerationConfig, has_partner: bool
) -> None:
    """Compare responses of a model with its training passes, bit for bit. Arguments as
    `check_bits`, which says what it raises."""
    if features.of(ExactRolloutFlags).exact_rollout:
        select_kernels(policy)
        check_bits(policy, config, has_partner)
        logger().info("rollout: log-probs equal those of training to the last bit")
