"""What a run needs on each rank, as formulas: what each model holds (weights, gradients, optimizer states, passes), and
the phases of a step.

Notation: P parameters, T of them train, N ranks, s bytes of a number of the run's dtype. Sources: DeepSpeed's
`bf16_optimizer.py`, `stage_1_and_2.py` and `stage3.py`; Rajbhandari et al. 2020 (ZeRO, section 3) for the idea.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dschat_ppo.algorithms.fused_logprobs import BLOCK_BYTES, GPU_BLOCK_BYTES
from dschat_ppo.config.batch_plan import PPOPlan
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.engine.ds_config import BUCKET_SIZE
from dschat_ppo.engine.hybrid_engine import reason_not_to_divide
from dschat_ppo.models.activation_memory import SMALLEST_ON_HOST
from dschat_ppo.models.micro_batches import COPIED, sharing_pays
from dschat_ppo.planner.model_parts import ModelParts
from dschat_ppo.rollout.kv_cache import LOGITS_BYTES, LOGITS_SHARE, MAX_ROWS, MAX_ROWS_GPU, MEMORY_SHARE

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
    stage: int  # of ZeRO, as it runs (`engine/ds_config.py`): in bf16 and fp16 not 0
    trains: bool  # has an optimizer
    checkpoints: bool = False  # gradient checkpointing
    offloads_optimizer: bool = False  # optimizer states are in host memory
    offloads_weights: bool = False  # at stage 3, weights are in host memory
    kept_whole: bool = False  # at stage 3, gathered weights stay between two updates (`engine/build_engine.py`)
    shared: int = 0  # parameters of another role's frozen base that it uses; they count there
    on_gpu: bool = False  # the device is a GPU
    muon: int = 0  # parameters under Muon, which has one momentum in place of two moments
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
    """fp32 weights and moments: (4 + 8) T / N, and 4 / N less for each parameter under Muon; in fp32 at stage 0, the
    weights themselves are the fp32 weights. With the optimizer in host memory, the update there also needs gradients in
    fp32, 4 T / N, and below stage 3 new weights to send back, s T / N, and two buffers of the largest parameter, 2 x 4
    bytes a number, one of them on the device."""
    size = role.part * (MOMENTS + (MASTER if role.stage > 0 else 0))
    size -= FP32 * role.muon // (role.ranks if role.stage > 0 else 1)
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
    """Sequences that are decoded at a time, at least 1, as `rollout/kv_cache.py` chooses them. `rows`: sequences of a
    rollout on this rank, of `length` tokens at most; `wanted`: `--rollout_rows`, 0 for as many as memory allows;
    `free`: bytes of the device that everything else leaves."""
    per_row = max(1, role.parts.cache_bytes(length))
    if not role.on_gpu:
        return max(1, min(rows, wanted or min(MAX_ROWS, int(MEMORY_SHARE * free / per_row))))
    logits = LOGITS_BYTES * role.parts.vocabulary
    most = wanted or min(MAX_ROWS_GPU, int(LOGITS_SHARE * max(free, 0) / logits))
    return max(1, min(rows, most, int(max(free, 0) / (per_row + logits))))


PARTS = ("weights", "gradients", "optimizer", "activations", "KV cache", "logits", "buffers")


@dataclass
class Phase:
    """Bytes of one rank at the peak of a phase."""

    name: str
    held: dict[tuple[str, str], Memory] = field(default_factory=dict)  # (role, part of `PARTS`) -> bytes
    once: int = 0  # bytes of host memory that rank 0 alone needs

    def add(self, role: str, part: str, memory: Memory) -> None:
        if memory.device or memory.host:
            self.held[role, part] = self.held.get((role, part), Memory()) + memory

    def total(self, role: str | None = None, part: str | None = None) -> Memory:
        """The sum of some entries; None: of all roles or parts."""
        chosen = [
            memory for (whose, what), memory in self.held.items() if role in (None, whose) and part in (None, what)
        ]
        return sum(chosen, Memory())


def steady_phase(name: str, roles: Sequence[Role], ema: bool = False) -> Phase:
    """What stays between two updates. `ema`: `--enable_ema`, an fp32 average of the actor's trained weights in host
    memory, divided over the ranks."""
    phase = Phase(name)
    for role in roles:
        phase.add(role.name, "weights", weights(role))
        phase.add(role.name, "optimizer", optimizer(role))
        phase.add(role.name, "gradients", gradients(role))
        phase.add(role.name, "buffers", buckets(role) + gathered(role))
    if ema:
        phase.add("average", "weights", Memory.of(FP32 * roles[0].trained / roles[0].ranks, on_host=True))
    return phase


def update_phase(
    name: str, role: Role, roles: Sequence[Role], tokens: int, scored: int, micro_batches: int, config: StepConfig,
    ema: bool = False,
) -> Phase:  # fmt: skip
    """An update of one model: the larger of the beginning and the end of the backward pass of its last micro-batch. At
    the beginning there are all activations, the gradients of earlier micro-batches, and that of the head; at the end
    all gradients, and the activations of the first layer. `tokens`: of a micro-batch on this rank, padding included;
    `scored`: those whose log-probs the loss reads."""
    first, last = (steady_phase(name, roles, ema) for _ in range(2))
    for phase in (first, last):
        phase.add(role.name, "buffers", gathered_layer_by_layer(role))
    first.add(role.name, "activations", activations(role, tokens, config.memory.offload_activations))
    first.add(role.name, "logits", head_memory(role, scored))
    of_head = role.itemsize * min(role.parts.head or role.parts.embedding, role.trained)
    first.add(role.name, "gradients", Memory.of(of_head))
    if micro_batches > 1:
        first.add(role.name, "gradients", accumulated(role))
    last.add(role.name, "gradients", update_gradients(role))
    last.add(role.name, "activations", Memory.of(max(role.parts.saved.layers, default=0) * tokens))
    return max(first, last, key=lambda phase: phase.total().device + phase.total().host)


def checkpoint_phase(roles: Sequence[Role], ema: bool) -> Phase:
    """Saving a checkpoint and the model: rank 0 collects the whole weights of a model that trains in host memory."""
    phase = steady_phase("checkpoint", roles, ema)
    largest = max((role for role in roles if role.trained), key=lambda role: role.itemsize * role.trained)
    phase.once = largest.itemsize * largest.parts.total
    return phase


def supervised_phases(config: StepConfig, role: Role) -> list[Phase]:
    """The phases of steps 1 and 2. Pairs of answers make two rows of each row of a batch."""
    fit, roles = config.training, [role]
    rows = fit.per_device_train_batch_size * (2 if config.step_data.use == "preference" else 1)
    tokens = -(-rows * fit.max_seq_len // config.memory.sequence_parallel_size)
    update = update_phase("update", role, roles, tokens, tokens, fit.gradient_accumulation_steps, config)
    return [update, checkpoint_phase(roles, False)]


def ppo_phases(
    config: PPOConfig, plan: PPOPlan, roles: Sequence[Role], actor_config: Any, device_memory: int, sleeps: bool
) -> tuple[list[Phase], int]:
    """The phases of step 3, and the number of sequences that are decoded at a time. `device_memory`: bytes that this
    rank's tensors may take; `sleeps`: whether tensors sleep in the rollout."""
    ppo, ema = config.ppo, config.ppo.enable_ema
    # answers that share their prompt: where an update has all answers to its prompts, and ranks do not divide its rows
    answers = plan.samples if plan.rollout_rows == plan.global_batch and plan.shared == 1 else 1
    prompt, answer = ppo.max_prompt_seq_len, ppo.max_answer_seq_len
    # tokens of a pass on this rank: answers shorter than the longest fill it up to the budget, if there are enough
    budget = max(prompt + answer, plan.micro_batch_tokens)  # a row may be longer; ranks may share it
    all_tokens = plan.rows_per_rank // answers * group_tokens(prompt, answer, answers)
    tokens = -(-min(budget, all_tokens * plan.shared) // plan.shared)
    scored = -(-tokens * answers * answer // (prompt + answers * answer))  # of answers
    micro_batches = -(-all_tokens * ppo.ppo_epochs // (plan.updates_per_rollout * tokens))
    rollout, rows = _rollout_phase(config, plan, roles, actor_config, device_memory, sleeps)
    phases = [rollout, _score_phase(roles, tokens, scored, ema)]
    phases += [
        update_phase(f"{role.name} update", role, roles, tokens, scored, micro_batches, config, ema)
        for role in roles if role.trained
    ]  # fmt: skip
    phases.append(checkpoint_phase(roles, ema))
    if sleeps:
        for phase in phases[1:]:  # the host memory is kept from the first rollout on (`engine/hybrid_engine.py`)
            _add_host_copies(phase, roles)
    return phases, rows


def group_tokens(prompt: int, answer: int, answers: int) -> int:
    """Most tokens of the answers to a prompt, as `split_by_tokens` counts them: they share the longest prompt and copy
    its keys and values, or each runs the longest prompt that is not worth sharing. `prompt`, `answer`: most tokens."""
    sizes = range(prompt + 1)
    shared = bisect_left(sizes, True, key=lambda size: sharing_pays(size, answers, answers * (size + answer)))
    together = prompt + answers * answer + (answers - 1) * (prompt // COPIED)
    return max(together, answers * (shared - 1 + answer))  # prompts below `shared` tokens are not shared


def _score_phase(roles: Sequence[Role], tokens: int, scored: int, ema: bool) -> Phase:
    """Scoring: forward passes of one model after another over micro-batches, of which the dearest counts."""
    phases = []
    for role in roles:
        phases.append(phase := steady_phase("scoring", roles, ema))
        phase.add(role.name, "activations", forward_activations(role, tokens))
        phase.add(role.name, "logits", head_memory(role, scored, with_gradient=False))
        phase.add(role.name, "buffers", gathered_layer_by_layer(role))
    return max(phases, key=lambda phase: phase.total().device)


def _rollout_phase(
    config: PPOConfig, plan: PPOPlan, roles: Sequence[Role], actor_config: Any, device_memory: int, sleeps: bool
) -> tuple[Phase, int]:
    """Generation, and the number of sequences that are decoded at a time. Arguments as `ppo_phases`."""
    ppo, actor, wanted = config.ppo, roles[0], config.ppo_memory.inference_tp_size
    phase = steady_phase("rollout", roles, ppo.enable_ema)
    for role in roles[1:]:
        if role.trained:  # an update drops whole weights, and only the actor's are gathered for a rollout
            phase.add(role.name, "buffers", Memory(-gathered(role).device))
    if sleeps:
        _add_host_copies(phase, roles)
        if actor.on_gpu:  # on a CPU that plays the device, both copies exist for a moment, so that nothing leaves it
            for key, memory in phase.held.items():
                if key != ("actor", "weights"):
                    phase.held[key] = Memory(0, memory.host)
    divides = wanted > 1 and reason_not_to_divide(actor_config, config.lora.actor_lora_dim) is None
    size = wanted if divides else 1
    # one layer is gathered at a time, for each token: on request, or if layers cannot be divided and are not whole
    gathers = ppo.unpin_actor_parameters or (wanted > 1 and not divides and not actor.kept_whole)
    by_layer = actor.stage == 3 and gathers
    phase.add("actor", "buffers", _generating_weights(actor, size, by_layer, sleeps))
    if not actor.on_gpu and not by_layer:
        phase.add("actor", "buffers", Memory.of(actor.itemsize * actor.parts.packed))
    length = ppo.max_prompt_seq_len + ppo.max_answer_seq_len
    free = device_memory - phase.total().device - (0 if actor.on_gpu else phase.total().host)
    rows = running_rows(actor, plan.rows_per_rank * size, length, ppo.rollout_rows, free)
    phase.add("actor", "KV cache", Memory.of(actor.parts.cache_bytes(length) * rows / size))
    phase.add("actor", "logits", Memory.of(LOGITS_BYTES * rows * actor.parts.vocabulary))
    return phase, rows


def _generating_weights(actor: Role, size: int, by_layer: bool, sleeps: bool) -> Memory:
    """Weights of the actor in addition to those between updates: at stage 3 whole ones (1 / size of the layers with
    tensor parallelism, or one layer at a time), and adapted ones merged, which replace the first."""
    parts, s = actor.parts, actor.itemsize
    if by_layer:
        return Memory.of(s * (max(parts.layers, default=0) + max(parts.embedding, parts.head)))
    merged = 0 if actor.bits else s * parts.adapted
    if actor.stage < 3:
        return Memory.of(merged, on_host=sleeps)
    if actor.kept_whole or actor.ranks == 1 and not actor.offloads_weights:
        return Memory.of(merged)
    layers = sum(parts.layers)
    return Memory.of(s * (parts.total - layers + layers / size))


def _add_host_copies(phase: Phase, roles: Sequence[Role]) -> None:
    """Host memory for what sleeps (`--sleep_in_rollout`): all on the device but the actor's weights, and buffers of
    gradients, whose contents mean nothing and which are freed."""
    freed = {(role.name, "buffers"): buckets(role).device for role in roles}
    freed |= {(role.name, "gradients"): gradients(role).device for role in roles}
    for key, memory in steady_phase("rollout", roles).held.items():
        if key != ("actor", "weights"):
            phase.add(*key, Memory(0, memory.device - freed.get(key, 0)))
