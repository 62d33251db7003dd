"""Attention for generation: causal over a prefill, or of one new token over the KV cache.

It is registered with transformers' attention interface under the name `dschat_rollout`. transformers has no mask
function for that name, so models build no mask; the metadata of a step says which slots hold tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.probes import UnsupportedAttentionError, check_attention_call
from dschat_ppo.rollout.attention_metadata import DecodeMetadata, PooledMetadata, PrefillMetadata
from dschat_ppo.rollout.decode_attention import decode_attention, decode_mask, scaled

NAME = "dschat_rollout"


class RolloutCache(Cache):
    """Passes new keys and values through to the attention function, which writes them to the KV cache itself."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the same tensors."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always given explicitly."""
        return 0


class DecodeKernel(Protocol):
    """Attention of decode steps by one kernel: `FlashDecode` or `CPUDecode`. It gets the query (n, heads, 1, head_dim),
    and the new key and value (n, kv_heads, 1, head_dim) of the rows of a decode batch, and returns (n, heads,
    head_dim). Where it `writes_cache`, it also puts key and value there."""

    writes_cache: bool

    def begin(self) -> None: ...

    def supports(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> bool: ...

    def can_run(self, batch: DecodeMetadata | PooledMetadata) -> bool: ...

    def __call__(
        self, batch: DecodeMetadata | PooledMetadata, layer: int, query: Tensor, key: Tensor, value: Tensor,
        scale: float, window: int | None,
    ) -> Tensor: ...  # fmt: skip


class RolloutAttention:
    """The attention function of one generation. `metadata` describes the next forward pass: `PrefillMetadata`, or the
    metadata of each decode batch. `windows` records the sliding window that each layer asks for. `kernel` is used for
    decode steps in the layers that it supports; None: products and a softmax."""

    def __init__(self, kernel: DecodeKernel | None = None) -> None:
        self.metadata: PrefillMetadata | Sequence[DecodeMetadata | PooledMetadata] = []
        self.windows: dict[int, int | None] = {}
        self._kernel = kernel
        self._kernel_layers: set[int] = set()
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # shared by the layers of a forward pass
        self._slot_mappings: dict[tuple[int, int], Tensor] = {}

    def begin(self, metadata: PrefillMetadata | Sequence[DecodeMetadata | PooledMetadata]) -> None:
        """Set the metadata of the next forward pass."""
        self.metadata = metadata
        self._masks = {}
        self._slot_mappings = {}
        if self._kernel is not None:
            self._kernel.begin()

    @property
    def reads_all_slots(self) -> bool:
        """Whether a decode step reads all slots up to `length` of its metadata in some layer. Known after a prefill."""
        return len(self._kernel_layers) < max(1, len(self.windows))

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Write `key` and `value` (n, kv_heads, L, head_dim) to the cache; attend with `query` (n, heads, L, head_dim).
        Returns ((n, L, heads, head_dim), None). For errors see `check_attention_call`."""
        check_attention_call(module, attention_mask, {**others, "sinks": others.get("s_aux", others.get("sinks"))})
        causal = others.get("is_causal")  # which counts before the attribute
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise UnsupportedAttentionError(f"{type(module).__name__} needs keys of later tokens")
        layer: Any = module.layer_idx
        self.windows[layer] = sliding_window
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        if isinstance(self.metadata, PrefillMetadata):
            if self._kernel is not None and self._kernel.supports(query, key, value, softcap):
                self._kernel_layers.add(layer)
            self.metadata.cache.write_prefill(layer, self.metadata.rows, self.metadata.source, key, value)
            return causal_attention(query, key, value, scale, sliding_window, softcap).transpose(1, 2), None
        outputs, heads = [], key.shape[1]
        for number, batch in enumerate(self.metadata):
            rows = slice(batch.first, batch.first + batch.count)
            kernel = self._kernel if layer in self._kernel_layers else None
            if kernel is not None and not kernel.can_run(batch):
                kernel = None
            if kernel is None or not kernel.writes_cache:
                if (number, heads) not in self._slot_mappings:
                    self._slot_mappings[number, heads] = batch.slot_mapping(heads)
                batch.cache.write_decode(layer, self._slot_mappings[number, heads], key[rows], value[rows])
            if kernel is not None:
                outputs.append(kernel(batch, layer, query[rows], key[rows], value[rows], scale, sliding_window))
                continue
            if (number, sliding_window) not in self._masks:
                self._masks[number, sliding_window] = decode_mask(batch, sliding_window)
            mask = self._masks[number, sliding_window]
            outputs.append(decode_attention(batch, layer, query[rows], mask, scale, softcap))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(1), None


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention of right-padded rows, whose padding comes after all real tokens and needs no mask: `query` (n,
    heads, L, d), `key` and `value` (n, kv_heads, L, d) -> (n, heads, L, d). A token sees itself and the `window - 1`
    tokens before it; None: all. With `softcap`, scores become `softcap * tanh(scores / softcap)` (Gemma 2)."""
    length = query.shape[2]
    if not softcap and can_run(query, key, value) and not query.requires_grad:
        return operations.causal_attention(query, key, value, torch.tensor([[0, length, 0, 0]]), window, scale)[0]
    reach = length if window is None else min(window, length)
    if reach == length and not softcap:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    distance = torch.arange(length, device=query.device).unsqueeze(1) - torch.arange(length, device=query.device)
    visible = (distance >= 0) & (distance < reach)  # (L, L)
    if not softcap:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    query, scale = scaled(query, scale)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scale
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=3).to(value.dtype) @ value


AttentionFunction = Callable[..., tuple[Tensor, None]]

_active: list[AttentionFunction] = []


def _dispatch(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _active[-1](module, *args, **kwargs)


AttentionInterface.register(NAME, _dispatch)


@contextmanager
def installed(model: PreTrainedModel, attention: AttentionFunction) -> Iterator[None]:
    """Make every attention layer of `model` call `attention`; restore the previous attention on exit. Linear layers
    call PyTorch's own product: ZeRO-3's, which a backward pass needs, adds the bias separately and costs a Python
    function for each call."""
    config: Any = model.config
    parts = [config, *(getattr(config, name) for name in config.sub_configs if getattr(config, name) is not None)]
    before, linear = [part._attn_implementation for part in parts], nn.functional.linear
    config._attn_implementation = NAME  # transformers sets it on the parts too
    nn.functional.linear = torch._C._nn.linear
    _active.append(attention)
    try:
        yield
    finally:
        _active.pop()
        nn.functional.linear = linear
        for part, implementation in zip(parts, before, strict=True):
            part._attn_implementation = implementation
