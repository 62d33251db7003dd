"""What a model's forward pass is given, and the one way in which scoring and training run its layers."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.models.architectures import first_position
from dschat_ppo.types import Model


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward takes an argument of this name."""
    return argument in _forward_arguments(type(model).forward)


@lru_cache(maxsize=64)
def _forward_arguments(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def unwrap(engine: Model) -> nn.Module:
    """The model inside a DeepSpeed engine, or the model itself."""
    module: Any = getattr(engine, "module", engine)
    return module


def hidden_window(config: Any, received: dict[int, int | None]) -> bool:
    """Whether the model limits how far back a token sees by its mask alone, which attention without a mask cannot know.

    Args:
        config: of the model.
        received: the `sliding_window` that each layer's attention was called with.
    """
    text = config.get_text_config()
    if getattr(text, "attention_chunk_size", None) is not None:
        return True
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        known = set(kinds) <= {"full_attention", "sliding_attention"}
        told = all((kinds[layer] == "sliding_attention") == (window is not None) for layer, window in received.items())
        return not (known and told)
    return getattr(text, "sliding_window", None) is not None and all(window is None for window in received.values())


def backbone_of(lm: Any) -> Any:
    """A causal language model without its head. (Llama 4 names its backbone otherwise than transformers expects.)"""
    return lm.model if lm.base_model is lm else lm.base_model


def position_arguments(model: Any, positions: Tensor) -> dict[str, Tensor]:
    """`position_ids` for models that take them (ALiBi models count for themselves).

    Args:
        model: language model or backbone.
        positions: int64, counted from 0 in each row.
    """
    if not accepts(model, "position_ids"):
        return {}
    return {"position_ids": positions + first_position(model.config)}


def slot_arguments(model: nn.Module, input_ids: Tensor) -> dict[str, Tensor]:
    """`position_ids` (1, T) that say that a token's slot is its position, for models that take them."""
    return position_arguments(model, torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0))


def last_logits_argument(model: nn.Module, count: int) -> dict[str, int]:
    """Asks for the logits of the last `count` positions only, where the model can."""
    return {"logits_to_keep": count} if accepts(model, "logits_to_keep") else {}


def backbone_states(backbone: Any, input_ids: Tensor) -> Tensor:
    """Last hidden states of a causal backbone, (B, T, H), in its dtype.

    No attention mask is given: rows are right-padded, so under causal attention no real token sees padding, and
    kernels without a mask are faster. States after a row's end are meaningless.

    Args:
        backbone: the base model of a Hugging Face decoder.
        input_ids: (B, T) int64, each row from slot 0 on.
    """
    return backbone(
        input_ids=input_ids, attention_mask=None, use_cache=False, **slot_arguments(backbone, input_ids)
    ).last_hidden_state
