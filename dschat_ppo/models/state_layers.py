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
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CACHES = ("cache_params", "past_key_values")  # names of the argument


def state_layers(backbone: nn.Module) -> list[nn.Module]:
    """The modules that mix tokens through a state, by the causal convolution that they begin
    with."""

    def has_convolution(module: nn.Module) -> bool:
        return any(isinstance(child, nn.Conv1d) for child in module.children())

    return [module for module in backbone.modules() if has_convolution(module)]


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
        columns = new
        if self.conv is not None:
            columns = torch.cat([self.conv, new], dim=-1)
        missing = max(0, conv_kernel_size - columns.shape[-1])
        self.conv = nn.functional.pad(columns, (missing, 0))[..., -conv_kernel_size:]
        return columns

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.recurrent = new
        return new


@dataclass(frozen=True)
class Block:
    """Rows of a layer with a state. `slots` (rows, columns) int64: the packed token in each.
    `after` (rows,) int64: the index of the beginning that each row follows; the number of all
    beginnings if it follows none."""

    slots: Tensor
    after: Tensor


class _RowSpan(NamedTuple):
    """A row of a block: packed tokens `start` to `end`, and what `Block.after` holds for it."""

    start: int
    end: int
    after: int

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class StateRows:
    """The rows of a packed row of N tokens: blocks of beginnings of one length each, and blocks of
    other rows, whose padding is less than half of them. `offsets` (N,) int64: where each packed
    token is in the slots of all blocks."""

    beginnings: list[Block]
    rows: list[Block]
    offsets: Tensor

    @classmethod
    def of(
        cls, lengths: list[int], seen: list[tuple[int, int]] | None, device: torch.device
    ) -> StateRows:
        """Lay out the segments of a packed row, whose `lengths` and `seen` are as in `Segments`."""
        beginnings, rows = _row_spans(lengths, seen)
        beginning_blocks = [
            list(spans) for _, spans in groupby(beginnings, lambda span: span.length)
        ]
        row_blocks: list[list[_RowSpan]] = []
        for span in sorted(rows, key=lambda span: -span.length):
            if not row_blocks or 2 * span.length < row_blocks[-1][0].length:
                row_blocks.append([])
            row_blocks[-1].append(span)
        blocks = []
        filled = 0
        offsets = torch.empty(sum(lengths), dtype=torch.int64)
        for spans in [*beginning_blocks, *row_blocks]:
            # a row of one token would be a step of generation
            columns = max(2, spans[0].length)
            for span in spans:
                offsets[span.start : span.end] = torch.arange(filled, filled + span.length)
                filled += columns
            starts = torch.tensor([[span.start] for span in spans])
            # padding may read any token
            slots = (starts + torch.arange(columns)).clamp_max(len(offsets) - 1)
            after = torch.tensor([span.after for span in spans])
            blocks.append(Block(slots.to(device), after.to(device)))
        count = len(beginning_blocks)
        return cls(blocks[:count], blocks[count:], offsets.to(device))

    def around(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`forward` of a layer, whose arguments (1, N, ...) and output it gets and gives in
        rows."""

        def run_block(
            block: Block, states: States | None, arguments: Any, options: dict[str, Any]
        ) -> Tensor:
            """The layer's output (rows x columns, ...) for a block, with `states` as its cache."""

            def in_rows(argument: Any) -> Any:
                """(1, N, ...) -> (rows, columns, ...); anything else as it is."""
                is_tensor = isinstance(argument, Tensor)
                if not is_tensor or argument.shape[:2] != (1, len(self.offsets)):
                    return argument
                rows = argument[0].index_select(0, block.slots.flatten())
                return rows.unflatten(0, block.slots.shape)

            block_options = {}
            for name, option in options.items():
                if name in CACHES:
                    block_options[name] = states
                else:
                    block_options[name] = in_rows(option)
            return forward(*map(in_rows, arguments), **block_options).flatten(0, 1)

        def run(*arguments: Any, **options: Any) -> Tensor:
            """The layer's output (1, N, ...)."""
            end_states = [States() for _ in self.beginnings]
            outputs = [
                run_block(block, states, arguments, options)
                for block, states in zip(self.beginnings, end_states, strict=True)
            ]
            conv = _end_states([states.conv for states in end_states])
            recurrent = _end_states([states.recurrent for states in end_states])
            for block in self.rows:
                start_states = None
                if end_states:
                    start_states = States(
                        _states_at(conv, block.after), _states_at(recurrent, block.after)
                    )
                outputs.append(run_block(block, start_states, arguments, options))
            return torch.cat(outputs).index_select(0, self.offsets).unsqueeze(0)

        return run


def _row_spans(
    lengths: list[int], seen: list[tuple[int, int]] | None
) -> tuple[list[_RowSpan], list[_RowSpan]]:
    """The beginnings that segments share, shortest first, and the rows that are left."""
    shared = set()
    for start, end in seen or []:
        if start < end:
            shared.add((start, end))
    ordered = sorted(shared, key=lambda span: span[1] - span[0])
    index_of = {span: index for index, span in enumerate(ordered)}
    none = len(ordered)
    end_of = dict(ordered)  # by the column where a beginning starts, as the segment that holds it
    rows = []
    start = 0
    for segment, length in enumerate(lengths):
        end = start + length
        followed = (0, 0)
        if seen is not None:
            followed = seen[segment]
        row_start = end_of.get(start, start)
        if row_start > start:
            followed = (start, row_start)
        if row_start < end:
            rows.append(_RowSpan(row_start, end, index_of.get(followed, none)))
        start = end
    return [_RowSpan(start, end, none) for start, end in ordered], rows


def _end_states(states: list[Tensor | None]) -> Tensor | None:
    """States after all beginnings, and last those of no tokens; None if the layer has none."""
    known = [state for state in states if state is not None]
    if known:
        return torch.cat([*known, torch.zeros_like(known[0][:1])])
    return None


def _states_at(states: Tensor | None, rows: Tensor) -> Tensor | None:
    """The states of some rows; None if the layer has none."""
    if states is None:
        return None
    return states.index_select(0, rows)
