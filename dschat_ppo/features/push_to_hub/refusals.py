"""Where the upload has no effect."""

from __future__ import annotations

from dschat_ppo.config.step_config import StepConfig


def idle(config: StepConfig) -> dict[str, str]:
    """There is no model to upload without training."""
    if config.validate_only:
        return {"push_to_hub": "--validate_only trains nothing"}
    return {}
