"""The rows of a forward pass as the host lays them out: where the tokens are whose states are read,
and which rows lie end to end.

A GPU's rows have to be read for that, and the host waits for them. `StepPasses` reads all
micro-batches of a step at once, and lays them out before the first pass, so that no later one
waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dschat_ppo.models.backbone import Layout
from dschat_ppo.models.given_embeddings import GivenEmbeddings, compared_keys
from dschat_ppo.models.micro_batches import PackedLayout, in_one_copy, lay_out


@dataclass(frozen=True)
class PassRows:
    """Right-padded rows of one forward pass, the tokens in them that are read, and how they run."""

    input_ids: Tensor  # (B, T) int64
    lengths: Tensor  # (B,) int64, above 0
    # int64 of any shape, where the read tokens are in the rows, flattened to (B x T)
    slots: Tensor
    packed: PackedLayout | None  # None: the rows stay padded
    # (n,) int64, where the read tokens are in the packed row, each once, in any order; None where
    # rows stay padded or all tokens run the last MLP
    read_offsets: Tensor | None
    # in place of the embeddings of some ids, on the device of the pass; None: of no id
    given: GivenEmbeddings | None = None

    @staticmethod
    def of(
        input_ids: Tensor,
        lengths: Tensor,
        slots: Tensor,
        layout: Layout,
        given: GivenEmbeddings | None = None,
    ) -> PassRows:
        """Lay rows out as `layout` allows, and leave the result where the rows are; other fields as
        those of the class. Unless all rows stay padded, the host reads those of a GPU."""
        device = input_ids.device
        keys = compared_keys(input_ids, given)
        if layout.packed or layout.shares:
            input_ids, lengths, slots, keys = in_one_copy(
                [input_ids, lengths, slots, keys], torch.device("cpu")
            )
        packed = lay_out(keys, lengths, layout.packed, layout.shares)
        read_offsets = None
        if packed is not None and layout.reads_few and slots.dim() == 1:
            read_offsets = packed.offsets.flatten()[slots]
            if packed.segments.seen is not None:  # several rows may share a token
                read_offsets = read_offsets.unique()
        rows = PassRows(input_ids, lengths, slots, packed, read_offsets).to(device)
        return replace(rows, given=given)

    @staticmethod
    def of_targets(
        input_ids: Tensor,
        target_mask: Tensor,
        layout: Layout,
        given: GivenEmbeddings | None = None,
    ) -> PassRows:
        """Rows (B, T) whose read tokens are those before the N targets, row after row: where
        `target_mask` (B, T) is True, but for the first column."""
        row, column = target_mask[:, 1:].nonzero(as_tuple=True)  # (N,) each
        slots = row * input_ids.shape[1] + column
        return PassRows.of(input_ids, lengths_read(target_mask), slots, layout, given)

    def to(self, device: torch.device) -> PassRows:
        """The same rows on `device`, copied at once, with what its attention needs of the
        segments."""
        if device == self.input_ids.device:
            return self
        tensors = [self.input_ids, self.lengths, self.slots]
        if self.packed is None:
            input_ids, lengths, slots = in_one_copy(tensors, device)
            return PassRows(input_ids, lengths, slots, None, None)
        tensors += [self.packed.slots, self.packed.positions, self.packed.offsets]
        if self.read_offsets is not None:
            tensors.append(self.read_offsets)
        input_ids, lengths, slots, packed_slots, positions, offsets, *of_read = in_one_copy(
            tensors, device
        )
        read_offsets = None
        if of_read:
            [read_offsets] = of_read
        self.packed.segments.varlen(device)
        packed = PackedLayout(packed_slots, positions, offsets, self.packed.segments)
        return PassRows(input_ids, lengths, slots, packed, read_offsets)


def lengths_read(target_mask: Tensor) -> Tensor:
    """(B,) int64: the tokens of each row up to the one whose state predicts the last target, at
    least 1. `target_mask`: (B, T) bool."""
    columns = torch.arange(target_mask.shape[1], device=target_mask.device)
    return torch.where(target_mask, columns, 0).amax(dim=1).clamp_min(1)
