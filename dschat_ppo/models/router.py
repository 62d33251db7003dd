"""Which architectures have the load-balancing loss of a mixture of experts."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.classifiers import lm_without_weights

# Models that balance their experts in another way.
OTHER_BALANCE = {
    "deepseek_v3": "it balances its experts by a bias that is not trained",
    "doge": "its load is over pairs of keys",
}


def router_top_k(config: PretrainedConfig, model: str) -> int:
    """Experts per token of an architecture with a load-balancing loss in transformers. `config` of a reward model is
    that of its language model; `model` is flag and folder, for the message."""
    refused = f"--router_loss_coef: {model}: {type(config).__name__}"
    if config.model_type in OTHER_BALANCE:
        raise UserError(f"{refused} has no router loss: {OTHER_BALANCE[config.model_type]}; omit the flag")
    with reading(f"{refused} cannot be built"):
        lm: Any = lm_without_weights(config)
    if not hasattr(lm, "router_aux_loss_coef") or not getattr(lm, "num_experts", 1):  # Granite 4 may have no experts
        raise UserError(f"{refused} is not a mixture of experts with a router loss in transformers; omit the flag")
    return int(lm.num_experts_per_tok)
