"""Flags that trade time for memory, and of long sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dschat_ppo.config.schema import flag, require_positive


@dataclass(frozen=True)
class MemoryFlags:
    """Where tensors are kept, and how a sequence is divided."""

    _argument_group_name: ClassVar[str] = "memory"

    offload_optimizer: bool = flag("keep optimizer states in host memory, but not parameters (see --offload)", False)
    offload_activations: bool = flag(
        "keep activations that the backward pass needs in host memory; with gradient checkpointing, the layers' inputs",
        False,
    )
    tiled_mlp: bool = flag("run the MLP of each layer over pieces of the sequence, which saves its activations", False)
    sequence_parallel_size: int = flag(
        "divide each sequence over this many ranks in scoring and training (Ulysses); they then share their rows", 1
    )
    zero_hpz_partition_size: int = flag(
        "ZeRO++: ranks that hold a secondary copy of the weights together, usually those of one node; 1 = off (ZeRO-3)",
        1,
    )
    zero_quantized_weights: bool = flag("ZeRO++: gather weights in 8 bits (ZeRO-3, GPU)", False)
    zero_quantized_gradients: bool = flag("ZeRO++: reduce gradients in 4 bits (ZeRO-3, GPU)", False)

    def __post_init__(self) -> None:
        require_positive(self, "sequence_parallel_size zero_hpz_partition_size")


@dataclass(frozen=True)
class PPOMemoryFlags:
    """Memory of step 3."""

    _argument_group_name: ClassVar[str] = "memory of PPO"

    experience_on_host: bool = flag("keep the experience of a PPO step in host memory between its updates", False)
    sleep_in_rollout: bool = flag(
        "move optimizer states and fp32 weights of actor and critic to host memory while generating", False
    )
    inference_tp_size: int = flag("tensor-parallel size of generation", 1)
    tp_gather_partition_size: int = flag("number of layers gathered at a time for tensor-parallel generation", 8)
    enable_mixed_precision_lora: bool = flag(
        "quantise the frozen weights under LoRA to 8 bits when they are gathered (ZeRO++; ZeRO-3, GPU)", False
    )

    def __post_init__(self) -> None:
        require_positive(self, "inference_tp_size tp_gather_partition_size")
