"""`--unsupervised_dataset_name` and `--unsup_coef`, of step 3."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.schema import flag, not_negative


@dataclass(frozen=True)
class PtxFlags:
    """Plain text beside PPO (PTX)."""

    unsupervised_dataset_name: str | None = flag(
        None,
        "data set with a column `text` for the PTX loss: language modelling in the same updates as"
        " PPO; not given: off",
    )
    unsupervised_dataset_config_name: str | None = flag(
        None, "configuration of --unsupervised_dataset_name on the hub"
    )
    unsup_coef: float = not_negative(27.8, "weight of the PTX loss")


FLAGS = {"ppo": PtxFlags}
