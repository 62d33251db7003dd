"""Combinations of flags that dynamic sampling cannot use."""

from __future__ import annotations

from typing import Any

from dschat_ppo.errors import UserError
from dschat_ppo.features.dynamic_sampling.flags import DynamicSamplingFlags


def refuse(config: Any) -> None:
    """Refuse groups of one response, which never differ."""
    if config.kind != "ppo":
        return
    flags = config.of(DynamicSamplingFlags)
    if flags.dynamic_sampling and config.ppo.n_samples_per_prompt == 1:
        raise UserError(
            "--dynamic_sampling compares the answers to one prompt: set --n_samples_per_prompt to"
            " 2 or more"
        )
