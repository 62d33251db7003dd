"""Packed rows: rows laid end to end as one row without padding, with attention inside each segment.

On the CPU the attention runs segment by segment. On a GPU in half precision it is one call of PyTorch's variable-length
FlashAttention, where PyTorch has that kernel and it supports the layer. The attention function is registered with
transformers under the name `dschat_packed`, for which transformers builds no mask. A context manager switches it on;
activation checkpointing, which runs layers again in the backward pass, switches it on again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dschat_ppo.models.architectures import MASK_IS_READ
from dschat_ppo.models.backbone import backbone_states, position_arguments, real_slots
from dschat_ppo.models.router_recorder import record_router, router_arguments

NAME = "dschat_packed"
LARGEST_FLASH_HEAD = 256
OF_OTHER_KERNELS = ("softcap", "s_aux", "position_bias")  # attention options that FlashAttention here does not have
VARLEN_ARGUMENTS = {"scale", "window_size", "enable_gqa"}  # that not every version of PyTorch has


def varlen_kernel() -> Callable[..., Any] | None:
    """PyTorch's variable-length FlashAttention; None where PyTorch is too old for it or for an argument used here."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if set(inspect.signature(varlen_attn).parameters) >= VARLEN_ARGUMENTS else None


_VARLEN = varlen_kernel()


@dataclass(frozen=True)
class _Running:
    """A running packed forward pass: the configuration of its model, and the lengths of its segments."""

    config: PretrainedConfig
    lengths: list[int]

    made: dict[torch.device, Tensor] = field(default_factory=dict)

    def bounds(self, device: torch.device) -> Tensor:
        """(segments + 1,) int32: where each segment begins, and the end of the last one."""
        if device not in self.made:  # one copy to the device, not one in each layer
            self.made[device] = torch.tensor([0, *self.lengths]).cumsum(0).int().to(device)
        return self.made[device]


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
    if _suits_flash(query, key, value, options):
        return _flash_attention(query, key, value, sliding_window, options.get("scaling")), None
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
        band = _band(q.shape[2], sliding_window, q.device)
        outputs.append(sdpa_attention_forward(module, q, k, v, band, **options)[0])
    return torch.cat(outputs, dim=1), None


def _suits_flash(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether variable-length FlashAttention computes this attention: its GPU, dtype, head size and options."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    head = query.shape[-1]
    return (
        _VARLEN is not None
        and torch.version.hip is None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and head == key.shape[-1] == value.shape[-1]
        and head % 8 == 0
        and head <= LARGEST_FLASH_HEAD
        and not options.get("dropout")
        and options.get("is_causal") is not False
        and all(options.get(name) is None for name in OF_OTHER_KERNELS)
    )


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None) -> Tensor:
    """`_segment_attention` of all segments in one call: (1, heads, T, d) -> (1, T, heads, d)."""
    running = _RUNNING[-1]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (T, heads, d)
    before = -1 if window is None else window - 1  # keys before its own that a query sees; -1: all
    bounds, longest = running.bounds(query.device), max(running.lengths)
    assert _VARLEN is not None
    found: Any = _VARLEN(
        q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(before, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return found.unsqueeze(0)


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Keys that a query sees, (1, 1, length, length) bool: its own and the `window - 1` before it; None: all before."""
    if window is None or length <= window:
        return None
    visible = torch.ones(length, length, dtype=torch.bool, device=device)
    return visible.tril().triu(1 - window)[None, None]


AttentionInterface.register(NAME, _segment_attention)


def reason_not_to_pack(model: PreTrainedModel) -> str | None:
    """Why the model's attention cannot be replaced by that of packed rows; None if it can.

    Whether its other layers keep segments apart must be tried (`select_kernels`).
    """
    if not model._supports_attention_backend:
        return "transformers does not let its attention be replaced"
    if model.config._attn_implementation != "sdpa":
        return f"its attention is '{model.config._attn_implementation}' and not 'sdpa'"
    if model.config.model_type in MASK_IS_READ:
        return "its attention reads the mask, which packed rows do not have"
    return None


def are_uneven(lengths: Tensor) -> bool:
    """Whether rows differ in length (B,), so that packing saves padding."""
    return bool(lengths.min() < lengths.max())


def last_states(backbone: Any, input_ids: Tensor, lengths: Tensor, packed: bool) -> Tensor:
    """Last hidden states (B, T, H): packed if asked for and rows differ in length; meaningless after a row's end."""
    if packed and are_uneven(lengths):
        return packed_states(backbone, input_ids, lengths)
    return backbone_states(backbone, input_ids, lengths)


def token_states(backbone: Any, input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Last hidden states of the real tokens alone, from packed rows; the backbone must take `position_ids`.

    Args:
        backbone: the base model of a Hugging Face decoder.
        input_ids: (B, T) int64, right-padded.
        lengths: (B,) int64, above 0.

    Returns:
        `(states (N, H), real (B, T) bool)`: row after row, the states of the N tokens where `real` is True.
    """
    slots = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    real = real_slots(input_ids, lengths)
    with segments(backbone.config, lengths.tolist()):
        output = backbone(
            input_ids=input_ids[real].unsqueeze(0), attention_mask=None, use_cache=False,
            **position_arguments(backbone, slots[real].unsqueeze(0)), **router_arguments(),
        )  # fmt: skip
    record_router(output, real, packed=True)
    return output.last_hidden_state[0], real


def packed_states(backbone: Any, input_ids: Tensor, lengths: Tensor) -> Tensor:
    """Last hidden states (B, T, H) of packed rows, 0 after a row's end; see `token_states`."""
    states, real = token_states(backbone, input_ids, lengths)
    padded = states.new_zeros((*input_ids.shape, states.shape[-1]))
    return padded.masked_scatter(real.unsqueeze(-1), states)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint`: packs the recomputation of a packed forward pass."""
    if not _RUNNING:
        return nullcontext(), nullcontext()
    return nullcontext(), segments(_RUNNING[-1].config, _RUNNING[-1].lengths)


CHECKPOINTING = {"use_reentrant": False, "context_fn": checkpoint_contexts}
