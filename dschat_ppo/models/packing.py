"""Packed rows: rows laid end to end as one row without padding, with attention inside each segment.

A segment may also attend to tokens of another one: the beginning that its row shares (`shared_prompts.py`). On the CPU
the attention runs segment by segment. On a GPU in half precision it is one call of PyTorch's variable-length
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
from dschat_ppo.models.backbone import position_arguments, real_slots
from dschat_ppo.models.router_recorder import record_router, router_arguments
from dschat_ppo.models.sequence_parallel import (
    Columns,
    attention_of_own_heads,
    exchanged_heads,
    heads_to_columns,
    of_own_heads,
    rotary_of_whole_rows,
)
from dschat_ppo.models.shared_prompts import PackedRows, VarlenSegments, are_uneven

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
    """A running forward pass with the attention of this module.

    Attributes:
        config: of its model.
        lengths: of the segments of its only row; None: rows are not packed.
        divided: whether ranks share the rows, and each has a part of the columns.
        seen: for each segment, the columns (start, end) that it attends to before its own; None: no segment has any.
    """

    config: PretrainedConfig
    lengths: list[int] | None
    divided: bool = False
    seen: list[tuple[int, int]] | None = None

    made: dict[torch.device, VarlenSegments] = field(default_factory=dict)

    def of_varlen(self, device: torch.device) -> VarlenSegments:
        """The segments for variable-length attention, copied to the device once and not in each layer."""
        assert self.lengths is not None
        if device not in self.made:
            self.made[device] = VarlenSegments.of(self.lengths, self.seen, device)
        return self.made[device]


_RUNNING: list[_Running] = []
_WINDOWS: list[dict[int, int | None]] = []


@contextmanager
def segments(
    config: PretrainedConfig, lengths: list[int] | None, divided: bool = False,
    seen: list[tuple[int, int]] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Make models of `config` treat a single row as segments of these lengths.

    Args:
        config: of the model.
        lengths: of the segments; None: rows are not packed.
        divided: the model gets this rank's columns of rows that ranks share; lengths are those of whole rows.
        seen: for each segment, the columns (start, end) of the row that it attends to before its own.
    """
    before = config._attn_implementation
    _RUNNING.append(_Running(config, lengths, divided, seen))
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
    """Causal attention inside each segment: (b, heads, T, d) -> (b, T, heads, d). `attention_mask` is None."""
    if _WINDOWS:
        _WINDOWS[-1][module.layer_idx] = sliding_window
    if not _RUNNING[-1].divided:
        return _attention(module, query, key, value, sliding_window, options), None
    query, key, value = exchanged_heads(query, key, value)
    own = attention_of_own_heads(module, query, key)
    return heads_to_columns(_attention(own, query, key, value, sliding_window, of_own_heads(options))), None


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, window: int | None, options: dict[str, Any]
) -> Tensor:
    lengths, seen = _RUNNING[-1].lengths, _RUNNING[-1].seen
    if lengths is not None and _suits_flash(query, key, value, options):
        return _flash_attention(query, key, value, window, options.get("scaling"))
    parts = [(query, key, value)]
    if lengths is not None:
        parts = list(zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True))
    outputs = []
    for number, (q, k, v) in enumerate(parts):
        if seen is not None and seen[number][0] < seen[number][1]:
            before = slice(*seen[number])
            k, v = torch.cat([key[:, :, before], k], dim=2), torch.cat([value[:, :, before], v], dim=2)
        band = _band(q.shape[2], k.shape[2], window, q.device)
        if options.get("softcap") is not None or options.get("s_aux") is not None:
            outputs.append(_capped_attention(module, q, k, v, band, **options))
        elif q.shape[2] < k.shape[2] and q.device.type == "cpu":
            outputs.append(_grouped_attention(q, k, v, band, **options))
        else:
            outputs.append(sdpa_attention_forward(module, q, k, v, band, **options)[0])
    return torch.cat(outputs, dim=1)


def _grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, band: Tensor | None, scaling: float | None = None, **_: Any
) -> Tensor:
    """`sdpa_attention_forward` without dropout, and without the copies that it makes with a mask: of the keys, for each
    head of their group. (b, heads, T, d) -> (b, T, heads, d)."""
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, band, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return found.transpose(1, 2)


def _capped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, band: Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Attention that PyTorch has no kernel for: with a soft cap of its logits (Gemma 2), or with one more logit for
    each head that no value belongs to (the sinks of GPT-OSS, `s_aux` (heads,)). (b, heads, T, d) -> (b, T, heads, d).
    """
    groups, length, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    causal = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
    logits = logits.masked_fill(~(causal if band is None else band), -torch.inf)
    if s_aux is not None:
        sinks = s_aux.to(logits.dtype).view(1, -1, 1, 1).expand(len(logits), -1, length, 1)
        logits = torch.cat([logits, sinks], dim=-1)
    shares = torch.softmax(logits.float(), dim=-1)[..., :keys].to(value.dtype)
    shares = torch.nn.functional.dropout(shares, dropout, module.training)
    return (shares @ value).transpose(1, 2)


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
    parts = _RUNNING[-1].of_varlen(query.device)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # (T, heads, d)
    if parts.columns is not None:
        k, v = k[parts.columns], v[parts.columns]  # the gradients of a shared key add up in fp32, always in one order
    before = -1 if window is None else window - 1  # keys before its own that a query sees; -1: all
    assert _VARLEN is not None
    found: Any = _VARLEN(  # its window ends at the last query and the last key of a segment
        q, k, v, parts.queries, parts.keys, parts.most_queries, parts.most_keys, scale=scale,
        window_size=(before, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return found.unsqueeze(0)


def _band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Keys that each query sees, (1, 1, queries, keys) bool: its own and the `window - 1` before it. The last query's
    own key is the last one. None: a kernel that is causal by itself does, or every query sees every key."""
    is_whole = window is None or keys <= window
    if is_whole and queries in (1, keys):
        return None
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return (visible if window is None else visible.triu(keys - queries + 1 - window))[None, None]


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


def packed_states(backbone: Any, input_ids: Tensor, lengths: Tensor, rows: PackedRows) -> Tensor:
    """Last hidden states (N, H) of a packed row; the backbone must take `position_ids`.

    Args:
        backbone: the base model of a Hugging Face decoder.
        input_ids: (B, T) int64, right-padded.
        lengths: (B,) int64, above 0.
        rows: their layout.
    """
    with segments(backbone.config, rows.lengths, seen=rows.seen):
        output = backbone(
            input_ids=input_ids.flatten()[rows.tokens].unsqueeze(0), attention_mask=None, use_cache=False,
            **position_arguments(backbone, rows.positions.unsqueeze(0)), **router_arguments(),
        )  # fmt: skip
    record_router(  # a token that several rows share counts for each of them
        output, real_slots(input_ids, lengths),
        lambda mask: torch.bincount(rows.places[mask], minlength=len(rows.tokens)),
    )  # fmt: skip
    return output.last_hidden_state[0]


@dataclass(frozen=True)
class DividedRows:
    """Rows that ranks share, packed or not: how tensors (B, T) over their tokens are laid out, and their columns.

    Attributes:
        read: (B, T) bool, True on the tokens whose states are read.
        real: the same if they are laid end to end as one row; None: rows are not packed.
        lengths: of the segments of that row.
        columns: of the rows as they are laid out.
    """

    read: Tensor
    real: Tensor | None
    lengths: list[int] | None
    columns: Columns

    @classmethod
    def of(cls, input_ids: Tensor, lengths: Tensor, packed: bool) -> DividedRows:
        """Lay out right-padded `input_ids` (B, T) with `lengths` (B,): packed if asked for and rows differ."""
        read = real_slots(input_ids, lengths)
        if not (packed and are_uneven(lengths)):
            return cls(read, None, None, Columns(input_ids.shape[1]))
        columns = Columns(int(lengths.sum()))
        filler = [columns.padding] if columns.padding else []
        return cls(read, read, [*lengths.tolist(), *filler], columns)

    def laid_out(self, values: Tensor) -> Tensor:
        """(B, T) -> (1, N) packed, or as it is."""
        return values if self.real is None else values[self.real].unsqueeze(0)

    def own(self, values: Tensor) -> Tensor:
        """(B, T) -> (b, n), laid out, this rank's columns."""
        return self.columns.own(self.laid_out(values))

    def run(self, model: Any, input_ids: Tensor, **arguments: Any) -> Any:
        """The model's output for this rank's columns; a collective of the ranks that share the rows."""
        slots = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        whole = position_arguments(model, self.columns.padded(self.laid_out(slots)))["position_ids"]
        with segments(model.config, self.lengths, divided=True), rotary_of_whole_rows(model, whole):
            output = model(
                input_ids=self.own(input_ids), attention_mask=None, use_cache=False,
                **position_arguments(model, self.own(slots)), **arguments, **router_arguments(),
            )  # fmt: skip
        record_router(output, self.read, self.own)
        return output

    def values(self, part: Tensor) -> Tensor:
        """(b, n) fp32 of this rank's tokens -> (B, T) of all, 0 outside packed rows. Collective as `run`."""
        whole = self.columns.gather(part)
        if self.real is None:
            return whole
        return whole.new_zeros(self.real.shape).masked_scatter(self.real, whole)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of `torch.utils.checkpoint`: packs the recomputation of a packed forward pass."""
    if not _RUNNING:
        return nullcontext(), nullcontext()
    running = _RUNNING[-1]
    return nullcontext(), segments(running.config, running.lengths, running.divided, running.seen)


CHECKPOINTING = {"use_reentrant": False, "context_fn": checkpoint_contexts}
