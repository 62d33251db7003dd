"""How far the policy may move in one PPO step: `--target_kl` and `--max_log_ratio`."""

from __future__ import annotations

from dschat_ppo.common.logging import logger
from dschat_ppo.config.algorithm import AlgorithmFlags
from dschat_ppo.monitor.metrics import MetricSums
from dschat_ppo.trainers.losses import KL_OF_UPDATE, LARGEST_LOG_RATIO


class UpdateLimits:
    """Both measure the policy of an update's forward pass against the one that scored the answers, over the tokens that
    the policy's loss counts, on all ranks; so every rank comes to the same decision.

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
        if self.max_log_ratio is None:
            return False
        largest = sums.only(LARGEST_LOG_RATIO).reduce()[LARGEST_LOG_RATIO]
        if largest > self.max_log_ratio:
            logger().info(f"a log-ratio of {largest:.4g} is beyond --max_log_ratio: the update is not applied")
        return largest > self.max_log_ratio

    def end(self, sums: MetricSums) -> bool:
        """Whether the update was the last of its PPO step: its mean KL (k3) is above `--target_kl`. Collective if set.

        Args:
            sums: of the update alone.
        """
        if self.target_kl is None:
            return False
        kl = sums.only(KL_OF_UPDATE).reduce()[KL_OF_UPDATE]
        if kl > self.target_kl:
            logger().info(f"a KL of {kl:.4g} is above --target_kl: it was the PPO step's last update")
        return kl > self.target_kl
