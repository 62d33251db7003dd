"""Forward passes shared by rollout, scoring and training, so that their numbers agree."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dschat_ppo.algorithms.logprobs import token_logprobs
from dschat_ppo.types import Experience, Rollout, full_sequences, position_ids_of


def _accepts(model: nn.Module, argument: str) -> bool:
    return argument in _forward_arguments(type(model).forward)


@lru_cache(maxsize=64)
def _forward_arguments(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def position_arguments(model: nn.Module, attention_mask: Tensor) -> dict[str, Tensor]:
    """`position_ids` counted from the mask, for models that take them (ALiBi models count for themselves)."""
    if not _accepts(model, "position_ids"):
        return {}
    return {"position_ids": position_ids_of(attention_mask)}


def position_arguments_at(model: nn.Module, positions: Tensor) -> dict[str, Tensor]:
    """`position_ids` as given, for models that take them."""
    return {"position_ids": positions} if _accepts(model, "position_ids") else {}


def last_logits_argument(model: nn.Module, count: int) -> dict[str, int]:
    """Asks for the logits of the last `count` positions only, where the model can."""
    return {"logits_to_keep": count} if _accepts(model, "logits_to_keep") else {}


def vocabulary_size(model: Any) -> int:
    """Width of the logits (the embedding may have more rows than the tokenizer has tokens)."""
    return int(model.get_output_embeddings().out_features)


def unwrap(engine: Any) -> nn.Module:
    """The model inside a DeepSpeed engine, or the model itself."""
    return engine.module if hasattr(engine, "module") else engine


def response_logprobs(engine: Any, rows: Rollout | Experience, temperature: float) -> Tensor:
    """Log-probs of the response tokens under the model.

    Args:
        engine: DeepSpeed engine or plain causal model.
        rows: B rows with prompt length P and response length R.
        temperature: of sampling.

    Returns:
        (B, R) fp32, with gradient if gradients are on. Values outside `response_mask` are meaningless.
    """
    return token_logprobs(response_logits(engine, rows), rows.response_ids, temperature)


def response_logits(engine: Any, rows: Rollout | Experience) -> Tensor:
    """Logits from which each response token is drawn, (B, R, V), in the model's dtype."""
    model = unwrap(engine)
    input_ids, attention_mask = full_sequences(rows)
    length = rows.response_ids.shape[1]
    logits = engine(
        input_ids=input_ids,
        attention_mask=attention_mask,
        use_cache=False,
        **position_arguments(model, attention_mask),
        **last_logits_argument(model, length + 1),
    ).logits
    return logits[:, -(length + 1) : -1]


def response_values(engine: Any, rows: Rollout | Experience) -> Tensor:
    """The critic's value before each response token, (B, R) fp32. Meaningless outside `response_mask`."""
    input_ids, attention_mask = full_sequences(rows)
    values = engine(input_ids, attention_mask)
    length = rows.response_ids.shape[1]
    return values[:, -(length + 1) : -1]


def last_token_scores(engine: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The reward model's score at each row's last real token, (B,) fp32; the mask alone says which that is."""
    values = engine(input_ids, attention_mask)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    last = torch.where(attention_mask.bool(), positions, -1).argmax(dim=1)
    return values.gather(1, last.unsqueeze(1)).squeeze(1)
