"""How far the policy may move in one PPO step: `--target_kl` and `--max_log_ratio`."""

from __future__ import annotations

from dschat_ppo.common.logging import logger
from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.ppo.losses import KL_OF_UPDATE, LARGEST_LOG_RATIO


class UpdateLimits:
    """Both compare the policy in an update's forward pass with the one that scored the answers, over the tokens of all
    ranks that the policy's loss counts; so every rank comes to the same decision.

    Args:
        flags: of the algorithm.
    """

    def __init__(self, flags: AlgorithmFlags):
        self.target_kl = flags.target_kl
        self.max_log_ratio = flags.max_log_ratio

    def forbid(self, sums: MetricSums) -> bool:
        """Whether the update must be left out: a token's log-ratio is beyond `--max_log_ratio`. Collective if set.

        Args:
            sums: of the update alone.
        """
        return _is_above(self.max_log_ratio, LARGEST_LOG_RATIO, sums, "--max_log_ratio: the update is not applied")

    def end(self, sums: MetricSums) -> bool:
        """Whether the update was the last of its PPO step: its mean KL (k3) is above `--target_kl`. Collective if set.

        Args:
            sums: of the update alone.
        """
        return _is_above(self.target_kl, KL_OF_UPDATE, sums, "--target_kl: it was the PPO step's last update")


def _is_above(limit: float | None, name: str, sums: MetricSums, told: str) -> bool:
    """Whether the metric `name` is above a limit, if one is set; says so."""
    if limit is None:
        return False
    measured = sums.only(name).reduce()[name]
    if measured > limit:
        logger().info(f"{name} of {measured:.4g} is above {told}")
    return measured > limit
