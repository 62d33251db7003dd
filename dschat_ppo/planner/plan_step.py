"""The plan of a run: memory of a rank at the peak of each phase, whether it fits, and its lines at
the start of a run.

Notation: P parameters, T of them train, N ranks, s bytes of a number of the run's dtype. Sources:
DeepSpeed's `bf16_optimizer.py`, `stage_1_and_2.py` and `stage3.py`; Rajbhandari et al. 2020 (ZeRO,
section 3) for the idea.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PretrainedConfig

from dschat_ppo.algorithms.fused_logprobs import BLOCK_BYTES, GPU_BLOCK_BYTES
from dschat_ppo.common import dist
from dschat_ppo.common.host_memory import host_memory
from dschat_ppo.common.logging import logger, quiet_libraries
from dschat_ppo.config.batch_plan import PPOPlan, plan_ppo, tokens_on_cpu
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig, flatten
from dschat_ppo.config.supervised_config import FitConfig
from dschat_ppo.engine.build_engine import may_be_whole
from dschat_ppo.engine.ds_config import BUCKET_SIZE, config_of_run, eval_config
from dschat_ppo.engine.tensor_parallel import reason_not_to_shard
from dschat_ppo.errors import UserError, attempt, counted, in_one_line
from dschat_ppo.models.adapters import adapter_settings
from dschat_ppo.models.micro_batches import COPIED, sharing_pays
from dschat_ppo.planner.model_parts import ModelParts, parts_of, read_model_configs
from dschat_ppo.rollout.kv_cache import (
    LOGITS_BYTES,
    LOGITS_SHARE,
    MAX_ROWS,
    MAX_ROWS_GPU,
    MEMORY_SHARE,
)

GIB = 2**30
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
CPU_BUCKET = SUMMED_TOGETHER = 500_000_000
MANY_PROMPTS = 10**6  # of a data set that is not read: enough for any batch
# Share of a device's and of a host's memory that a plan which fits leaves free. Peaks were planned
# up to 8 % too low (docs/memory.md), a card of 80 GiB has about 79 for its programs, and a host
# also holds the system and its page cache.
MARGIN = 0.1
# resident memory of a rank without models: libraries (measured on Linux, CPU)
HOST_PROCESS = int(0.75 * GIB)
# Of a GPU, assumed: the context of CUDA, NCCL's buffers, cuBLAS' workspaces; what the allocator
# holds beyond tensors.
GPU_CONTEXT = 1 * GIB
FRAGMENTATION = 0.06
PARTS = ("weights", "gradients", "optimizer", "activations", "KV cache", "logits", "buffers")
# (part of `PARTS`, bytes, whether they are in host memory)
Held = Iterator[tuple[str, float, bool]]


@dataclass(frozen=True)
class Role:
    """A model of a run, and how its engine holds it."""

    name: str  # such as "actor"
    parts: ModelParts  # without what another role has; `trained` is 0 if it has no optimizer
    dtype: str  # "bf16", "fp16" or "fp32"
    ranks: int  # over which ZeRO divides
    stage: int  # of ZeRO, as it runs (`engine/ds_config.py`): in bf16 and fp16 not 0
    checkpoints: bool = False  # gradient checkpointing
    offloads_optimizer: bool = False  # optimizer states are in host memory
    offloads_weights: bool = False  # at stage 3, weights are in host memory
    # at stage 3, gathered weights stay between two updates (`engine/build_engine.py`)
    kept_whole: bool = False
    on_gpu: bool = False  # the device is a GPU
    muon: bool = False  # trains matrices with Muon, which has one momentum in place of two moments
    saved_itemsize: int = 0  # bytes of a number of the saved model
    bits: int = 0  # of the quantised weights under LoRA (QLoRA); 0: not quantised

    @property
    def itemsize(self) -> int:
        """Bytes of a number, s."""
        return ITEMSIZE[self.dtype]

    @property
    def part(self) -> int:
        """Trained parameters whose optimizer states this rank holds: T / N from stage 1 on, else
        T."""
        if self.stage > 0:
            return -(-self.parts.trained // self.ranks)
        return self.parts.trained

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
        return self.itemsize * min(BUCKET_SIZE if self.on_gpu else CPU_BUCKET, self.parts.trained)

    @property
    def gathered(self) -> int:
        """Bytes of the weights that a pass at stage 3 gathers at a time: the running layer, the
        next ones up to `LIVE_NUMBERS`. s x min(P, 10^9); the largest part, embedding or head, fits
        in that for most models."""
        if self.stage < 3 or self.kept_whole or self.ranks == 1 and not self.offloads_weights:
            return 0
        return self.itemsize * min(self.parts.total, LIVE_NUMBERS)


def held_by(role: Role) -> Held:
    """What a model holds between two updates."""
    parts = role.parts
    n = role.ranks
    # s P, less where QLoRA quantises some; at stage 3 s P / N, and whole ones too if several ranks
    # keep them
    whole = role.itemsize * parts.total - (
        parts.adapted * (role.itemsize - role.bits / 8) if role.bits else 0
    )
    yield "weights", whole / n if role.stage == 3 else whole, role.offloads_weights
    yield "weights", whole if role.kept_whole and n > 1 else 0, False
    # (4 + 8) T / N, and 4 / N less for each parameter under Muon; in fp32 at stage 0 the weights
    # are the fp32 weights
    states = role.part * (MOMENTS + (MASTER if role.stage > 0 else 0))
    states -= FP32 * parts.matrices // (n if role.stage > 0 else 1) if role.muon else 0
    yield "optimizer", states, role.offloads_optimizer
    if role.offloads_optimizer:  # the update on the host also needs gradients in fp32
        yield "optimizer", FP32 * role.part, True
        if role.stage < 3:
            # and new weights to send back, and two buffers of the largest parameter, one on the
            # device
            largest = FP32 * min(parts.largest, parts.trained)
            yield "optimizer", role.itemsize * role.part + largest, True
            yield "optimizer", largest, False
    if role.stage == 3:  # this rank's part, and the bucket
        yield "gradients", role.summed * role.part, role.offloads_optimizer
        yield "buffers", role.bucket, False
    elif role.sums_at_once:
        yield "gradients", FP32 * parts.trained, False


def accumulated(role: Role) -> int:
    """Bytes of gradients that stay from one micro-batch of an update to the next, beyond `held_by`:
    at stages 0 and 1 4 T, and at stage 2 this rank's part, 4 T / N, which an offloaded optimizer
    has in host memory (fp16: 2 for 4)."""
    if role.stage == 3 or role.sums_at_once or role.stage == 2 and role.offloads_optimizer:
        return 0
    return role.summed * (role.part if role.stage == 2 else role.parts.trained)


def update_gradients(role: Role) -> int:
    """Bytes of gradients that an update needs at the end of backward, beyond `held_by`. Stage 3:
    those of the running layers until they are in the bucket. Else those of autograd, s T (at stage
    2 until a bucket of them is reduced), the bucket, and this rank's sums in fp32, 4 T / N, unless
    they are offloaded."""
    trained = role.parts.trained
    if role.stage == 3:
        return role.bucket
    # of one parameter in bf16 and in fp32, or with several ranks a copy of the sums
    if role.sums_at_once:
        is_copied = role.ranks > 1 and trained <= SUMMED_TOGETHER
        if is_copied:
            return FP32 * trained
        return (role.itemsize + FP32) * min(role.parts.largest, trained)
    if role.stage == 0:
        return role.itemsize * trained + (role.bucket if role.ranks > 1 else 0)
    if role.stage == 1:
        autograd = role.itemsize * trained
    else:
        autograd = role.bucket
    return autograd + role.bucket + (0 if role.offloads_optimizer else FP32 * role.part)


def activations(role: Role, tokens: int, on_host: bool = False) -> Held:
    """What the backward pass of a micro-batch needs: bytes per token (`SavedActivations`) x tokens.
    With gradient checkpointing: the inputs of the layers, and the whole of the layer that runs
    again. `on_host`: a GPU has those of one layer at a time."""
    saved = role.parts.saved
    on_host = on_host and role.on_gpu
    if role.checkpoints:
        kept = len(saved.layers) * saved.layer_input + saved.rest
    else:
        kept = saved.whole
    yield "activations", kept * tokens, on_host
    yield "activations", saved.layer * tokens * (role.checkpoints + on_host), False


def logits(role: Role, tokens: int) -> int:
    """Bytes of up to three blocks of fp32 logits of the fused head
    (`algorithms/fused_logprobs.py`)."""
    return 3 * min(
        GPU_BLOCK_BYTES if role.on_gpu else BLOCK_BYTES, FP32 * tokens * role.parts.vocabulary
    )


def running_rows(role: Role, rows: int, length: int, wanted: int, free: int) -> int:
    """Sequences that are decoded at a time, at least 1, as `rollout/kv_cache.py` chooses them.
    `rows`: sequences of a rollout on this rank, of `length` tokens at most; `wanted`:
    `--rollout_rows`, 0 for as many as memory allows; `free`: bytes of the device that everything
    else leaves."""
    per_row = max(1, role.parts.cache_bytes(length))
    free = max(0, free)
    if not role.on_gpu:
        return max(1, min(rows, wanted or min(MAX_ROWS, int(MEMORY_SHARE * free / per_row))))
    logits = LOGITS_BYTES * role.parts.vocabulary
    return max(
        1,
        min(
            rows,
            wanted or min(MAX_ROWS_GPU, int(LOGITS_SHARE * free / logits)),
            free // (per_row + logits),
        ),
    )


@dataclass
class Phase:
    """Bytes of one rank at the peak of a phase."""

    name: str
    # (role, part, in host memory) -> bytes
    held: dict[tuple[str, str, bool], int] = field(default_factory=dict)
    once: int = 0  # bytes of host memory that rank 0 alone needs

    def add(self, role: str, part: str, size: float, on_host: bool = False) -> None:
        self.held[role, part, on_host] = self.held.get((role, part, on_host), 0) + int(size)

    def total(
        self, role: str | None = None, part: str | None = None, on_host: bool | None = None
    ) -> int:
        """The sum of some entries; None: of all roles, parts or places."""
        wanted = (role, part, on_host)
        return sum(
            size
            for key, size in self.held.items()
            if all(want in (None, own) for want, own in zip(wanted, key, strict=True))
        )


def steady_phase(name: str, config: StepConfig, roles: Sequence[Role]) -> Phase:
    """What stays between two updates. What sleeps in a rollout (weights but the actor's, and
    optimizer states) keeps its host memory."""
    phase = Phase(name)
    for role in roles:
        for part, size, on_host in held_by(role):
            phase.add(role.name, part, size, on_host)
            is_copied = part == "optimizer" or (part == "weights" and role.name != "actor")
            if sleeps(config, role) and is_copied and not on_host:
                phase.add(role.name, part, size, on_host=True)
    # an fp32 average, divided over the ranks
    if isinstance(config, PPOConfig) and config.ppo.enable_ema:
        phase.add(
            "average", "weights", FP32 * roles[0].parts.trained / roles[0].ranks, on_host=True
        )
    return phase


def sleeps(config: StepConfig, role: Role) -> bool:
    """Whether `--sleep_in_rollout` moves what a rollout does not use to host memory, which it does
    on a GPU."""
    return isinstance(config, PPOConfig) and config.ppo_memory.sleep_in_rollout and role.on_gpu


def update_phase(
    config: StepConfig, roles: Sequence[Role], role: Role, tokens: int, micro_batches: int
) -> Phase:
    """An update of one model: the larger of the beginning and the end of the backward pass of its
    last micro-batch. At the beginning there are all activations, the gradients of earlier
    micro-batches, and that of the head; at the end all gradients, and the activations of the first
    layer. `tokens`: of a micro-batch on this rank, padding included."""
    name = "update" if role.name == "model" else f"{role.name} update"
    parts = role.parts
    first, last = (steady_phase(name, config, roles) for _ in range(2))
    for part, size, on_host in activations(role, tokens, config.memory.offload_activations):
        first.add(role.name, part, size, on_host)
    first.add(role.name, "logits", logits(role, tokens))
    first.add(role.name, "gradients", role.itemsize * min(parts.head, parts.trained))
    first.add(role.name, "gradients", accumulated(role) if micro_batches > 1 else 0)
    last.add(role.name, "gradients", update_gradients(role))
    last.add(role.name, "activations", parts.saved.layer * tokens)
    largest = max(first, last, key=Phase.total)
    largest.add(role.name, "buffers", role.gathered)
    return largest


def scoring_phase(config: PPOConfig, roles: Sequence[Role], tokens: int) -> Phase:
    """Forward passes over micro-batches, of one model after another, of which the dearest counts:
    at stage 3 that of a large reward model gathers more than an update of a small actor needs."""
    phases = list[Phase]()
    for role in roles:
        phases.append(phase := steady_phase("scoring", config, roles))
        phase.add(role.name, "activations", role.parts.saved.layer * tokens)
        phase.add(role.name, "logits", logits(role, tokens))
        phase.add(role.name, "buffers", role.gathered)
    return max(phases, key=Phase.total)


def checkpoint_phase(config: StepConfig, roles: Sequence[Role]) -> Phase:
    """Saving a checkpoint and the model: rank 0 collects the whole weights of a model that trains
    in host memory, and brings them into the number format in which they are saved."""
    phase = steady_phase("checkpoint", config, roles)
    phase.once = max(
        max(role.itemsize, role.saved_itemsize) * role.parts.total
        for role in roles
        if role.parts.trained
    )
    return phase


def supervised_batch(config: StepConfig, ranks: int, on_gpu: bool) -> tuple[int, int]:
    """(tokens of a pass on a rank, passes of an update) of steps 1 and 2. A pair takes two rows. On
    a CPU a micro-batch runs in several passes (`supervised/passes.py`)."""
    fit = config.training
    shared = config.memory.sequence_parallel_size
    of_sample = fit.max_seq_len * (2 if config.step_data.use == "preference" else 1)
    tokens = fit.per_device_train_batch_size * of_sample
    in_pass = tokens
    if not on_gpu and not config.data.streaming:
        in_pass = min(tokens, tokens_on_cpu(of_sample, ranks))
    return -(-in_pass // shared), fit.gradient_accumulation_steps * -(-tokens // in_pass)


def ppo_batch(plan: PPOPlan) -> tuple[int, int]:
    """The same of step 3. Answers shorter than the longest fill a micro-batch up to its budget, if
    there are enough; they share their prompt where an update has all answers to its prompts, and
    ranks do not divide its rows."""
    prompt = plan.flags.max_prompt_seq_len
    answer = plan.flags.max_answer_seq_len
    answers = plan.samples
    tokens = prompt + answer
    rows = plan.rows_per_rank
    if (
        plan.rollout_rows == plan.global_batch
        and plan.shared == 1
        and sharing_pays(prompt, answers, answers * tokens)
    ):
        all_tokens = (
            rows // answers * (prompt + answers * answer + (answers - 1) * (prompt // COPIED))
        )
    else:
        all_tokens = rows * tokens
    budget = max(tokens, plan.micro_batch_tokens)  # a row may be longer; ranks may share it
    tokens = -(-min(budget, all_tokens * plan.shared) // plan.shared)
    return tokens, -(-all_tokens * plan.flags.ppo_epochs // (plan.updates_per_rollout * tokens))


def rollout_phase(
    config: PPOConfig,
    plan: PPOPlan,
    roles: Sequence[Role],
    actor_config: PretrainedConfig,
    device_memory: int,
) -> tuple[Phase, int]:
    """Generation, and the number of sequences that are decoded at a time. At stage 3 the actor's
    weights are gathered: whole ones (1 / size of the layers with tensor parallelism, or one layer
    at a time); adapted ones are merged. `device_memory`: bytes that this rank's tensors may
    take."""
    ppo = config.ppo
    actor = roles[0]
    phase = steady_phase("rollout", config, roles)
    parts = actor.parts
    itemsize = actor.itemsize
    size = config.ppo_memory.inference_tp_size
    if sleeps(config, actor):
        phase.held = {
            key: held
            for key, held in phase.held.items()
            if key[2] or key[:2] == ("actor", "weights")
        }
    divides = size > 1 and reason_not_to_shard(actor_config, config.lora.actor_lora_dim) is None
    by_layer = actor.stage == 3 and (ppo.unpin_actor_parameters or size > 1 and not divides)
    size = size if divides else 1
    generating: float = 0 if actor.bits else itemsize * parts.adapted
    if by_layer:
        generating = itemsize * (parts.layer + parts.head)
    elif actor.gathered:
        generating = itemsize * (parts.total - parts.layers + parts.layers / size)
    if not actor.on_gpu and not by_layer:  # a CPU lays matrices out again to generate
        generating += itemsize * parts.total
    phase.add("actor", "buffers", generating)
    length = ppo.max_prompt_seq_len + ppo.max_answer_seq_len
    free = device_memory - phase.total(on_host=False if actor.on_gpu else None)
    rows = running_rows(actor, plan.rows_per_rank * size, length, ppo.rollout_rows, free)
    phase.add("actor", "KV cache", parts.cache_bytes(length) * rows / size)
    phase.add("actor", "logits", LOGITS_BYTES * rows * parts.vocabulary)
    return phase, rows


@dataclass(frozen=True)
class Peak:
    """The phase that needs most of a kind of memory."""

    phase: str
    needs: int  # bytes
    memory: int  # bytes that there are
    what: str  # such as "per device"

    @property
    def missing(self) -> int:
        """Bytes that are too few, if `MARGIN` stays free."""
        return max(0, self.needs - usable(self.memory))

    def __str__(self) -> str:
        return f"{self.needs / GIB:.1f} of {self.memory / GIB:.1f} GiB {self.what}"


@dataclass(frozen=True)
class Plan:
    """What a run needs, by arithmetic from its flags and model configurations."""

    phases: list[Phase]  # with bytes of one rank
    roles: list[Role]
    rows: int  # sequences that a rank decodes at a time; 0 without generation
    ranks: int
    ranks_per_node: int  # that share the memory of a host
    device_memory: int  # bytes of a rank's GPU; 0: the run is on a CPU
    host_memory: int  # bytes of a host

    def needs(self, phase: Phase) -> tuple[int, int]:
        """Bytes of a rank's device, and of a host, in a phase, with what is not tensors. On a CPU,
        host memory is the device's, so that all counts as the host's."""
        device, on_host = 0, None
        if self.device_memory:
            device = int(phase.total(on_host=False) * (1 + FRAGMENTATION)) + GPU_CONTEXT
            on_host = True
        return (
            device,
            self.ranks_per_node * (phase.total(on_host=on_host) + HOST_PROCESS) + phase.once,
        )

    @property
    def peaks(self) -> list[Peak]:
        """Those of a device, unless the run is on a CPU, and of a host."""
        device, host = (
            max((self.needs(phase)[place], phase.name) for phase in self.phases) for place in (0, 1)
        )
        of_host = f"of host memory for {counted(self.ranks_per_node, 'rank')}"
        if self.device_memory:
            found = [Peak(device[1], device[0], self.device_memory, "per device")]
        else:
            found = []
        return [*found, Peak(host[1], host[0], self.host_memory, of_host)]

    @property
    def missing(self) -> int:
        """Bytes of a device and of a host that are too few."""
        return sum(peak.missing for peak in self.peaks)

    def shortages(self) -> list[str]:
        """One line for each kind of memory that is too small; empty if the run fits."""
        return [
            f"the phase '{peak.phase}' needs about {peak}, and {usable(peak.memory) / GIB:.1f} GiB"
            " are to be used"
            for peak in self.peaks
            if peak.missing
        ]

    def peak_text(self) -> str:
        return ", ".join(map(str, self.peaks))


def usable(memory: int) -> int:
    """Bytes of a device's or host's memory that a plan may need."""
    return int((1 - MARGIN) * memory)


def plan_step(
    config: StepConfig,
    model_configs: Mapping[str, PretrainedConfig],
    ranks: int,
    device_memory: int,
    host_memory: int,
    ranks_per_node: int | None = None,
) -> Plan:
    """Plan a step. Nothing is loaded. `model_configs`: see `read_model_configs`; memory as in
    `Plan`; `ranks_per_node` None: all."""
    per_node = ranks_per_node or ranks
    on_gpu = device_memory > 0
    rows = 0
    own = device_memory if on_gpu else host_memory // per_node
    roles = roles_of(config, model_configs, ranks, own, on_gpu)
    phases = list[Phase]()
    if isinstance(config, PPOConfig):
        # the data are not read, so how long the run is is not known
        steps = config.schedule.max_steps or 1
        plan = plan_ppo(
            config.ppo, MANY_PROMPTS, ranks, 0, config.memory.sequence_parallel_size, steps, on_gpu
        )
        if on_gpu:
            of_tensors = int((usable(own) - GPU_CONTEXT) / (1 + FRAGMENTATION))
        else:
            of_tensors = usable(own)
        tokens, micro_batches = ppo_batch(plan)
        rollout, rows = rollout_phase(config, plan, roles, model_configs["actor"], of_tensors)
        phases += [rollout, scoring_phase(config, roles, tokens)]
    else:
        tokens, micro_batches = supervised_batch(config, ranks, on_gpu)
    phases += [
        update_phase(config, roles, role, tokens, micro_batches)
        for role in roles
        if role.parts.trained
    ]
    phases.append(checkpoint_phase(config, roles))
    return Plan(phases, roles, rows, ranks, per_node, device_memory, host_memory)


def saved_itemsize(config: StepConfig, model: PretrainedConfig) -> int:
    """Bytes of a number of a saved model; 0 if its start does not say its format."""
    wanted = config.run.save_dtype
    if wanted is not None:
        return ITEMSIZE[wanted]
    if isinstance(model.dtype, torch.dtype):
        return model.dtype.itemsize
    return 0


def roles_of(
    config: StepConfig,
    models: Mapping[str, PretrainedConfig],
    ranks: int,
    device_memory: int,
    on_gpu: bool,
) -> list[Role]:
    """The models that a step holds; the actor is the first of step 3. `device_memory`: bytes of a
    rank's device, or on a CPU its share of the host's."""
    flags = flatten(config)
    dtype = config.run.dtype
    roles = list[Role]()
    counted_as = replace(config.adapters, lora_dropout=0.0, load_in_4bit=False, load_in_8bit=False)
    if flags["load_in_4bit"]:
        bits = 4
    elif flags["load_in_8bit"]:
        bits = 8
    else:
        bits = 0
    uses_actor = (
        isinstance(config, PPOConfig)
        and config.actor_base_is_frozen
        and not flags["ref_model_name_or_path"]
    )
    for name, model in models.items():
        scalar = name in ("critic", "reward") or (isinstance(config, FitConfig) and config.has_head)
        prefix = {"model": "", "actor": "actor_", "critic": "critic_"}.get(name)
        shared = 0
        trains = prefix is not None
        adapter = None if prefix is None else adapter_settings(config.lora, counted_as, prefix)
        size = parts_of(model, dtype, scalar, adapter, on_gpu)
        if name in ("critic", "reward") and flags["share_base"]:
            shared = size.total - (size.trained if trains else size.head)
        elif name == "reference" and uses_actor:
            shared = min(roles[0].parts.total - roles[0].parts.trained, size.total)
        parts = replace(size, total=size.total - shared, trained=size.trained if trains else 0)
        if trains:
            made = config_of_run(
                config, flags[f"{prefix}zero_stage"], ranks, "cuda" if on_gpu else "cpu"
            )
        else:
            if name == "reward" and not shared:
                stage = flags["critic_zero_stage"]
            else:
                stage = roles[0].stage
            made = eval_config(stage, dtype, flags[f"offload_{name.split()[0]}_model"], ranks)
        zero = made["zero_optimization"]
        offloads = [
            (zero.get(f"offload_{part}") or {}).get("device", "none") != "none"
            for part in ("optimizer", "param")
        ]
        by_layer = name == "actor" and flags["unpin_actor_parameters"]
        roles.append(
            Role(
                name,
                parts,
                dtype,
                ranks,
                zero["stage"],
                checkpoints=trains and flags[f"{prefix}gradient_checkpointing"],
                offloads_optimizer=zero["stage"] > 0 and offloads[0],
                offloads_weights=zero["stage"] == 3 and offloads[1],
                kept_whole=not by_layer
                and may_be_whole(made, ITEMSIZE[dtype] * size.total, ranks, device_memory),
                on_gpu=on_gpu,
                muon=trains and config.run.optimizer == "muon",
                saved_itemsize=saved_itemsize(config, model),
                bits=bits if size.adapted and not shared else 0,
            )
        )
    return roles


def show_memory_plan(config: StepConfig) -> None:
    """Log the expected peak of a run that is about to train, and warn if it does not fit. If a
    model cannot be counted, there is no plan; if there is no such model, or flags do not fit
    together, the run itself says so."""
    if config.validate_only:
        return
    quiet_libraries()
    try:
        models = read_model_configs(config)
    except UserError:
        return
    if dist.on_gpu():
        device = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        device = 0
    with attempt() as tried:  # the flags are not checked against the models and the ranks yet
        plan = plan_step(
            config, models, dist.world_size(), device, host_memory(), dist.local_world_size()
        )
    if tried.problem is not None:
        logger().warning(f"no memory plan: {in_one_line(tried.problem)}")
        return
    where = f"phase '{plan.peaks[0].phase}'; python -m dschat_ppo.tools.plan shows the parts"
    logger().info(f"expected peak: {plan.peak_text()} ({where})")
    if shortages := plan.shortages():
        logger().warning(f"may run out of memory: {'; '.join(shortages)}")
