"""What one model of a run needs on each rank, as formulas: weights, gradients, optimizer states, and its passes.

Notation: P parameters, T of them train, N ranks, s bytes of a number of the run's dtype. Sources: DeepSpeed's
`bf16_optimizer.py`, `stage_1_and_2.py` and `stage3.py`; Rajbhandari et al. 2020 (ZeRO, section 3) for the idea.
"""

from __future__ import annotations

from dataclasses import dataclass

from dschat_ppo.algorithms.fused_logprobs import BLOCK_BYTES, GPU_BLOCK_BYTES
from dschat_ppo.engine.ds_config import BUCKET_SIZE
from dschat_ppo.models.activation_memory import SMALLEST_ON_HOST
from dschat_ppo.planner.model_parts import ModelParts
from dschat_ppo.rollout.memory import LOGITS_BYTES, LOGITS_SHARE, MAX_ROWS, MAX_ROWS_GPU, MEMORY_SHARE

FP32 = 4  # bytes
MASTER, MOMENTS = FP32, 2 * FP32  # bytes of the fp32 weight and of the two moments of AdamW, for each parameter
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
# ZeRO-3 prefetches and keeps gathered at most so many numbers (DeepSpeed's defaults for stage3_max_live_parameters).
LIVE_NUMBERS = 1_000_000_000
# DeepSpeed's default of reduce_bucket_size and allgather_bucket_size, which a run on a CPU has.
CPU_BUCKET = 500_000_000
# Below ZeRO-2 DeepSpeed reduces so many numbers at once, whatever the size of the bucket. It copies them side by side
# if they are in several tensors: the sums of matrices are one, and those of vectors another, which is small.
SUMMED_TOGETHER = 500_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, on its device and in host memory."""

    device: int = 0
    host: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.device + other.device, self.host + other.host)

    @classmethod
    def of(cls, size: float, on_host: bool = False) -> Memory:
        """`size` bytes in one of the two places."""
        return cls(0, int(size)) if on_host else cls(int(size), 0)


@dataclass(frozen=True)
class Role:
    """A model of a run, and how its engine holds it."""

    name: str  # such as "actor"
    parts: ModelParts
    dtype: str  # "bf16", "fp16" or "fp32"
    ranks: int  # over which ZeRO divides
    stage: int  # of ZeRO, as it runs (`running_stage`)
    trains: bool  # has an optimizer
    checkpoints: bool = False  # gradient checkpointing
    offloads_optimizer: bool = False  # optimizer states are in host memory
    offloads_weights: bool = False  # at stage 3, weights are in host memory
    kept_whole: bool = False  # at stage 3, gathered weights stay between two updates (`engine/build_engine.py`)
    shared: int = 0  # parameters of another role's frozen base that it uses; they count there
    on_gpu: bool = False  # the device is a GPU
    bits: int = 0  # of the quantised weights under LoRA (QLoRA); 0: not quantised

    @property
    def itemsize(self) -> int:
        """Bytes of a number, s."""
        return ITEMSIZE[self.dtype]

    @property
    def own(self) -> int:
        """Parameters that this role holds itself, P."""
        return self.parts.total - self.shared

    @property
    def trained(self) -> int:
        """Parameters that train, T."""
        return self.parts.trained if self.trains else 0

    @property
    def part(self) -> int:
        """Trained parameters whose optimizer states this rank holds: T / N from stage 1 on, else T."""
        return -(-self.trained // self.ranks) if self.stage > 0 else self.trained

    @property
    def bucket(self) -> int:
        """Numbers of a bucket of gradients: no more than there are to reduce."""
        return min(BUCKET_SIZE if self.on_gpu else CPU_BUCKET, self.trained)

    @property
    def whole_weights(self) -> int:
        """Bytes of all weights that this role holds itself: s P, or less where QLoRA quantises those under LoRA (the
        constants of its blocks, 3 % of a weight of 4 bits, do not count)."""
        saves = int(self.parts.adapted * (self.itemsize - self.bits / 8)) if self.bits and not self.shared else 0
        return self.itemsize * self.own - saves


def running_stage(stage: int, dtype: str) -> int:
    """The stage as it runs: in bf16 and fp16, stage 0 runs as 1 (`engine/ds_config.py`)."""
    return 1 if stage == 0 and dtype != "fp32" else stage


def weights(role: Role) -> Memory:
    """Between two updates: s P, and at stage 3 s P / N, on the device or in host memory."""
    if role.stage < 3:
        return Memory.of(role.whole_weights)
    return Memory.of(role.whole_weights / role.ranks, role.offloads_weights)


def gathered(role: Role) -> Memory:
    """Gathered weights that a rank keeps at stage 3 in addition to its shard, s P; 0 on one rank."""
    return Memory.of(role.whole_weights if role.kept_whole and role.ranks > 1 else 0)


def gathered_layer_by_layer(role: Role) -> Memory:
    """Weights that a pass at stage 3 gathers at a time: the running layer, the next ones up to `LIVE_NUMBERS`. s x
    min(P, 10^9); the largest part, embedding or head, fits in that for most models."""
    if role.stage < 3 or role.kept_whole or role.ranks == 1 and not role.offloads_weights:
        return Memory()
    return Memory.of(role.itemsize * min(role.own, LIVE_NUMBERS))


def optimizer(role: Role) -> Memory:
    """fp32 weights and moments: (4 + 8) T / N; in fp32 at stage 0, the weights themselves are the fp32 weights. With
    the optimizer in host memory, the update there also needs gradients in fp32, 4 T / N, and below stage 3 new weights
    to send back, s T / N, and two buffers of the largest parameter, 2 x 4 bytes a number, one of them on the device."""
    size = role.part * (MOMENTS + (MASTER if role.stage > 0 else 0))
    if not role.offloads_optimizer or not role.trained:
        return Memory.of(size)
    size += role.part * FP32
    if role.stage == 3:
        return Memory.of(size, on_host=True)
    largest = FP32 * min(role.parts.largest, role.trained)
    return Memory(largest, size + role.part * role.itemsize + largest)


def gradients(role: Role) -> Memory:
    """Gradients that stay between two updates. bf16 at stage 1: an fp32 buffer of all of them, 4 T. Stage 3: this
    rank's part, 4 T / N (fp16: 2 T / N), with an offloaded optimizer in host memory. Else none stays."""
    if not role.trained:
        return Memory()
    if role.stage == 3:
        return Memory.of(role.part * (2 if role.dtype == "fp16" else FP32), role.offloads_optimizer)
    return Memory.of(FP32 * role.trained if sums_at_once(role) else 0)


def buckets(role: Role) -> Memory:
    """The bucket of gradients that stage 3 holds between updates too: s x bucket. On a GPU that is all of it, on a CPU
    the pages that gradients have touched."""
    if role.stage < 3 or not role.trained:
        return Memory()
    return Memory.of((BUCKET_SIZE if role.on_gpu else role.bucket) * role.itemsize)


def accumulated(role: Role) -> Memory:
    """Gradients that stay from one micro-batch of an update to the next, in addition to `gradients`. Stages 0 and 1:
    those of autograd, s T; with bf16 and an offloaded optimizer sums in fp32, 4 T. Stage 2: this rank's part in fp32, 4
    T / N (fp16: 2 T / N); an offloaded optimizer has that in host memory."""
    if not role.trained or role.stage == 3 or sums_at_once(role) or role.stage == 2 and role.offloads_optimizer:
        return Memory()
    size = role.itemsize if role.dtype == "fp16" else FP32
    return Memory.of(size * (role.part if role.stage == 2 else role.trained))


def sums_at_once(role: Role) -> bool:
    """Whether each gradient of autograd is added to the buffer of `gradients` as soon as it is there, and dropped."""
    return role.stage == 1 and role.dtype == "bf16" and not role.offloads_optimizer


def update_gradients(role: Role) -> Memory:
    """Gradients that an update needs in addition to `gradients` and `buckets`, at the end of backward."""
    if not role.trained:
        return Memory()
    size = role.itemsize
    if role.stage == 0:  # those of autograd, s T, and with several ranks a copy of a bucket of them
        return Memory.of(size * role.trained + (size * role.bucket if role.ranks > 1 else 0))
    if sums_at_once(role):  # of one parameter in bf16 and in fp32, or with several ranks a copy of the sums
        of_one = (size + FP32) * min(role.parts.largest, role.trained)
        is_copied = role.ranks > 1 and role.trained <= SUMMED_TOGETHER
        return Memory.of(max(of_one, FP32 * role.trained if is_copied else 0))
    if role.stage == 3:  # of the running layers until they are in the bucket
        return Memory.of(size * role.bucket)
    # those of autograd, at stage 2 until a bucket of them is reduced; the bucket; this rank's sums in fp32, 4 T / N
    autograd = size * (role.trained if role.stage == 1 else role.bucket)
    summed = 0 if role.offloads_optimizer else FP32 * role.part
    return Memory.of(autograd + size * role.bucket + summed)


def activations(role: Role, tokens: int, on_host: bool = False) -> Memory:
    """What the backward pass of a micro-batch needs: bytes per token (`SavedActivations`) x tokens. With gradient
    checkpointing: the inputs of the layers, and the whole of the layer that runs again."""
    saved = role.parts.saved
    largest = max(saved.layers, default=0)
    if not role.checkpoints:
        kept, running = saved.whole * tokens, 0
    else:
        kept = (len(saved.layers) * saved.layer_input + saved.rest) * tokens
        running = largest * tokens
    if on_host and role.on_gpu and kept > SMALLEST_ON_HOST:
        return Memory(largest * tokens + running, kept)
    return Memory.of(kept + running)


def forward_activations(role: Role, tokens: int) -> Memory:
    """What a pass without gradients needs: about what its largest layer would save."""
    saved = role.parts.saved
    return Memory.of(max(saved.layers, default=0) * tokens + 2 * saved.layer_input * tokens)


def head_memory(role: Role, tokens: int, with_gradient: bool = True) -> Memory:
    """Of the log-probs of `tokens` tokens by the fused head (`algorithms/fused_logprobs.py`): up to three blocks of
    fp32 logits, and with a gradient the states and their gradients in fp32, (s + 4) H bytes for each token. A scalar
    head needs next to nothing."""
    if role.parts.vocabulary <= 1:
        return Memory()
    block = min(GPU_BLOCK_BYTES if role.on_gpu else BLOCK_BYTES, FP32 * tokens * role.parts.vocabulary)
    states = (role.itemsize + FP32) * role.parts.hidden * tokens if with_gradient else 0
    return Memory.of(3 * block + states)


def running_rows(role: Role, rows: int, length: int, wanted: int, free: int) -> int:
    """Sequences that are decoded at a time, at least 1, as `rollout/memory.py` chooses them. `rows`: sequences of a
    rollout on this rank, of `length` tokens at most; `wanted`: `--rollout_rows`, 0 for as many as memory allows;
    `free`: bytes of the device that everything else leaves."""
    per_row = max(1, role.parts.cache_bytes(length))
    if not role.on_gpu:
        return max(1, min(rows, wanted or min(MAX_ROWS, int(MEMORY_SHARE * free / per_row))))
    logits = LOGITS_BYTES * role.parts.vocabulary
    most = wanted or min(MAX_ROWS_GPU, int(LOGITS_SHARE * max(free, 0) / logits))
    return max(1, min(rows, most, int(max(free, 0) / (per_row + logits))))
