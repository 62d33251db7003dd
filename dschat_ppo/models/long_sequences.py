"""Flags of memory and attention: which models they suit, and switching them on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dschat_ppo.common.dist import world_size
from dschat_ppo.config.run_flags import MemoryFlags, possible_sizes
from dschat_ppo.errors import UserError, reading
from dschat_ppo.models.architectures import MASK_IS_READ
from dschat_ppo.models.backbone import accepts, backbone_of
from dschat_ppo.models.classifiers import classifier_class, config_for
from dschat_ppo.models.loading import load_config
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.state_layers import state_layers

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def check_long_sequences(flags: MemoryFlags, flag: str, folder: str, scalar: bool) -> None:
    """Check that the model at `folder`, which passed `check_causal_lm` or (`scalar`) `check_sequence_classifier`, suits
    the flags of memory, without reading its weights."""
    choice = flags.attn_implementation
    if flags.sequence_parallel_size == 1 and choice == "auto":
        return
    with reading(f"{flag} {folder}: no model can be built from its config.json"):
        backbone = _backbone_without_weights(folder, flag, scalar)
    name, reason = type(backbone).__name__, reason_against(choice, backbone)
    if reason is not None:
        raise UserError(
            f"--attn_implementation {choice}: {flag} {folder}: {name} cannot use it, because {reason}; use auto"
        )
    if flags.sequence_parallel_size > 1:
        given = f"--sequence_parallel_size {flags.sequence_parallel_size}: {flag} {folder}: {name}"
        reason = reason_not_to_divide(backbone)
        if reason is not None:
            raise UserError(f"{given} cannot be divided, because {reason}; use 1")
        heads = backbone.config.get_text_config().num_attention_heads
        if heads % flags.sequence_parallel_size:
            raise UserError(
                f"{given} has {heads} attention heads, which the size must divide; with {world_size()} ranks use "
                f"{possible_sizes(world_size(), heads)}"
            )


def reason_against(choice: str, backbone: PreTrainedModel) -> str | None:
    """Why the model cannot use the attention that `--attn_implementation` names; None if it can."""
    own = backbone.config._attn_implementation
    if choice in ("auto", own):
        return None
    if not backbone._supports_attention_backend:
        return f"transformers does not let its attention, '{own}', be replaced"
    return "it needs a soft cap or sinks, which SDPA does not have" if choice == "sdpa" else None


def reason_not_to_divide(backbone: PreTrainedModel) -> str | None:
    """Why ranks cannot divide the columns of rows among them; None if they can, as far as the configuration tells."""
    config = backbone.config.get_text_config()
    if layers := state_layers(backbone):
        return f"its {type(layers[0]).__name__} carries a state from token to token"
    if not backbone._supports_attention_backend:
        return "transformers does not let its attention be replaced"
    if backbone.config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is '{backbone.config._attn_implementation}', and not 'sdpa' or 'eager'"
    if config.model_type in MASK_IS_READ or getattr(config, "attention_chunk_size", None) is not None:
        return "its attention needs a mask, which divided rows do not have"
    if not accepts(backbone, "position_ids"):
        return "it does not take the positions of tokens"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if others:
        return f"it has layers of the type {', '.join(others)}"
    if not isinstance(config.num_attention_heads, int):
        return "its layers differ in their numbers of attention heads"
    return None


def apply_memory_flags(model: PolicyModel | ScalarModel, flags: MemoryFlags) -> None:
    """Switch `--offload_activations` and `--attn_implementation` on in the model as the flags ask."""
    model.layout = replace(
        model.layout, attention=flags.attn_implementation, offload_activations=flags.offload_activations
    )


def _backbone_without_weights(folder: str, flag: str, scalar: bool) -> PreTrainedModel:
    config = load_config(folder, flag)
    with torch.device("meta"):
        if not scalar:
            return backbone_of(AutoModelForCausalLM.from_config(config))
        kind: Any = classifier_class(config)
        return kind(config_for(kind, config)).base_model
