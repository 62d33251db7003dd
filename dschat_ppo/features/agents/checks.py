"""Checks of the model and of the data, before weights are read."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PretrainedConfig

from dschat_ppo.config.feature_flags import HasFeatures
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.agents.flags import AgentFlags
from dschat_ppo.features.agents.parameters import agent_parameters, check_parameters


def check_trained_model(config: StepConfig, model_config: PretrainedConfig, model: str) -> None:
    """Check that a conversation fits into the model."""
    if config.value("max_context_len") is None:
        return
    length = config.of(AgentFlags).max_context_len
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if length is not None and positions is not None and length > positions:
        raise UserError(f"--max_context_len {length}: {model} has {positions} positions")


def check_rows(features: HasFeatures, rows: Sequence[str]) -> None:
    """Check that the data rows, which are JSON, have the columns that the agent takes."""
    flags = features.of(AgentFlags)
    if flags.is_used:
        check_parameters(flags, agent_parameters(flags), rows)
