"""`--sequence_parallel_size`, of all steps."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.feature_flags import FlagNotes
from dschat_ppo.config.schema import positive


@dataclass(frozen=True)
class SequenceParallelFlags:
    """Sequence parallelism."""

    sequence_parallel_size: int = positive(
        1,
        "number of neighbouring ranks that divide each sequence in scoring and training (Ulysses)."
        " They share their rows, so a batch size per device counts for all of them together. The"
        " number of ranks and that of the model's attention heads must be multiples of it; 1 = off",
    )


FLAGS = dict.fromkeys(("sft", "reward", "ppo"), SequenceParallelFlags)
NOTES = FlagNotes(
    their_names={"sequence_parallel_size": "ring_attn_size"},
    harmless=("sequence_parallel_size",),
)
