"""Checks of the model's architecture, before weights are loaded."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError, reading
from dschat_ppo.features.router.flags import RouterFlags
from dschat_ppo.models.architectures import lm_without_weights


def check_trained_model(config: StepConfig, model_config: PretrainedConfig, model: str) -> None:
    """Refuse `--router_loss_coef` for a model without such a loss. `model`: flag and folder, for
    the message."""
    if config.of(RouterFlags).router_loss_coef > 0:
        router_top_k(model_config, model)


def router_top_k(config: PretrainedConfig, model: str) -> int:
    """Experts per token of an architecture with a load-balancing loss in transformers. `config` of
    a reward model is that of its language model; `model` is flag and folder, for the message."""
    refused = f"--router_loss_coef: {model}: {type(config).__name__}"
    with reading(f"{refused} cannot be built"):
        lm: Any = lm_without_weights(config)
    # pairs of keys; Granite 4 without experts
    unfit = config.model_type == "doge" or not getattr(lm, "num_experts", 1)
    if unfit or not hasattr(lm, "router_aux_loss_coef"):
        raise UserError(
            f"{refused} has no router loss that this project can compute; omit the flag"
        )
    return int(lm.num_experts_per_tok)
