"""Attention for generation: causal over a prefill, or of one new token over the KV cache.

It is registered with transformers' attention interface under the name `dschat_rollout`.
transformers has no mask function for that name, so models build no mask; the metadata of a step
says which slots hold tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from dschat_ppo.algorithms.fused_logprobs import HALF
from dschat_ppo.cpu_kernels import operations
from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.errors import attempt
from dschat_ppo.models.backbone import UnsupportedAttentionError, check_attention_call, unfit
from dschat_ppo.models.segment_attention import MOST_KEYS
from dschat_ppo.rollout.kv_cache import (
    DecodeMetadata,
    KVCache,
    PooledMetadata,
    PrefillMetadata,
    SharedPrefix,
)

_log = logging.getLogger(__name__)

NAME = "dschat_rollout"
WIDEST_HEAD = 256  # that the flash attention kernel supports
TOLERANCE = 0.05  # of its outputs of size 1 in half precision, compared with `decode_attention`

StepMetadata = DecodeMetadata | PooledMetadata
# (query, keys, values, numbers, starts, used, longest, scale) -> output, log-sum-exp; see
# `varlen_kernel`
Kernel = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]
]


def decode_attention(
    batch: StepMetadata,
    layer: int,
    query: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(count, heads, 1, head_dim) -> (count, heads, head_dim). The query heads of one key head are
    the rows of one matrix product, so keys are read once and never expanded. A product over
    contiguous keys runs at memory speed; attention kernels with one query do not."""
    # (count, slots): empty slots, later tokens, those beyond the window
    if ("mask", window) not in batch.kept:
        newest = batch.newest.unsqueeze(1)
        distance = newest - torch.arange(batch.length, device=newest.device)
        if window is None:
            visible = distance >= 0
        else:
            visible = (distance >= 0) & (distance < window)
        if batch.prefix is not None:
            lengths = batch.prefix.lengths.unsqueeze(1)
            place = torch.arange(batch.prefix.cache.capacity, device=newest.device)
            in_prefix = place < lengths
            if window is not None:
                in_prefix &= lengths + newest - place < window
            visible = torch.cat([visible, in_prefix], dim=1)
        mask = torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, float("-inf"))
        batch.kept["mask", window] = mask.unsqueeze(1)
    count, heads, _, width = query.shape
    keys, values = batch.read(layer)
    # exact in any precision, and keeps products in half precision in range
    power = 2.0 ** round(math.log2(scale))
    query = query * power
    scale = scale / power
    # (count * kv_heads, heads / kv_heads, d)
    folded = query.reshape(count * keys.shape[1], -1, width)
    scores = _products(folded, keys.flatten(0, 1)).view(count, heads, -1)
    if batch.prefix is not None:
        scores = torch.cat(
            [
                scores,
                by_prompt(
                    batch.prefix, query.squeeze(2), batch.prefix.cache.keys[layer], _products
                ),
            ],
            dim=2,
        )
    scores = scores.float()
    if scale != 1:  # what is left of a scale that is no power of two
        scores = scores.mul_(scale)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores.add_(batch.kept["mask", window])
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(-1, 1).expand(count, heads, 1)], dim=2)
    weights = torch.softmax(scores, dim=2).to(values.dtype)
    if sinks is not None:
        weights = weights[:, :, :-1]
    own = weights[:, :, : batch.length].reshape(count * keys.shape[1], -1, batch.length)
    mixed = torch.bmm(own, values.flatten(0, 1)).view(count, heads, -1)
    if batch.prefix is not None:
        mixed += by_prompt(
            batch.prefix, weights[:, :, batch.length :], batch.prefix.cache.values[layer], torch.bmm
        )
    return mixed


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """(n, q, d) and (n, k, d) -> (n, q, k) products; on a GPU in fp32, because bf16 rounds a score
    of 16 by 0.06."""
    if query.is_cuda and query.dtype != torch.float32 and torch.version.hip is None:
        return torch.bmm(query, keys.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(query, keys.transpose(1, 2))


def by_prompt(
    prefix: SharedPrefix, rows: Tensor, cached: Tensor, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """(n, heads, a) -> (n, heads, b): one product with `cached` (prompts, kv_heads, P, d) for all
    rows of a prompt."""
    prompts, kv_heads = cached.shape[:2]
    grid = rows.unflatten(1, (kv_heads, -1))[prefix.grid]  # prompts, row, kv_heads, group, a
    folded = grid.transpose(1, 2).reshape(prompts * kv_heads, -1, rows.shape[2])
    found = product(folded, cached.flatten(0, 1))
    cells = found.view(prompts, kv_heads, prefix.grid.shape[1], -1, found.shape[2]).transpose(1, 2)
    return cells.reshape(-1, rows.shape[1], found.shape[2])[prefix.cells]


class RolloutAttention:
    """The attention function of one generation. `metadata` describes the next forward pass:
    `PrefillMetadata`, or the metadata of each decode batch. `windows` records the sliding window
    that each layer asks for. `kernel` is used for decode steps in the layers that it supports;
    None: products and a softmax."""

    def __init__(self, kernel: CPUDecode | FlashDecode | None = None) -> None:
        self.metadata: PrefillMetadata | Sequence[StepMetadata] = []
        self.windows: dict[int, int | None] = {}
        self._kernel = kernel
        self._kernel_layers: set[int] = set()

    @property
    def reads_all_slots(self) -> bool:
        """Whether a decode step reads all slots up to `length` of its metadata in some layer. Known
        after a prefill."""
        return len(self._kernel_layers) < max(1, len(self.windows))

    def __call__(  # noqa: PLR0913
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
        """Write `key` and `value` (n, kv_heads, L, head_dim) to the cache; attend with `query` (n,
        heads, L, head_dim). Returns ((n, L, heads, head_dim), None). For errors see
        `check_attention_call`."""
        sinks = others.pop("s_aux", None)  # (heads,), as GPT-OSS names them
        check_attention_call(module, attention_mask, others)
        causal = others.get("is_causal")  # which counts before the attribute
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise UnsupportedAttentionError(f"{type(module).__name__} needs keys of later tokens")
        layer: Any = module.layer_idx
        self.windows[layer] = sliding_window
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        if isinstance(self.metadata, PrefillMetadata):
            if (
                self._kernel is not None
                and sinks is None
                and self._kernel.supports(query, key, value, softcap)
            ):
                self._kernel_layers.add(layer)
            step = self.metadata
            for cached, new in zip(step.cache.layer(layer, key, value), (key, value), strict=True):
                _write(step, cached, new[step.source, :, step.columns])
            query, key, value = (step.to_the_left(part) for part in (query, key, value))
            newest = None
            if step.history is not None:
                (key, value), newest = step.history.read(layer), step.history.newest
            mixed = causal_attention(
                query, key, value, scale, sliding_window, softcap, sinks, newest
            )
            return step.to_the_right(mixed).transpose(1, 2), None
        outputs = []
        for batch in self.metadata:
            rows = slice(batch.first, batch.first + batch.count)
            # products read a prefix that several rows share once for all of them
            if layer in self._kernel_layers and batch.prefix is None:
                kernel = self._kernel
            else:
                kernel = None
            if kernel is None or not kernel.writes_cache:
                for cached, new in zip(
                    batch.cache.layer(layer, key, value), (key, value), strict=True
                ):
                    _write(batch, cached, new[rows, :, 0])
            if kernel is not None:
                outputs.append(
                    kernel(batch, layer, query[rows], key[rows], value[rows], scale, sliding_window)
                )
            else:
                outputs.append(
                    decode_attention(
                        batch, layer, query[rows], scale, sliding_window, softcap, sinks
                    )
                )
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(1), None


def _write(step: PrefillMetadata | StepMetadata, cached: Tensor, new: Tensor) -> None:
    """Put the keys or values `new` (m, kv_heads, d) of m tokens to slots `step.slots` of rows
    `step.rows` of a layer, (rows, kv_heads, capacity, d). Indices of two dimensions that are not
    the first ones would make the deterministic kernel of a GPU copy the whole layer."""
    _, heads, capacity, width = cached.shape
    # (m * kv_heads,): lines of the layer as a matrix of d columns
    if ("written", heads) not in step.kept:
        planes = step.rows.unsqueeze(1) * heads + torch.arange(heads, device=cached.device)
        step.kept["written", heads] = (planes * capacity + step.slots.unsqueeze(1)).flatten()
    cached.view(-1, width).index_copy_(0, step.kept["written", heads], new.reshape(-1, width))


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    newest: Tensor | None = None,
) -> Tensor:
    """Causal attention of right-padded rows, whose padding comes after all real tokens and needs no
    mask: `query` (n, heads, L, d), `key` and `value` (n, kv_heads, K, d) -> (n, heads, L, d). A
    token sees itself and the `window - 1` tokens before it; None: all. With `softcap`, scores
    become `softcap * tanh(scores / softcap)` (Gemma 2). `sinks` (heads,): one more score of every
    softmax, for nothing to read (GPT-OSS). `newest` (n, L) int64: the key of each token, where more
    keys than these are given; None: L = K, and they are in order."""
    length = query.shape[2]
    fits = (
        newest is None
        and not softcap
        and can_run(query, key, value)
        and length <= MOST_KEYS[query.dtype]
    )
    if fits and not query.requires_grad:
        parts = torch.tensor([[0, length, 0, 0]])
        mixed, log_sums = operations.causal_attention(query, key, value, parts, window, scale)
        if sinks is None:
            return mixed
        return mixed * torch.sigmoid(log_sums - sinks.float().view(-1, 1)).unsqueeze(3).to(
            mixed.dtype
        )
    if softcap and sinks is None:
        return _softcapped(query, key, value, scale, _visible(key, window, newest), softcap)
    width = value.shape[3]
    first = 0
    # before the others comes a token that each head scores with its sink, and whose value is 0
    if sinks is not None:
        # 8: GPU kernels
        query, key, value = (nn.functional.pad(part, (0, 8, 1, 0)) for part in (query, key, value))
        query[..., -1], key[:, :, 0, -1], first = (sinks / scale).view(-1, 1), 1, 1
        newest = None if newest is None else nn.functional.pad(newest + 1, (1, 0))
    visible = None
    if newest is not None or window is not None and window < length + first:
        visible = _visible(key, window, newest)
        visible[..., :first] = True
    mixed = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        visible,
        is_causal=visible is None and query.shape[2] > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed[:, :, first:, :width]


def _visible(key: Tensor, window: int | None, newest: Tensor | None) -> Tensor:
    """(n or 1, 1, L, K) bool: which of the keys (n, kv_heads, K, d) each token of
    `causal_attention` sees."""
    place = torch.arange(key.shape[2], device=key.device)
    distance = (place if newest is None else newest).unsqueeze(-1) - place
    if window is None:
        visible = distance >= 0
    else:
        visible = (distance >= 0) & (distance < window)
    return visible.view(-1, 1, *distance.shape[-2:])


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor, softcap: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    power = 2.0 ** round(math.log2(scale))  # as in `decode_attention`
    query = query * power
    scale = scale / power
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
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
    """Make every attention layer of `model` call `attention`; restore the previous attention on
    exit. Linear layers call PyTorch's own product: ZeRO-3's, which a backward pass needs, adds the
    bias separately and costs a Python function for each call."""
    config: Any = model.config
    parts = [
        config,
        *(
            getattr(config, name)
            for name in config.sub_configs
            if getattr(config, name) is not None
        ),
    ]
    before = [part._attn_implementation for part in parts]
    linear = nn.functional.linear
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


class CPUDecode:
    """Attention of decode steps over a `KVCache` by one kernel, which also writes the new key and
    value there. Query (n, heads, 1, head_dim), new key and value (n, kv_heads, 1, head_dim) -> (n,
    heads, head_dim)."""

    writes_cache = True

    def supports(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> bool:
        """Whether the kernel can be used for a layer."""
        return not softcap and value.shape == key.shape and can_run(query, key, value)

    def __call__(
        self,
        batch: StepMetadata,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        keys, values = batch.cache.layer(layer, key, value)
        query, key, value = (_side_by_side(part) for part in (query, key, value))
        if ("places", heads := keys.shape[1]) not in batch.kept:
            batch.kept["places", heads] = batch.places(heads)
        places = batch.kept["places", heads]
        return operations.decode_attention(query, key, value, keys, values, places, scale, window)


def _side_by_side(part: Tensor) -> Tensor:
    """(n, heads, 1, d) with the heads of each row side by side in memory."""
    _, heads, _, width = part.shape
    fits = part.stride(3) == 1 and (heads == 1 or part.stride(1) == width)
    return part if fits else part.contiguous()


def varlen_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    numbers: Tensor,
    starts: Tensor,
    used: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of N queries (N, heads, d), each over its own segment of the keys (S, 1, d) -> (N,
    heads, d), and the logarithm of the sum of the exponentials of the scores, (heads, N) fp32.

    The heads of a query become rows of one product, and a few queries divide their keys among more
    processors. `torch.nn.attention.varlen` wraps the same operator, but adds a kernel to each call.
    Its pages (`block_table`) need another flash attention than the one in PyTorch; with `used`, the
    operator reads of `starts` only where a segment begins, so segments may be anywhere and may
    overlap.

    `numbers`: (N + 1,) int32, 0, 1, ... N. `starts`: (N + 1,) int32, where each segment begins in
    `keys`; the last has no meaning. `used`: (N,) int32, how many keys each query attends to, at
    least 1; `longest` is not below any.
    """
    output, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        numbers,
        starts,
        1,
        longest,
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=used,
    )
    return output, log_sums


def flash_decode(device: torch.device) -> FlashDecode | None:
    """Flash attention for decode steps on `device`, or None if it has no such kernel."""
    if (
        device.type != "cuda"
        or torch.version.hip
        or not torch.backends.cuda.is_flash_attention_available()
    ):
        return None
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return FlashDecode(varlen_kernel)
    return None


class FlashDecode:
    """Attention of decode steps with the flash attention kernel in PyTorch, for heads of `dtypes`
    that it supports. It takes the place of two products and the passes over their scores, which it
    keeps in fp32 too, and reads the slots that hold tokens, not the whole bucket."""

    writes_cache = False

    def __init__(self, kernel: Kernel, dtypes: tuple[torch.dtype, ...] = HALF):
        self._kernel = kernel
        self._dtypes = dtypes

    def supports(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> bool:
        """Whether the kernel can be used for a layer: query (n, heads, L, d), key and value (n,
        kv_heads, L, d). The first time, the kernel is compared with `decode_attention` on random
        rows of the same shape."""
        width = query.shape[3]
        if (
            softcap
            or query.dtype not in self._dtypes
            or width % 8
            or width > WIDEST_HEAD
            or value.shape != key.shape
        ):
            return False
        return _agrees(self._kernel, query.dtype, query.device, query.shape[1], key.shape[1], width)

    def __call__(
        self,
        batch: StepMetadata,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """As `decode_attention`: (count, heads, 1, head_dim) -> (count, heads, head_dim). Not for a
        `SharedPrefix`.

        Rows of a pool may have two segments: own tokens and a prefix. Both are queries of one call,
        and the parts are weighted by the sums of their softmax, which makes them the softmax over
        all keys. The rows of a prompt are next to each other, so the GPU reads its keys from memory
        about once, and for the other rows from its L2 cache.
        """
        keys = batch.cache.keys[layer]
        values = batch.cache.values[layer]
        kv_heads = keys.shape[-3]
        width = keys.shape[-1]
        if ("segments", kv_heads, window) not in batch.kept:
            starts, used = (part.to(torch.int32) for part in batch.segments(kv_heads, window))
            numbers = torch.arange(len(used) + 1, dtype=torch.int32, device=query.device)
            batch.kept["segments", kv_heads, window] = (
                numbers,
                nn.functional.pad(starts, (0, 1)),
                used,
            )
        numbers, starts, used = batch.kept["segments", kv_heads, window]
        # (count * kv_heads, heads / kv_heads, d)
        folded = query.reshape(batch.count * kv_heads, -1, width)
        parts = len(used) // len(folded)
        if parts > 1:
            folded = folded.repeat(parts, 1, 1)
        mixed, log_sums = self._kernel(
            folded,
            keys.view(-1, 1, width),
            values.view(-1, 1, width),
            numbers,
            starts,
            used,
            batch.length,
            scale,
        )
        if parts > 1:
            # (group, parts, count * kv_heads)
            weights = torch.softmax(log_sums.unflatten(1, (parts, -1)), dim=1)
            mixed = (
                (mixed.unflatten(0, (parts, -1)) * weights.permute(1, 2, 0).unsqueeze(3))
                .sum(dim=0)
                .to(query.dtype)
            )
        return mixed.reshape(batch.count, -1, width)


@cache
def _agrees(
    kernel: Kernel, dtype: torch.dtype, device: torch.device, heads: int, kv_heads: int, width: int
) -> bool:
    """Whether the kernel and `decode_attention` agree on random rows of a pool, most of them with a
    prefix."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    pool = KVCache(1, 900)
    pool.keys[0], pool.values[0] = random(1, kv_heads, 900, width), random(1, kv_heads, 900, width)
    query = random(8, heads, 1, width)
    scale = width**-0.5
    own, starts, prefix_starts, prefix_lengths = torch.tensor(
        [
            [0, 200, 17, 99, 5, 1, 30, 4],
            [7, 300, 650, 501, 10, 12, 840, 700],
            [0, 0, 20, 600, 20, 20, 600, 20],
            [0, 0, 250, 2, 250, 3, 40, 9],
        ],
        device=device,
    )
    batch = PooledMetadata(
        pool, own, starts, prefix_starts, prefix_lengths, length=300, shares=True
    )
    with attempt() as tried:
        found = FlashDecode(kernel)(batch, 0, query, query, query, scale, None)
    if reason := unfit(tried):
        _log.warning(f"rollout: with the flash attention kernel {reason}; decode steps are slower")
        return False
    expected = decode_attention(batch, 0, query, scale, None, None)
    difference = float((found.float() - expected.float()).abs().max())
    if not difference <= TOLERANCE:
        _log.warning(
            f"rollout: the flash attention kernel is off by {difference:.2g}; decode steps are"
            " slower"
        )
        return False
    return True
