"""Bytes that a model of a run needs on one rank, for each thing that it holds.

Notation: P parameters, T of them train, N ranks, s bytes of a number of the run's dtype. Sources:
DeepSpeed's `bf16_optimizer.py`, `stage_1_and_2.py` and `stage3.py`; Rajbhandari et al. 2020 (ZeRO,
section 3) for the idea.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dschat_ppo.algorithms.fused_logprobs import BLOCK_BYTES, GPU_BLOCK_BYTES
from dschat_ppo.engine.ds_config import BUCKET_SIZE
from dschat_ppo.engine.optimizers import ADAMW, OptimizerKind
from dschat_ppo.planner.model_parts import ModelSizes
from dschat_ppo.rollout.cache_memory import (
    LOGITS_BYTES,
    LOGITS_SHARE,
    MAX_ROWS,
    MAX_ROWS_GPU,
    MEMORY_SHARE,
)

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
FP32 = 4  # bytes
# bytes of the fp32 weight and of the two moments of AdamW, for each parameter
MASTER = FP32
MOMENTS = 2 * FP32
# ZeRO-3 prefetches and keeps gathered at most so many numbers (DeepSpeed's defaults for
# stage3_max_live_parameters).
LIVE_NUMBERS = 1_000_000_000
# DeepSpeed's default of reduce_bucket_size, which a run on a CPU has. Below ZeRO-2 DeepSpeed
# reduces so many numbers at once, whatever the size of the bucket. It copies them side by side if
# they are in several tensors.
CPU_BUCKET = 500_000_000
SUMMED_TOGETHER = CPU_BUCKET
PARTS = ("weights", "gradients", "optimizer", "activations", "KV cache", "logits", "buffers")
# (one of `PARTS`, bytes, whether they are in host memory)
RoleBytes = tuple[str, float, bool]


@dataclass(frozen=True)
class Role:
    """A model of a run, and how its engine holds it."""

    name: str  # such as "actor"
    sizes: ModelSizes  # without what another role has; `trained` is 0 if it has no optimizer
    dtype: str  # "bf16", "fp16" or "fp32"
    ranks: int  # over which ZeRO divides
    stage: int  # of ZeRO, as it runs (`engine/ds_config.py`): in bf16 and fp16 not 0
    checkpoints: bool = False  # gradient checkpointing
    offloads_optimizer: bool = False  # optimizer states are in host memory
    offloads_weights: bool = False  # at stage 3, weights are in host memory
    # at stage 3, gathered weights stay between two updates (`engine/build_engine.py`)
    kept_whole: bool = False
    on_gpu: bool = False  # the device is a GPU
    optimizer: OptimizerKind = ADAMW
    saved_itemsize: int = 0  # bytes of a number of the saved model
    bits: int = 0  # of the quantised weights under LoRA (QLoRA); 0: not quantised

    @property
    def itemsize(self) -> int:
        """Bytes of a number, s."""
        return ITEMSIZE[self.dtype]

    @property
    def shard(self) -> int:
        """Trained parameters whose optimizer states this rank holds: T / N from stage 1 on, else
        T."""
        if self.stage > 0:
            return -(-self.sizes.trained // self.ranks)
        return self.sizes.trained

    @property
    def summed(self) -> int:
        """Bytes of a gradient that is summed over micro-batches."""
        if self.dtype == "fp16":
            return self.itemsize
        return FP32

    @property
    def sums_at_once(self) -> bool:
        """Whether each gradient of autograd is added to fp32 sums as soon as it is there, and
        dropped."""
        return self.stage == 1 and self.dtype == "bf16" and not self.offloads_optimizer

    @property
    def bucket(self) -> int:
        """Bytes of a bucket of gradients: no more than there are to reduce."""
        numbers_in_bucket = CPU_BUCKET
        if self.on_gpu:
            numbers_in_bucket = BUCKET_SIZE
        return self.itemsize * min(numbers_in_bucket, self.sizes.trained)

    @property
    def gathered(self) -> int:
        """Bytes of the weights that a pass at stage 3 gathers at a time: the running layer, the
        next ones up to `LIVE_NUMBERS`. s x min(P, 10^9); the largest weight, of the embedding or
        the head, fits in that for most models."""
        has_all_weights = self.ranks == 1 and not self.offloads_weights
        if self.stage < 3 or self.kept_whole or has_all_weights:
            return 0
        return self.itemsize * min(self.sizes.total, LIVE_NUMBERS)


def steady_bytes(role: Role) -> Iterator[RoleBytes]:
    """What a model holds between two updates."""
    sizes = role.sizes
    ranks = role.ranks
    # s P, less where QLoRA quantises some; at stage 3 s P / N, and whole ones too if several ranks
    # keep them
    whole_weights: float = role.itemsize * sizes.total
    if role.bits:
        whole_weights -= sizes.adapted * (role.itemsize - role.bits / 8)
    weights = whole_weights
    if role.stage == 3:
        weights = whole_weights / ranks
    yield "weights", weights, role.offloads_weights
    gathered_weights: float = 0
    if role.kept_whole and ranks > 1:
        gathered_weights = whole_weights
    yield "weights", gathered_weights, False
    yield from _optimizer_bytes(role)
    if role.stage == 3:  # this rank's shard, and the bucket
        yield "gradients", role.summed * role.shard, role.offloads_optimizer
        yield "buffers", role.bucket, False
    elif role.sums_at_once:
        yield "gradients", FP32 * sizes.trained, False


def _optimizer_bytes(role: Role) -> Iterator[RoleBytes]:
    """The states of a model's optimizer, and what an update on the host needs besides."""
    sizes = role.sizes
    # (4 + 8) T / N, and less for each parameter of which another optimizer than AdamW has fewer
    # states; in fp32 at stage 0 the weights are the fp32 weights
    bytes_per_parameter = MOMENTS
    shards = 1
    if role.stage > 0:
        bytes_per_parameter += MASTER
        shards = role.ranks
    states = role.shard * bytes_per_parameter
    fewer_states = len(ADAMW.state_names) - len(role.optimizer.state_names)
    states -= fewer_states * FP32 * sizes.taken.get(role.optimizer.name, 0) // shards
    yield "optimizer", states, role.offloads_optimizer
    if role.offloads_optimizer:
        yield "optimizer", FP32 * role.shard, True  # gradients in fp32
        if role.stage < 3:
            # and new weights to send back, and two buffers of the largest parameter, one on the
            # device
            largest = FP32 * min(sizes.largest, sizes.trained)
            yield "optimizer", role.itemsize * role.shard + largest, True
            yield "optimizer", largest, False


def accumulated_gradients(role: Role) -> int:
    """Bytes of gradients that stay from one micro-batch of an update to the next, beyond
    `steady_bytes`: at stages 0 and 1 4 T, and at stage 2 this rank's shard, 4 T / N, which an
    offloaded optimizer has in host memory (fp16: 2 for 4)."""
    if role.stage == 3 or role.sums_at_once or role.stage == 2 and role.offloads_optimizer:
        return 0
    if role.stage == 2:
        return role.summed * role.shard
    return role.summed * role.sizes.trained


def update_gradients(role: Role) -> int:
    """Bytes of gradients that an update needs at the end of backward, beyond `steady_bytes`. Stage
    3: those of the running layers until they are in the bucket. Else those of autograd, s T (at
    stage 2 until a bucket of them is reduced), the bucket, and this rank's sums in fp32, 4 T / N,
    unless they are offloaded."""
    trained = role.sizes.trained
    if role.stage == 3:
        return role.bucket
    # of one parameter in bf16 and in fp32, or with several ranks a copy of the sums
    if role.sums_at_once:
        is_copied = role.ranks > 1 and trained <= SUMMED_TOGETHER
        if is_copied:
            return FP32 * trained
        return (role.itemsize + FP32) * min(role.sizes.largest, trained)
    of_autograd = role.itemsize * trained
    if role.stage == 2:
        of_autograd = role.bucket
    if role.stage == 0:
        if role.ranks == 1:
            return of_autograd
        return of_autograd + role.bucket
    if role.offloads_optimizer:
        return of_autograd + role.bucket
    return of_autograd + role.bucket + FP32 * role.shard


def activations(role: Role, tokens: int, on_host: bool = False) -> Iterator[RoleBytes]:
    """What the backward pass of a micro-batch needs: bytes per token (`SavedActivations`) x tokens.
    With gradient checkpointing: the inputs of the layers, and the whole of the layer that runs
    again. `on_host`: a GPU has those of one layer at a time."""
    saved = role.sizes.saved
    on_host = on_host and role.on_gpu
    if role.checkpoints:
        per_token = len(saved.layers) * saved.layer_input + saved.rest
    else:
        per_token = saved.whole
    yield "activations", per_token * tokens, on_host
    layers_at_once = 0
    if role.checkpoints:  # the layer that runs again
        layers_at_once += 1
    if on_host:  # the layer that is on the GPU
        layers_at_once += 1
    yield "activations", saved.layer * tokens * layers_at_once, False


def fused_head_bytes(role: Role, tokens: int) -> int:
    """Bytes of up to three blocks of fp32 logits of the fused head
    (`algorithms/fused_logprobs.py`)."""
    block = BLOCK_BYTES
    if role.on_gpu:
        block = GPU_BLOCK_BYTES
    return 3 * min(block, FP32 * tokens * role.sizes.vocabulary)


def running_rows(role: Role, rows: int, length: int, rollout_rows: int, free: int) -> int:
    """Sequences that are decoded at a time, at least 1, as `rollout/cache_memory.py` chooses them.

    Args:
        role: the actor.
        rows: sequences of a rollout on this rank.
        length: most tokens of one.
        rollout_rows: `--rollout_rows`; 0: as many as memory allows.
        free: bytes of the device that everything else leaves.
    """
    cache_per_row = max(1, role.sizes.cache_bytes(length))
    free = max(0, free)
    if not role.on_gpu:
        limit = rollout_rows or min(MAX_ROWS, int(MEMORY_SHARE * free / cache_per_row))
        return max(1, min(rows, limit))
    logits_per_row = LOGITS_BYTES * role.sizes.vocabulary
    limit = rollout_rows or min(MAX_ROWS_GPU, int(LOGITS_SHARE * free / logits_per_row))
    return max(1, min(rows, limit, free // (cache_per_row + logits_per_row)))
