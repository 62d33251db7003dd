"""Packed rows: rows laid end to end as one row without padding, with attention inside each segment.

The attention function is registered with transformers under the name `dschat_packed`, for which transformers builds no
mask. A context manager switches it on; activation checkpointing, which runs layers again in the backward pass, switches
it on again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dschat_ppo.models.architectures import MASK_IS_READ
from dschat_ppo.models.backbone import backbone_states, position_arguments

NAME = "dschat_packed"


@dataclass(frozen=True)
class _Running:
    """A running packed forward pass: the configuration of its model, and the lengths of its segments."""

    config: PretrainedConfig
    lengths: list[int]


_RUNNING: list[_Running] = []
_WINDOWS: list[dict[int, int | None]] = []


@contextmanager
def segments(config: PretrainedConfig, lengths: list[int]) -> Iterator[None]:
    """Make models of `config` treat a single row as segments of these lengths."""
    before = config._attn_implementation
    _RUNNING.append(_Running(config, lengths))
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _RUNNING.pop()


@contextmanager
def recorded_windows() -> Iterator[dict[int, int | None]]:
    """Record the sliding window that each layer passes to its attention."""
    _WINDOWS.append({})
    try:
        yield _WINDOWS[-1]
    finally:
        _WINDOWS.pop()


def _segment_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    sliding_window: int | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention inside each segment: (1, heads, T, d) -> (1, T, heads, d). `attention_mask` is None."""
    outputs, lengths = [], _RUNNING[-1].lengths
    if _WINDOWS:
        _WINDOWS[-1][module.layer_idx] = sliding_window
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
        band = _band(q.shape[2], sliding_window, q.device)
        outputs.append(sdpa_attention_forward(module, q, k, v, band, **options)[0])
    return torch.cat(outputs, dim=1), None


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Keys that a query sees, (1, 1, length, length) bool: its own and the `window - 1` before it; None: all before."""
    if window is None or length <= window:
        return None
    visible = torch.ones(length, length, dtype=torch.bool, device=device)
    return visible.tril().triu(1 - window)[None, None]


AttentionInterface.register(NAME, _segment_attention)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the model's attention is plain SDPA and can be replaced.

    Whether its other layers keep segments apart must be tried (`select_kernels`).
    """
    replaceable = model._supports_attention_backend and model.config._attn_implementation == "sdpa"
    return bool(replaceable) and model.config.model_type not in MASK_IS_READ


def last_states(backbone: Any, input_ids: Tensor, lengths: Tensor, packed: bool) -> Tensor:
    """Last hidden states (B, T, H): packed if asked for and rows differ in length; meaningless after a row's end."""
    if packed and bool(lengths.min() < lengths.max()):
        return packed_states(backbone, input_ids, lengths)
    return backbone_states(backbone, input_ids)


def packed_states(backbone: Any, input_ids: Tensor, lengths: Tensor) -> Tensor:
    """Last hidden states (B, T, H) of packed rows, 0 after a row's end; the backbone must take `position_ids`.

    Args:
        backbone: the base model of a Hugging Face decoder.
        input_ids: (B, T) int64, right-padded.
        lengths: (B,) int64, above 0.
    """
    slots = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    real = slots < lengths.unsqueeze(1)
    with segments(backbone.config, lengths.tolist()):
        states = backbone(
            input_ids=input_ids[real].unsqueeze(0), attention_mask=None, use_cache=False,
            **position_arguments(backbone, slots[real].unsqueeze(0)),
        ).last_hidden_state  # fmt: skip
    padded = states.new_zeros((*input_ids.shape, states.shape[-1]))
    return padded.masked_scatter(real.unsqueeze(-1), states)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint`: packs the recomputation of a packed forward pass."""
    if not _RUNNING:
        return nullcontext(), nullcontext()
    return nullcontext(), segments(_RUNNING[-1].config, _RUNNING[-1].lengths)


CHECKPOINTING = {"use_reentrant": False, "context_fn": checkpoint_contexts}
