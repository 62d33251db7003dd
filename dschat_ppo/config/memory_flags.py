"""Flags that trade time for memory, of long sequences, and of the attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dschat_ppo.config.schema import flag, positive, refuse, require


@dataclass(frozen=True)
class MemoryFlags:
    """Memory, division of sequences, and attention."""

    # fmt: off
    offload_optimizer: bool = flag(False,
        "keep optimizer states and fp32 weights in host memory and update them on the CPU; parameters stay on the "
        "device (needs ZeRO stage 1, 2 or 3; --offload moves the parameters of stage 3 too)")
    offload_activations: bool = flag(False,
        "keep in host memory the activations that the backward pass needs; with gradient checkpointing, these are the "
        "inputs of the layers (no effect on a CPU)")
    attn_implementation: Literal["auto", "sdpa", "eager"] = flag("auto",
        "attention of scoring and training, in all models; generation has its own. auto: PyTorch's scaled dot product "
        "attention, for packed rows on a GPU its variable-length FlashAttention, and for bf16 on a CPU blocks of "
        "logits; eager: products and a softmax")
    sequence_parallel_size: int = positive(1,
        "number of neighbouring ranks that divide each sequence in scoring and training (Ulysses). They share their "
        "rows, so a batch size per device counts for all of them together. The number of ranks and that of the model's "
        "attention heads must be multiples of it; 1 = off")
    zero_hpz_partition_size: int = positive(1,
        "ZeRO++: number of ranks, usually those of one machine, that together hold a second copy of the weights for "
        "the backward pass; 1 = off (needs ZeRO stage 3)")
    # fmt: on


def possible_sizes(ranks: int, heads: int | None = None) -> str:
    """The values of `--sequence_parallel_size` that divide both numbers, as text; `heads` None: not known yet."""
    sizes = [str(size) for size in range(1, ranks + 1) if ranks % size == 0 and (heads is None or heads % size == 0)]
    return " or ".join(filter(None, [", ".join(sizes[:-1]), sizes[-1]]))


def check_sequence_parallel_size(flags: MemoryFlags, ranks: int) -> None:
    """Check that groups of `--sequence_parallel_size` ranks make up all `ranks`."""
    size = flags.sequence_parallel_size
    require(
        ranks % size == 0,
        f"--sequence_parallel_size {size} does not divide the {ranks} ranks of this run; use {possible_sizes(ranks)}",
    )


@dataclass(frozen=True)
class PPOMemoryFlags:
    """Memory of step 3."""

    # fmt: off
    sleep_in_rollout: bool = flag(False,
        "while generating, move to host memory what generation does not need: optimizer states, fp32 weights and "
        "gradient buffers of actor and critic, and the weights of critic, reference and reward model")
    inference_tp_size: int = positive(1,
        "number of ranks that generate together, each with a part of every decoder layer (tensor parallelism), for an "
        "actor that does not fit on one device; 1 = off")
    tp_gather_partition_size: int = positive(8,
        "decoder layers that --inference_tp_size gathers at a time to divide them")
    enable_mixed_precision_lora: bool = flag(False,
        "hold the actor's frozen weights under LoRA in 8 bits (ZeRO++; needs --actor_zero_stage 3, --actor_lora_dim, "
        "--dtype fp16 and a GPU)")
    # fmt: on


def check_memory(flags: MemoryFlags, stages: Mapping[str, int]) -> None:
    """Check that an engine of a step can use its memory flags; `stages`: flag of a model that trains -> ZeRO stage."""
    names, some = " and ".join(stages), " or ".join(stages)
    refuse({
        f"--offload_optimizer needs {names} 1, 2 or 3: stage 0 keeps everything on the device":
            flags.offload_optimizer and min(stages.values()) == 0,
        f"--zero_hpz_partition_size (ZeRO++) needs {some} 3: the other stages do not partition weights":
            flags.zero_hpz_partition_size > 1 and 3 not in stages.values(),
    })  # fmt: skip
