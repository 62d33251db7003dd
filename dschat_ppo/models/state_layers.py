"""Layers that carry a state from token to token (a short convolution, Mamba, a gated delta rule),
in packed rows.

Such a layer starts from no state at the first column that it sees, and passes over the ends of
segments. So the packed row is laid out in rows again for it alone, padded on the right, which no
token sees. The layer's own forward runs there, and each token's output goes back to its place;
attention, MLPs, norms and heads run the packed row. Kernels that work in chunks then begin them
where they begin in padded rows.

Beginnings that rows share come first. What follows one starts from the states at its end, which the
layer gives to an object in place of transformers' cache: that one copies them, this one keeps their
gradients. Chunks then begin at the end of the beginning, which changes the last bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn

CACHES = ("cache_params", "past_key_values")  # names of the argument


def state_layers(backbone: nn.Module) -> list[nn.Module]:
    """The modules that mix tokens through a state, by the causal convolution that they begin
    with."""
    return [
        part
        for part in backbone.modules()
        if any(isinstance(child, nn.Conv1d) for child in part.children())
    ]


def can_go_on(layer: nn.Module) -> bool:
    """Whether the layer's code starts several tokens from a recurrent state. The first Mamba's does
    not; where a state matters little, no comparison of numbers would tell."""
    code = inspect.getsource(type(layer).forward)
    return "get_recurrent_state" not in code or "initial_state" in code


@dataclass
class States:
    """The convolution's and the recurrent state of a layer for each row, as its forward asks a
    cache for them."""

    conv: Tensor | None = None
    recurrent: Tensor | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0
    ) -> Tensor:
        if self.conv is None:
            whole = new
        else:
            whole = torch.cat([self.conv, new], dim=-1)
        self.conv = nn.functional.pad(whole, (max(0, conv_kernel_size - whole.shape[-1]), 0))[
            ..., -conv_kernel_size:
        ]
        return whole

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.recurrent = new
        return new


@dataclass(frozen=True)
class Block:
    """Rows of a layer with a state. `slots` (rows, columns) int64: the packed token in each.
    `after` (rows,) int64: the number of the beginning that each follows; that of all beginnings if
    none."""

    slots: Tensor
    after: Tensor


@dataclass(frozen=True)
class StateRows:
    """The rows of a packed row of N tokens: blocks of beginnings of one length each, and blocks of
    other rows, whose padding is less than half of them. `places` (N,) int64: where each packed
    token is in the slots of all blocks."""

    beginnings: list[Block]
    rows: list[Block]
    places: Tensor

    @classmethod
    def of(
        cls, lengths: list[int], seen: list[tuple[int, int]] | None, device: torch.device
    ) -> StateRows:
        """Of the segments of a packed row, as in `PackedRows`."""
        shared = sorted(
            {span for span in seen or [] if span[0] < span[1]}, key=lambda span: span[1] - span[0]
        )
        numbers = {span: number for number, span in enumerate(shared)}
        held = {span[0]: span for span in shared}  # by the segment that begins with it
        rows = []  # (start, end, after)
        for end, length, before in zip(
            accumulate(lengths), lengths, seen or [(0, 0)] * len(lengths), strict=True
        ):
            start, end_of_shared = held.get(end - length, (end - length, end - length))
            if start < end_of_shared:
                before = (start, end_of_shared)
            if end_of_shared < end:
                rows.append((end_of_shared, end, numbers.get(before, len(shared))))
        groups: list[list[tuple[int, int, int]]] = []
        for row in sorted(rows, key=lambda row: row[0] - row[1]):  # longest first
            if not groups or 2 * (row[1] - row[0]) < groups[-1][0][1] - groups[-1][0][0]:
                groups.append([])
            groups[-1].append(row)
        equal = [
            [(*span, len(shared)) for span in spans]
            for _, spans in groupby(shared, lambda span: span[1] - span[0])
        ]
        blocks = []
        filled = 0
        places = torch.empty(sum(lengths), dtype=torch.int64)
        for block in [*equal, *groups]:
            # a row of one token would be a step of generation
            columns = max(2, block[0][1] - block[0][0])
            for start, end, _ in block:
                places[start:end] = torch.arange(filled, filled + end - start)
                filled += columns
            slots = torch.tensor([[start] for start, _, _ in block]) + torch.arange(columns)
            after = torch.tensor([number for _, _, number in block])
            blocks.append(Block(slots.clamp_max(len(places) - 1).to(device), after.to(device)))
        return cls(blocks[: len(equal)], blocks[len(equal) :], places.to(device))

    def around(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`forward` of a layer, whose arguments (1, N, ...) and output it gets and gives in
        rows."""

        def run_block(
            block: Block, states: States | None, values: Any, options: dict[str, Any]
        ) -> Tensor:
            def in_rows(value: Any) -> Any:
                if not isinstance(value, Tensor) or value.shape[:2] != (1, len(self.places)):
                    return value
                return (
                    value[0].index_select(0, block.slots.flatten()).unflatten(0, block.slots.shape)
                )

            given = {
                name: states if name in CACHES else in_rows(value)
                for name, value in options.items()
            }
            return forward(*map(in_rows, values), **given).flatten(0, 1)

        def run(*values: Any, **options: Any) -> Tensor:
            ends = [States() for _ in self.beginnings]
            found = [
                run_block(*each, values, options)
                for each in zip(self.beginnings, ends, strict=True)
            ]
            conv, recurrent = (
                _with_none([getattr(states, name) for states in ends])
                for name in ("conv", "recurrent")
            )
            for block in self.rows:
                starts = (
                    None if part is None else part.index_select(0, block.after)
                    for part in (conv, recurrent)
                )
                found.append(run_block(block, States(*starts) if ends else None, values, options))
            return torch.cat(found).index_select(0, self.places).unsqueeze(0)

        return run


def _with_none(states: list[Tensor | None]) -> Tensor | None:
    """States after all beginnings, and last those of no tokens; None if the layer has none."""
    known = [part for part in states if part is not None]
    if known:
        return torch.cat([*known, torch.zeros_like(known[0][:1])])
    return None
