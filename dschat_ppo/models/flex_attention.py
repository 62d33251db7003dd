"""PyTorch's flex attention (Dong et al. 2024) over the segments of a row, with the mask of exactly the keys they see.

A query sees two runs of neighbouring keys: the last ones of its segment, up to the query itself, and the last ones of
the beginning that its segment shares with others. Three numbers for each query describe them, sliding window included.
From these follow the mask of a single key, and the blocks of keys that a block of queries needs at all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128  # queries and keys of a block
MOST_KERNELS = 64  # of one process: each head size, dtype, window and need of gradients is compiled once


class BlockMasks:
    """The masks of a row of N tokens in segments, one for each sliding window. Arguments as in `Segments`."""

    def __init__(self, lengths: list[int], seen: list[tuple[int, int]] | None, device: torch.device):
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        shared = torch.tensor(seen) if seen else torch.zeros(len(lengths), 2, dtype=torch.int64)
        of_segments = torch.stack([starts, shared[:, 0], shared[:, 1]])  # (3, segments)
        self._of_tokens = of_segments.repeat_interleave(sizes, dim=1).to(device)  # (3, N)
        self._made: dict[int | None, Any] = {}

    def of(self, window: int | None) -> Any:
        """The `BlockMask` of layers in which a query sees `window` keys, its own among them; None: all before it."""
        if window not in self._made:
            start, seen, end = self._of_tokens
            self._made[window] = _block_mask(*visible_keys(start, seen, end, window))
        return self._made[window]


def visible_keys(start: Tensor, seen: Tensor, end: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """`(first, seen, end)`, (N,) int64: each query sees the keys from `first` to itself, and those in `[seen, end)`.

    `start` (N,) int64 is where the segment of each token begins; `seen` and `end` (N,) int64, where the beginning that
    its segment shares begins and ends. `window`: how many keys it sees at most, counted in its own row, its own among
    them.
    """
    token = torch.arange(len(start), device=start.device)
    if window is None:
        return start, seen, end
    hidden = (token - start + end - seen - window + 1).clamp_min(0)  # first keys of its row that it does not see
    return torch.maximum(start, token - window + 1), torch.minimum(seen + hidden, end), end


def _block_mask(first: Tensor, seen: Tensor, end: Tensor) -> Any:
    """`BlockMask` for the keys of `visible_keys`, without a tensor of N x N."""
    from torch.nn.attention.flex_attention import BlockMask

    def sees(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key <= query) | (key >= seen[query]) & (key < end[query])

    some, whole = (_listed(blocks) for blocks in blocks_of_keys(first, seen, end))
    return BlockMask.from_kv_blocks(*some, *whole, BLOCK, sees, seq_lengths=(len(first), len(first)))


def blocks_of_keys(first: Tensor, seen: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries, the blocks of keys of which it sees some, and of which all: (blocks, blocks) bool. The
    arguments are what `visible_keys` returns. No block is in both; one that no single run covers may be in the
    first."""
    count = len(first)
    blocks = -(-count // BLOCK)
    low = torch.arange(blocks, device=first.device) * BLOCK  # (blocks,) first key of each
    query = torch.arange(count, device=first.device).unsqueeze(1)
    first, seen, end = first.unsqueeze(1), seen.unsqueeze(1), end.unsqueeze(1)
    touches = (first < low + BLOCK) & (query >= low) | (seen < low + BLOCK) & (end > low) & (seen < end)
    covers = (first <= low) & (query >= low + BLOCK - 1) | (seen <= low) & (end >= low + BLOCK)
    missing = (0, 0, 0, blocks * BLOCK - count)
    some = pad(touches, missing, value=False).view(blocks, BLOCK, blocks).any(dim=1)
    whole = pad(covers, missing, value=True).view(blocks, BLOCK, blocks).all(dim=1)
    return some & ~whole, whole


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each line of (blocks, blocks) bool has, (1, 1, blocks) int32, and their numbers in order, then
    those of the others, (1, 1, blocks, blocks) int32."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32)[None, None], order.int()[None, None]


@cache
def _compiled() -> Any:
    """The kernel for GPUs. It is never replaced by slow operations: beyond `MOST_KERNELS` PyTorch raises an error."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    return torch.compile(flex, fullgraph=True)


def _kernel(on_gpu: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention as flex

    if not on_gpu:
        return flex
    settings: Any = torch._dynamo.config  # of this thread: recomputed layers run in that of the backward pass
    if settings.recompile_limit < MOST_KERNELS:
        settings.recompile_limit = MOST_KERNELS
    return _compiled()


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention over the keys of `mask` (of `BlockMasks`), (1, heads, N, d) -> (1, heads, N, d). No gradient on a CPU.
    `key` and `value` may have fewer heads. `softcap`: the logits become `softcap * tanh(logits / softcap)` (Gemma 2).
    `sinks` (heads,): one more logit for each head that no value belongs to (GPT-OSS)."""
    from transformers.integrations.flex_attention import get_flex_attention_lse_kwargs

    # Tensors, because PyTorch cannot compile a second value of a number that the function below holds.
    usual = query.shape[-1] ** -0.5
    factor = None if scaling is None or scaling == usual else torch.full((), scaling, device=query.device)
    cap = None if softcap is None else torch.full((), softcap, device=query.device)

    def changed(score: Tensor, _row: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        score = score if factor is None else score * factor
        return score if cap is None else cap * torch.tanh(score / cap)

    found = _kernel(query.is_cuda)(
        query, key, value, score_mod=None if factor is None and cap is None else changed, block_mask=mask,
        scale=None if factor is None else 1.0, enable_gqa=query.shape[1] != key.shape[1],
        **get_flex_attention_lse_kwargs(sinks is not None),
    )  # fmt: skip
    if sinks is None:
        return found
    output, extra = found
    total = getattr(extra, "lse", extra)  # (1, heads, N), a tensor before PyTorch 2.9
    # exp(total) / (exp(total) + exp(sink)) of the softmax belongs to values
    return output * torch.sigmoid(total - sinks.view(1, -1, 1)).unsqueeze(-1).to(output.dtype)
