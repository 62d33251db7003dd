"""`--inference_tp_size`, of step 3."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.config.feature_flags import FlagNotes, SmallerRollout
from dschat_ppo.config.schema import positive


@dataclass(frozen=True)
class TensorParallelFlags:
    """Tensor parallelism of generation."""

    inference_tp_size: int = positive(
        1,
        "number of ranks that generate together, each with a part of every decoder layer (tensor"
        " parallelism), for an actor that does not fit on one device; 1 = off",
    )
    tp_gather_partition_size: int = positive(
        8, "decoder layers that --inference_tp_size gathers at a time to divide them"
    )


FLAGS = {"ppo": TensorParallelFlags}
NOTES = FlagNotes(
    their_names={"inference_tp_size": "vllm_tensor_parallel_size"},
    harmless=("inference_tp_size", "tp_gather_partition_size"),
    smaller_rollout=SmallerRollout("--inference_tp_size with several GPUs"),
)
