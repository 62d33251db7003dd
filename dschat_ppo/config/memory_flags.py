"""Flags that trade time for memory, and of long sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dschat_ppo.config.algorithm_flags import AlgorithmFlags
from dschat_ppo.config.schema import flag, require, require_positive


@dataclass(frozen=True)
class MemoryFlags:
    """Where tensors are kept, and how a sequence is divided."""

    _argument_group_name: ClassVar[str] = "memory"

    offload_optimizer: bool = flag("keep optimizer states in host memory, but not parameters (see --offload)", False)
    offload_activations: bool = flag(
        "keep activations that the backward pass needs in host memory; with gradient checkpointing, the layers' inputs "
        "(no effect on a CPU)",
        False,
    )
    tiled_mlp: bool = flag(
        "run the MLP of each layer over pieces of the sequence and compute each piece again in the backward pass; "
        "mixtures of experts run whole",
        False,
    )
    sequence_parallel_size: int = flag(
        "divide each sequence over this many neighbouring ranks in scoring and training (Ulysses). They share their "
        "rows, so a batch size per device is one per such group of ranks. It divides the number of ranks and the "
        "model's number of attention heads; 1 = off",
        1,
    )
    zero_hpz_partition_size: int = flag(
        "ZeRO++: ranks that hold a secondary copy of the weights together, usually those of one node; 1 = off (ZeRO-3)",
        1,
    )
    zero_quantized_weights: bool = flag("ZeRO++: gather weights in 8 bits (ZeRO-3, GPU)", False)
    zero_quantized_gradients: bool = flag("ZeRO++: reduce gradients in 4 bits (ZeRO-3, GPU)", False)

    def __post_init__(self) -> None:
        require_positive(self, "sequence_parallel_size zero_hpz_partition_size")


def possible_sizes(ranks: int, heads: int | None = None) -> str:
    """The values of `--sequence_parallel_size` that divide both numbers, as text; `heads` None: not known yet."""
    sizes = [str(size) for size in range(1, ranks + 1) if ranks % size == 0 and (heads is None or heads % size == 0)]
    return " or ".join(filter(None, [", ".join(sizes[:-1]), sizes[-1]]))


def check_sequence_parallel_size(flags: MemoryFlags, ranks: int) -> None:
    """Check that groups of `--sequence_parallel_size` ranks make up all `ranks`.

    Raises:
        UserError: they do not.
    """
    size = flags.sequence_parallel_size
    require(
        ranks % size == 0,
        f"--sequence_parallel_size {size} does not divide the {ranks} ranks of this run; use {possible_sizes(ranks)}",
    )


def check_divided_losses(flags: MemoryFlags, algorithm: AlgorithmFlags) -> None:
    """Check that the losses of step 3 can be computed from divided rows.

    Raises:
        UserError: one needs whole distributions, or all tokens of a layer at once.
    """
    size = flags.sequence_parallel_size
    require(
        size == 1 or algorithm.router_loss_coef == 0,
        f"--sequence_parallel_size {size}: the router loss is a product of means over all tokens, which a part of the "
        "columns does not have; set --router_loss_coef 0",
    )
    full = [flag for flag in ("kl_estimator", "kl_loss_estimator") if getattr(algorithm, flag) == "full"]
    require(
        size == 1 or not full,
        f"--sequence_parallel_size {size}: --{' and --'.join(full)} full would gather the distributions of all tokens "
        "on every rank; use k3",
    )


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
