"""How a model runs the rows that it gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """What a forward pass does with its rows: `select_kernels` finds out what fits a model, flags name the rest. Two
    models with the same weights and the same layout give the same bits.

    Attributes:
        fused: go through the vocabulary in blocks, instead of computing whole logits; of a language model.
        packed: run rows end to end as one row, without padding; a language model needs `fused` for it.
        shares: run the beginning that rows share once; likewise.
        reads_few: run the last MLP only for tokens whose states are read; likewise.
        divided: ranks share the rows (`--sequence_parallel_size`), and each runs its part of the columns.
        attention: the value of `--attn_implementation`.
    """

    fused: bool = True
    packed: bool = False
    shares: bool = False
    reads_few: bool = False
    divided: bool = False
    attention: str = "auto"
    offload_activations: bool = False
