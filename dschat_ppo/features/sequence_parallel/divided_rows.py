"""Rows that ranks share, each with a part of the columns, run by a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dschat_ppo.common.dist import ranks_of_row
from dschat_ppo.features.sequence_parallel.exchange import (
    columns_of_rank,
    exchanged,
    gathered_columns,
    heads_of_rank,
    rotary_of_whole_rows,
)
from dschat_ppo.models.backbone import position_arguments, real_slots
from dschat_ppo.models.micro_batches import Segments, are_uneven
from dschat_ppo.models.packing import ForwardPass
from dschat_ppo.models.pass_observers import observer_arguments, show_pass


@dataclass(frozen=True)
class HeadExchange:
    """Around attention, ranks exchange columns for heads (`AttentionExchange`)."""

    before = staticmethod(heads_of_rank)
    after = staticmethod(exchanged)


HEADS = HeadExchange()


@dataclass(frozen=True)
class DividedRows:
    """Rows that ranks share: how tensors (B, T) over their tokens are laid out, and divided by
    columns."""

    real: Tensor  # (B, T) bool: tokens whose states are read
    # of the packed row, to which all real tokens are laid end to end; None: not packed
    segments: Segments | None
    width: int  # columns of the rows as laid out; these are padded to a multiple of the ranks

    @classmethod
    def of(cls, input_ids: Tensor, lengths: Tensor, packed: bool) -> DividedRows:
        """Lay out right-padded `input_ids` (B, T) with `lengths` (B,): packed if asked for and rows
        differ."""
        real = real_slots(input_ids, lengths)
        if not (packed and are_uneven(lengths)):
            return cls(real, None, input_ids.shape[1])
        width = int(lengths.sum())
        segment_lengths = lengths.tolist()
        filler = -width % ranks_of_row()
        if filler:
            segment_lengths.append(filler)
        return cls(real, Segments(segment_lengths), width)

    def laid_out(self, values: Tensor) -> Tensor:
        """(B, T) -> (1, N) packed, or as it is."""
        if self.segments is None:
            return values
        return values[self.real].unsqueeze(0)

    def padded(self, values: Tensor) -> Tensor:
        """(B, T) -> (b, ranks x n), laid out, with added columns that hold 0 or False."""
        return torch.nn.functional.pad(self.laid_out(values), (0, -self.width % ranks_of_row()))

    def columns_of_rank(self, values: Tensor) -> Tensor:
        """(B, T) -> (b, n), laid out, this rank's columns."""
        return columns_of_rank(self.padded(values))

    def gathered(self, shard: Tensor) -> Tensor:
        """(b, n, ...) of this rank's columns -> (b, width, ...) of all, laid out. Collective."""
        return gathered_columns(shard)[:, : self.width]

    def run(self, model: Any, input_ids: Tensor, choice: str = "auto") -> Any:
        """The model's output for this rank's columns. A collective of the ranks that share the
        rows."""
        columns = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        all_positions = position_arguments(model, self.padded(columns))["position_ids"]
        divided = ForwardPass(model.config, self.segments, exchange=HEADS, choice=choice)
        with divided.running(), rotary_of_whole_rows(model, all_positions):
            output = model(
                input_ids=self.columns_of_rank(input_ids),
                attention_mask=None,
                use_cache=False,
                **position_arguments(model, self.columns_of_rank(columns)),
                **observer_arguments(),
            )
        show_pass(output, self.real, self.columns_of_rank)
        return output

    def values(self, shard: Tensor) -> Tensor:
        """(b, n) fp32 of this rank's tokens -> (B, T) of all, 0 outside packed rows. Collective as
        `run`."""
        values = self.gathered(shard)
        if self.segments is None:
            return values
        return values.new_zeros(self.real.shape).masked_scatter(self.real, values)
