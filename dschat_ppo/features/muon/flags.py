"""`--muon_learning_rate`, of all steps."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.feature_flags import FlagNotes
from dschat_ppo.config.schema import share


@dataclass(frozen=True)
class MuonFlags:
    """Muon."""

    muon_learning_rate: float | None = share(
        None,
        "peak learning rate of the matrices under --optimizer muon, at most 1. Muon's update of an"
        " n x n matrix is as large as AdamW's at a rate of about 0.2 sqrt(n) times AdamW's",
    )


FLAGS = {"sft": MuonFlags, "reward": MuonFlags, "ppo": MuonFlags}
NOTES = FlagNotes(
    their_names={"muon_learning_rate": "muon_lr"},
    choices={
        "optimizer": {
            "muon": (
                "trains the matrices of the decoder layers with Muon, and embeddings, heads, norms"
                " and biases with AdamW; without LoRA, offload and fp16, at ZeRO stage 0, in bf16"
                " also at stage 1"
            )
        }
    },
)
