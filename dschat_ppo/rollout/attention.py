"""Attention for generation: causal over a prefill, or of one new token over the KV cache.

It is registered with transformers' attention interface under the name `dschat_rollout`.
transformers has no mask function for that name, so models build no mask; the metadata of a step
says which slots hold tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from dschat_ppo.common.exactness import exact_rollouts
from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.backbone import UnsupportedAttentionError, check_attention_call
from dschat_ppo.models.segment_attention import suits_length
from dschat_ppo.rollout.decode_kernels import (
    AttentionCall,
    CPUDecode,
    GPUDecode,
    StepMetadata,
    attend_token_by_token,
    products_attention,
)
from dschat_ppo.rollout.kv_cache import PrefillMetadata

NAME = "dschat_rollout"


class RolloutAttention:
    """The attention function of one generation. `metadata` describes the next forward pass:
    `PrefillMetadata`, or the metadata of each decode batch. `windows` records the sliding window
    that each layer asks for. `kernel` is used for decode steps in the layers that it supports;
    None: products and a softmax."""

    def __init__(self, kernel: CPUDecode | GPUDecode | None = None) -> None:
        self.metadata: PrefillMetadata | Sequence[StepMetadata] = []
        self.windows: dict[int, int | None] = {}
        self._kernel = kernel
        self._kernel_layers: set[int] = set()

    @property
    def reads_all_slots(self) -> bool:
        """Whether a decode step reads all slots up to `length` of its metadata in some layer. Known
        after a prefill."""
        return len(self._kernel_layers) < max(1, len(self.windows))

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """As an attention function of transformers: write `key` and `value` (n, kv_heads, L, d) to
        the cache, and attend with `query` (n, heads, L, d).

        Returns:
            (n, L, heads, d), and no weights.

        Raises:
            UnsupportedAttentionError: the call has an argument that would be ignored.
        """
        check_attention_call(module, attention_mask, options)
        is_causal = options.get("is_causal")  # which counts before the attribute
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if not is_causal:
            raise UnsupportedAttentionError(f"{type(module).__name__} needs keys of later tokens")
        layer: Any = module.layer_idx
        scale = options.get("scaling")
        if scale is None:
            scale = query.shape[3] ** -0.5
        call = AttentionCall(
            layer,
            query,
            key,
            value,
            scale,
            options.get("sliding_window"),
            options.get("softcap"),
            options.get("s_aux"),  # as GPT-OSS names them
        )
        if isinstance(self.metadata, PrefillMetadata):
            self.windows[layer] = call.window
            if self._kernel is not None and self._kernel.supports(call):
                self._kernel_layers.add(layer)
            return _prefill(self.metadata, call).transpose(1, 2), None
        outputs = [self._decode(batch, call) for batch in self.metadata]
        if len(outputs) == 1:
            return outputs[0].unsqueeze(1), None
        return torch.cat(outputs).unsqueeze(1), None

    def _decode(self, batch: StepMetadata, call: AttentionCall) -> Tensor:
        """Write the new tokens of the rows of a batch to its cache, and attend -> (count, heads,
        d)."""
        # products read a prefix that several rows share once for all of them
        is_by_kernel = call.layer in self._kernel_layers and batch.prefix is None
        if self._kernel is not None and is_by_kernel:
            return self._kernel(batch, call)
        keys, values = batch.cache.layer(call.layer, call.key, call.value)
        _write_to_cache(batch, keys, call.key[batch.step_rows, :, 0])
        _write_to_cache(batch, values, call.value[batch.step_rows, :, 0])
        return products_attention(batch, call)


def _prefill(step: PrefillMetadata, call: AttentionCall) -> Tensor:
    """Write the keys and values of a prefill to the cache, and attend -> (n, heads, L, d)."""
    keys, values = step.cache.layer(call.layer, call.key, call.value)
    _write_to_cache(step, keys, call.key[step.source, :, step.columns])
    _write_to_cache(step, values, call.value[step.source, :, step.columns])
    if step.history is not None and exact_rollouts() and CPUDecode().supports(call):
        return attend_token_by_token(step.history, call)
    query = step.to_the_left(call.query)
    key = step.to_the_left(call.key)
    value = step.to_the_left(call.value)
    newest = None
    if step.history is not None:
        key, value = step.history.read(call.layer)
        newest = step.history.newest
    mixed = prefill_attention(call._replace(query=query, key=key, value=value), newest)
    return step.to_the_right(mixed)


def _write_to_cache(step: PrefillMetadata | StepMetadata, cached: Tensor, new: Tensor) -> None:
    """Put the keys or values `new` (m, kv_heads, d) of m tokens to slots `step.slots` of rows
    `step.rows` of a layer, (rows, kv_heads, capacity, d). Indices of two dimensions that are not
    the first ones would make the deterministic kernel of a GPU copy the whole layer."""
    _, heads, capacity, width = cached.shape
    # (m * kv_heads,): lines of the layer as a matrix of d columns
    if ("written", heads) not in step.step_cache:
        planes = step.rows.unsqueeze(1) * heads + torch.arange(heads, device=cached.device)
        step.step_cache["written", heads] = (planes * capacity + step.slots.unsqueeze(1)).flatten()
    cached.view(-1, width).index_copy_(0, step.step_cache["written", heads], new.reshape(-1, width))


def prefill_attention(call: AttentionCall, newest: Tensor | None = None) -> Tensor:
    """Causal attention of right-padded rows, whose padding comes after all real tokens and needs no
    mask.

    Args:
        call: with keys and values (n, kv_heads, K, d).
        newest: (n, L) int64, the last key that each token sees, where more keys than these tokens
            are given; None: K = L, and each token sees its own key last.

    Returns:
        (n, heads, L, d).
    """
    length = call.query.shape[2]
    if (
        newest is None
        and not call.softcap
        and can_run(call.query, call.key, call.value)
        and suits_length(length, call.query.dtype)
        and not call.query.requires_grad
    ):
        return _compiled_attention(call)
    if call.sinks is not None:
        return _attention_with_sinks(call, newest)
    if call.softcap:
        return _softcapped_attention(call, _visible(call.key, call.window, newest))
    visible = None
    if newest is not None or (call.window is not None and call.window < length):
        visible = _visible(call.key, call.window, newest)
    return _scaled_products(call.query, call.key, call.value, visible, call.scale)


def _visible(key: Tensor, window: int | None, newest: Tensor | None) -> Tensor:
    """(n or 1, 1, L, K) bool: which of the keys (n, kv_heads, K, d) each token of
    `prefill_attention` sees."""
    key_positions = torch.arange(key.shape[2], device=key.device)
    if newest is None:
        newest = key_positions
    distance = newest.unsqueeze(-1) - key_positions
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    return visible.view(-1, 1, *distance.shape[-2:])


def _scaled_products(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float
) -> Tensor:
    """PyTorch's attention; `visible` as `_visible`, None: causal."""
    return nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        visible,
        is_causal=visible is None and query.shape[2] > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _compiled_attention(call: AttentionCall) -> Tensor:
    """`prefill_attention` by the kernel for a CPU, without a soft cap."""
    segments = torch.tensor([[0, call.query.shape[2], 0, 0]])
    mixed, log_sums = operations.causal_attention(
        call.query, call.key, call.value, segments, call.window, call.scale
    )
    if call.sinks is None:
        return mixed
    read_share = torch.sigmoid(log_sums - call.sinks.float().view(-1, 1))  # the sink takes the rest
    return mixed * read_share.unsqueeze(3).to(mixed.dtype)


def _attention_with_sinks(call: AttentionCall, newest: Tensor | None) -> Tensor:
    """`prefill_attention` with one more score in each softmax. Before the other tokens comes one
    that each head scores with its sink, and whose value is 0."""
    assert call.sinks is not None
    width = call.value.shape[3]
    # GPU kernels need widths that are multiples of 8
    query = nn.functional.pad(call.query, (0, 8, 1, 0))
    key = nn.functional.pad(call.key, (0, 8, 1, 0))
    value = nn.functional.pad(call.value, (0, 8, 1, 0))
    query[..., -1] = (call.sinks / call.scale).view(-1, 1)
    key[:, :, 0, -1] = 1
    if newest is not None:
        newest = nn.functional.pad(newest + 1, (1, 0))
    visible = None
    if newest is not None or (call.window is not None and call.window < query.shape[2]):
        visible = _visible(key, call.window, newest)
        visible[..., :1] = True
    mixed = _scaled_products(query, key, value, visible, call.scale)
    return mixed[:, :, 1:, :width]


def _softcapped_attention(call: AttentionCall, visible: Tensor) -> Tensor:
    """`prefill_attention` with a soft cap, by products and a softmax."""
    assert call.softcap is not None
    groups = call.query.shape[1] // call.key.shape[1]
    power = 2.0 ** round(math.log2(call.scale))  # as in `products_attention`
    query = call.query * power
    scale = call.scale / power
    key = call.key.repeat_interleave(groups, dim=1)
    value = call.value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scale
    scores = (torch.tanh(scores / call.softcap) * call.softcap).masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=3).to(value.dtype) @ value


AttentionFunction = Callable[..., tuple[Tensor, None]]

_active: list[AttentionFunction] = []


def _dispatch(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Call the attention function of the innermost `attention_replaced`."""
    return _active[-1](module, *args, **kwargs)


AttentionInterface.register(NAME, _dispatch)


@contextmanager
def attention_replaced(model: PreTrainedModel, attention: AttentionFunction) -> Iterator[None]:
    """Make every attention layer of the decoder of `model` call `attention`; restore the previous
    attention on exit. A vision tower keeps its own. Linear layers call PyTorch's own product:
    ZeRO-3's, which a backward pass needs, adds the bias separately and costs a Python function for
    each call."""
    config: Any = model.config.get_text_config()
    configs = [config]
    for name in config.sub_configs:
        if getattr(config, name) is not None:
            configs.append(getattr(config, name))
    originals = [each_config._attn_implementation for each_config in configs]
    linear = nn.functional.linear
    config._attn_implementation = NAME  # transformers sets it on the others too
    nn.functional.linear = torch._C._nn.linear
    _active.append(attention)
    try:
        yield
    finally:
        _active.pop()
        nn.functional.linear = linear
        for each_config, original in zip(configs, originals, strict=True):
            each_config._attn_implementation = original
