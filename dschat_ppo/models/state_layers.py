"""Layers that carry a state from token to token (a short convolution, Mamba, a gated delta rule), in packed rows.

Such a layer starts from no state at the first column that it sees, and passes over the ends of segments. So the packed
row is laid out in rows again for it alone: each row whole, with the beginning that it shares (of which a convolution
alone needs the last tokens), and padded on the right, which no token sees. The layer's own forward runs there, and each
token's output goes back to its place. Kernels that work in chunks then begin them where they begin in padded rows.
Attention, MLPs, norms and heads run the packed row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dschat_ppo.models.shared_prompts import PackedRows


def state_layers(backbone: nn.Module) -> list[nn.Module]:
    """The modules that mix tokens through a state, by the causal convolution that they begin with. Others (RWKV, xLSTM)
    make rows depend on each other, which `select_kernels` finds."""
    return [part for part in backbone.modules() if any(isinstance(child, nn.Conv1d) for child in part.children())]


def reach_of(layer: nn.Module) -> int:
    """How many tokens before it a token of such a layer sees: all, unless only the convolution mixes (LFM2)."""
    parts = [getattr(part, "base_layer", part) for part in layer.children()]  # without adapters
    if any(layer._parameters) or not all(isinstance(part, nn.Linear | nn.Conv1d) for part in parts):
        return sys.maxsize
    return max(part.dilation[0] * (part.kernel_size[0] - 1) for part in parts if isinstance(part, nn.Conv1d))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: Tensor, places: Tensor, once: bool) -> Tensor:
        ctx.slots, ctx.places, ctx.once = slots, places, once
        return values.index_select(0, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.once:  # padding has no gradient
            return gradient.index_select(0, ctx.places), None, None, None
        shape, dtype = (len(ctx.places), *gradient.shape[1:]), torch.promote_types(gradient.dtype, torch.float32)
        whole = torch.zeros(shape, dtype=dtype, device=gradient.device)  # a shared token's gradients add up in fp32
        return whole.index_add_(0, ctx.slots, gradient.to(dtype)).to(gradient.dtype), None, None, None


@dataclass(frozen=True)
class StateRows:
    """The rows of a packed row of N tokens, in blocks (rows, columns) whose padding is less than half of them.
    `slots` (n,) int64: the packed token in each slot of each block; `places` (N,) int64: where each packed token is in
    the slots; `once`: no token is in two rows."""

    blocks: list[tuple[int, int]]
    slots: Tensor
    places: Tensor
    once: bool

    @classmethod
    def of(cls, rows: PackedRows, reach: int) -> StateRows:
        """For layers in which a token sees `reach` tokens before it: of a shared beginning, a row has as many."""
        sizes = {row: end - max(0, start - reach) for row, (start, end) in enumerate(rows.own) if start < end}
        groups: list[list[int]] = []
        for row in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if not groups or 2 * sizes[row] < sizes[groups[-1][0]]:
                groups.append([])
            groups[-1].append(row)
        width, device, blocks, parts, filled = rows.places.shape[1], rows.tokens.device, [], [], 0
        slot_of_column_0 = torch.zeros(len(rows.own), dtype=torch.int64)
        for group in groups:
            columns = torch.arange(sizes[group[0]]) + torch.tensor([[rows.own[row][1] - sizes[row]] for row in group])
            slot_of_column_0[group] = filled + torch.arange(len(group)) * columns.shape[1] - columns[:, 0]
            parts.append((columns.clamp_max(width - 1) + width * torch.tensor(group).unsqueeze(1)).flatten())
            blocks.append((len(group), columns.shape[1]))
            filled += columns.numel()
        slots = rows.places.flatten()[torch.cat(parts).to(device)]
        places = slot_of_column_0.to(device)[rows.tokens // width] + rows.positions
        return cls(blocks, slots, places, rows.seen is None)

    def around(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`forward` of a layer, whose arguments (1, N, ...) and output it gets and gives in rows."""
        sizes = [rows * columns for rows, columns in self.blocks]

        def in_rows(value: Any) -> list[Any]:
            if not isinstance(value, Tensor) or value.shape[:2] != (1, len(self.places)):
                return [value] * len(sizes)
            parts = _Gather.apply(value[0], self.slots, self.places, self.once).split(sizes)
            return [part.unflatten(0, block) for part, block in zip(parts, self.blocks, strict=True)]

        def run(*values: Any, **options: Any) -> Tensor:
            by_block = zip(*map(in_rows, (*values, *options.values())), strict=True)
            found = [forward(*given[: len(values)], **dict(zip(options, given[len(values) :], strict=True)))
                     for given in by_block]  # fmt: skip
            return torch.cat([part.flatten(0, 1) for part in found]).index_select(0, self.places).unsqueeze(0)

        return run
