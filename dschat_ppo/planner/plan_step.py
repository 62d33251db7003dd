"""The plan of a run: its models, memory at the peak of each phase, whether it fits, and its lines
at the start of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from dschat_ppo.common import dist
from dschat_ppo.common.host_memory import host_memory
from dschat_ppo.common.logging import logger, quiet_libraries
from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.config.step_config import StepConfig, flatten
from dschat_ppo.config.supervised_config import FitConfig
from dschat_ppo.engine.build_engine import may_be_whole
from dschat_ppo.engine.ds_config import config_of_run, eval_config
from dschat_ppo.engine.optimizers import optimizer_of
from dschat_ppo.errors import UserError, attempt, counted, in_one_line
from dschat_ppo.models.loading import changes_to_train, frozen_changes
from dschat_ppo.planner.model_parts import ModelSizes, read_model_configs, sizes_of
from dschat_ppo.planner.phase_memory import (
    Phase,
    checkpoint_phase,
    ppo_batch,
    rollout_phase,
    scoring_phase,
    supervised_batch,
    update_phase,
)
from dschat_ppo.planner.role_memory import ITEMSIZE, Role

GIB = 2**30
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
# Of a micro-batch on a GPU: with more tokens, products are hardly faster (assumed).
AMPLE_TOKENS = 16384
# role of a model that trains -> the beginning of its flags
FLAG_PREFIXES = {"model": "", "actor": "actor_", "critic": "critic_"}


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
        device = 0
        rank_on_host = phase.total()
        if self.device_memory:
            device = int(phase.total(on_host=False) * (1 + FRAGMENTATION)) + GPU_CONTEXT
            rank_on_host = phase.total(on_host=True)
        host = self.ranks_per_node * (rank_on_host + HOST_PROCESS) + phase.once
        return device, host

    @property
    def peaks(self) -> list[Peak]:
        """Those of a device, unless the run is on a CPU, and of a host."""
        on_device = max((self.needs(phase)[0], phase.name) for phase in self.phases)
        on_host = max((self.needs(phase)[1], phase.name) for phase in self.phases)
        of_host = f"of host memory for {counted(self.ranks_per_node, 'rank')}"
        peaks = []
        if self.device_memory:
            device_bytes, device_phase = on_device
            peaks.append(Peak(device_phase, device_bytes, self.device_memory, "per device"))
        host_bytes, host_phase = on_host
        peaks.append(Peak(host_phase, host_bytes, self.host_memory, of_host))
        return peaks

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
        """What the peaks need, for a message."""
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
    rank_memory = host_memory // per_node
    tensor_memory = usable(rank_memory)
    if on_gpu:
        rank_memory = device_memory
        tensor_memory = int((usable(rank_memory) - GPU_CONTEXT) / (1 + FRAGMENTATION))
    roles = roles_of(config, model_configs, ranks, rank_memory, on_gpu)
    phases = list[Phase]()
    if isinstance(config, PPOConfig):
        # the data are not read, so how long the run is is not known
        steps = config.schedule.max_steps or 1
        plan = plan_ppo(config.ppo, MANY_PROMPTS, ranks, 0, config.ranks_of_row, steps, on_gpu)
        tokens, micro_batches = ppo_batch(plan)
        rollout, rows = rollout_phase(config, plan, roles, model_configs["actor"], tensor_memory)
        phases += [rollout, scoring_phase(config, roles, tokens)]
    else:
        tokens, micro_batches = supervised_batch(config, ranks, on_gpu)
    phases += [
        update_phase(config, roles, role, tokens, micro_batches)
        for role in roles
        if role.sizes.trained
    ]
    phases.append(checkpoint_phase(config, roles))
    return Plan(phases, roles, rows, ranks, per_node, device_memory, host_memory)


def larger_micro_batch(
    config: StepConfig, ranks: int, plan_of: Callable[[StepConfig], Plan]
) -> int | None:
    """Tokens of the largest micro-batch of step 3 that fits on a GPU by `plan_of`: the run's,
    doubled until it holds all responses of a rank or `AMPLE_TOKENS`. None if that of the run cannot
    be doubled."""
    if not isinstance(config, PPOConfig):
        return None
    batches = plan_ppo(config.ppo, MANY_PROMPTS, ranks, 0, config.ranks_of_row, max_steps=1)
    longest = config.ppo.max_prompt_seq_len + config.ppo.max_answer_seq_len
    most_tokens = min(batches.rows_per_rank * longest, AMPLE_TOKENS)
    tokens = batches.micro_batch_tokens
    larger = None
    while 2 * tokens <= most_tokens:
        tokens = 2 * tokens
        ppo_flags = replace(config.ppo, micro_batch_tokens=tokens)
        if plan_of(replace(config, ppo=ppo_flags)).missing:
            break
        larger = tokens
    return larger


def larger_text(tokens: int) -> str:
    """What `larger_micro_batch` has found, for a person."""
    return f"larger micro-batches fit, for fewer passes: --micro_batch_tokens {tokens}"


def saved_itemsize(config: StepConfig, model: PretrainedConfig) -> int:
    """Bytes of a number of a saved model; 0 if its start does not say its format."""
    save_dtype = config.run.save_dtype
    if save_dtype is not None:
        return ITEMSIZE[save_dtype]
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
    device_type = "cpu"
    if on_gpu:
        device_type = "cuda"
    roles = list[Role]()
    offloads_further = {model.role: model.offload for model in config.further_models}
    for name, model in models.items():
        sizes = _sizes_of_role(config, name, model, on_gpu)
        shared = _shared_parameters(config, name, sizes, roles)
        prefix = FLAG_PREFIXES.get(name)
        trains = prefix is not None
        if trains:
            ds_config = config_of_run(config, flags[f"{prefix}zero_stage"], ranks, device_type)
        else:
            stage = roles[0].stage
            if name == "reward" and not shared:
                stage = flags["critic_zero_stage"]
            if name in offloads_further:
                offloads = offloads_further[name]
            else:
                offloads = flags[f"offload_{name}_model"]
            ds_config = eval_config(stage, config.run.dtype, offloads, ranks)
        zero = ds_config["zero_optimization"]
        by_layer = name == "actor" and flags["unpin_actor_parameters"]
        weight_bytes = ITEMSIZE[config.run.dtype] * sizes.total
        bits = 0
        if sizes.adapted and not shared:
            bits = config.frozen_bits
        role = Role(
            name,
            replace(sizes, total=sizes.total - shared),
            config.run.dtype,
            ranks,
            zero["stage"],
            checkpoints=trains and flags[f"{prefix}gradient_checkpointing"],
            offloads_optimizer=zero["stage"] > 0 and offloads_part(zero, "optimizer"),
            offloads_weights=zero["stage"] == 3 and offloads_part(zero, "param"),
            kept_whole=not by_layer and may_be_whole(ds_config, weight_bytes, ranks, device_memory),
            on_gpu=on_gpu,
            optimizer=optimizer_of(config),
            saved_itemsize=saved_itemsize(config, model),
            bits=bits,
        )
        roles.append(role)
    return roles


def _sizes_of_role(
    config: StepConfig, name: str, model: PretrainedConfig, on_gpu: bool
) -> ModelSizes:
    """The sizes of a role's whole model, with what trains in it; `trained` is 0 and `taken` empty
    for a role that does not train."""
    is_scalar = name in ("critic", "reward") or (isinstance(config, FitConfig) and config.has_head)
    dtype = config.run.dtype
    if name not in FLAG_PREFIXES:
        sizes = sizes_of(model, dtype, is_scalar, frozen_changes(config), on_gpu)
        return replace(sizes, trained=0, taken={})
    # quantisation does not change what is counted
    changes = changes_to_train(config, FLAG_PREFIXES[name], quantises=False)
    return sizes_of(model, dtype, is_scalar, changes, on_gpu)


def _shared_parameters(
    config: StepConfig, name: str, sizes: ModelSizes, roles: Sequence[Role]
) -> int:
    """How many parameters of a role's model are those of the actor, the first of the `roles` so
    far."""
    if not isinstance(config, PPOConfig):
        return 0
    if name in ("critic", "reward") and config.shares_base:
        if name in FLAG_PREFIXES:
            return sizes.total - sizes.trained
        return sizes.total - sizes.head
    if name == "reference" and config.reference_is_actor_base:
        actor = roles[0].sizes
        return min(actor.total - actor.trained, sizes.total)
    return 0


def offloads_part(zero: Mapping[str, Any], part: str) -> bool:
    """Whether DeepSpeed's section of ZeRO offloads a part, "optimizer" or "param"."""
    section = zero.get(f"offload_{part}") or {}
    return bool(section.get("device", "none") != "none")


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
    device = 0
    if dist.on_gpu():
        device = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    ranks = dist.world_size()

    def plan_of(config: StepConfig) -> Plan:
        return plan_step(config, models, ranks, device, host_memory(), dist.local_world_size())

    larger = None
    with attempt() as tried:  # the flags are not checked against the models and the ranks yet
        plan = plan_of(config)
        if device and not plan.missing:
            larger = larger_micro_batch(config, ranks, plan_of)
    if tried.problem is not None:
        logger().warning(f"no memory plan: {in_one_line(tried.problem)}")
        return
    where = f"phase '{plan.peaks[0].phase}'; python -m dschat_ppo.tools.plan shows the parts"
    logger().info(f"expected peak: {plan.peak_text()} ({where})")
    if larger is not None:
        logger().info(f"note: {larger_text(larger)}")
    shortages = plan.shortages()
    if shortages:
        logger().warning(f"may run out of memory: {'; '.join(shortages)}")
