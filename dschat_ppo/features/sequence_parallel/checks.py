"""Whether ranks can divide the rows of a model, as far as its configuration tells."""

from __future__ import annotations

from transformers import PreTrainedModel

from dschat_ppo.common.dist import world_size
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.errors import UserError
from dschat_ppo.features.sequence_parallel.refusals import possible_sizes, sharing_ranks
from dschat_ppo.models.architectures import MASK_IS_READ
from dschat_ppo.models.backbone import accepts
from dschat_ppo.models.state_layers import state_layers

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def check_backbone(config: StepConfig, backbone: PreTrainedModel, model: str) -> None:
    """Refuse a model whose rows the ranks cannot divide. `backbone` is without weights; `model` is
    flag and folder, for the message."""
    size = sharing_ranks(config)
    if size == 1:
        return
    subject = f"--sequence_parallel_size {size}: {model}: {type(backbone).__name__}"
    reason = reason_not_to_divide(backbone)
    if reason is not None:
        raise UserError(f"{subject} cannot be divided, because {reason}; use 1")
    heads = backbone.config.get_text_config().num_attention_heads
    if heads % size:
        raise UserError(
            f"{subject} has {heads} attention heads, which the size must divide; with"
            f" {world_size()} ranks use {possible_sizes(world_size(), heads)}"
        )


def reason_not_to_divide(backbone: PreTrainedModel) -> str | None:
    """Why ranks cannot divide the columns of rows among them; None if they can, as far as the
    configuration tells."""
    config = backbone.config.get_text_config()
    layers_with_states = state_layers(backbone)
    if layers_with_states:
        return f"its {type(layers_with_states[0]).__name__} carries a state from token to token"
    if not backbone._supports_attention_backend:
        return "transformers does not let its attention be replaced"
    attention = backbone.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"its attention is '{attention}', and not 'sdpa' or 'eager'"
    is_chunked = getattr(config, "attention_chunk_size", None) is not None
    if is_chunked or config.model_type in MASK_IS_READ:
        return "its attention needs a mask, which divided rows do not have"
    if not accepts(backbone, "position_ids"):
        return "it does not take the positions of tokens"
    layer_types = set(getattr(config, "layer_types", None) or ())
    foreign_types = sorted(layer_types - ATTENTION_LAYERS)
    if foreign_types:
        return f"it has layers of the type {', '.join(foreign_types)}"
    if not isinstance(config.num_attention_heads, int):
        return "its layers differ in their numbers of attention heads"
    return None
