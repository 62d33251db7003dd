"""The plan of a run: memory by phase, and whether it fits; its lines at the start of a run, and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
from dschat_ppo.errors import UserError, attempt, counted, in_one_line
from dschat_ppo.models.adapters import adapter_settings
from dschat_ppo.planner.model_parts import parts_of, read_model_configs
from dschat_ppo.planner.role_memory import ITEMSIZE, PARTS, Memory, Phase, Role, ppo_phases, supervised_phases

GIB = 2**30
MANY_PROMPTS = 10**6  # of a data set that is not read: enough for any batch
# Share of a device's and of a host's memory that a plan which fits leaves free. Peaks were planned up to 8 % too low
# (docs/memory.md), a card of 80 GiB has about 79 for its programs, and a host also holds the system and its page cache.
MARGIN = 0.1
HOST_PROCESS = int(0.75 * GIB)  # resident memory of a rank without models: libraries (measured on Linux, CPU)
# Of a GPU, assumed: the context of CUDA, NCCL's buffers, cuBLAS' workspaces; what the allocator holds beyond tensors.
GPU_CONTEXT, FRAGMENTATION = 1 * GIB, 0.06


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

    def needs(self, phase: Phase) -> Memory:
        """Bytes of a rank's device, and of a host, in a phase, with what is not tensors. On a CPU, host memory is the
        device's, so that all counts as the host's."""
        total, ranks = phase.total(), self.ranks_per_node
        if not self.device_memory:
            return Memory(0, ranks * (total.device + total.host + HOST_PROCESS) + phase.once)
        device = int(total.device * (1 + FRAGMENTATION)) + GPU_CONTEXT
        return Memory(device, ranks * (total.host + HOST_PROCESS) + phase.once)

    @property
    def peaks(self) -> list[tuple[Phase, int, int]]:
        """(phase, bytes that it needs, bytes that there are): of the phase that needs most of a device, which is left
        out on a CPU, and of the one that needs most of a host."""
        found = []
        for kind, memory in (("device", self.device_memory), ("host", self.host_memory)):
            needs = [getattr(self.needs(phase), kind) for phase in self.phases]
            found.append((self.phases[needs.index(max(needs))], max(needs), memory))
        return found if self.device_memory else found[1:]

    @property
    def missing(self) -> int:
        """Bytes of a device and of a host that are too few, if `MARGIN` of both stays free."""
        return sum(max(0, needs - usable(memory)) for _, needs, memory in self.peaks)

    @property
    def fits(self) -> bool:
        return self.missing == 0

    def shortages(self) -> list[str]:
        """One line for each kind of memory that is too small; empty if the run fits."""
        of_host = f"of host memory for {counted(self.ranks_per_node, 'rank')}"
        return [
            f"the phase '{phase.name}' needs about {_gib(needs)} {what}, and {_gib(usable(memory))} of {_gib(memory)} "
            "are to be used"
            for (phase, needs, memory), what in zip(reversed(self.peaks), (of_host, "of a device"), strict=False)
            if needs > usable(memory)
        ][::-1]

    def peak_text(self) -> str:
        *device, host = (f"{_gib(needs)} of {_gib(memory)}" for _, needs, memory in self.peaks)
        return ", ".join([*(f"{each} per device" for each in device), f"{host} of host memory"])


def usable(memory: int) -> int:
    """Bytes of a device's or host's memory that a plan may need."""
    return int((1 - MARGIN) * memory)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def plan_step(
    config: StepConfig, model_configs: Mapping[str, PretrainedConfig], ranks: int, device_memory: int, host_memory: int,
    ranks_per_node: int | None = None, sleeps: bool | None = None,
) -> Plan:  # fmt: skip
    """Plan a step. Nothing is loaded. `model_configs`: see `read_model_configs`; memory as in `Plan`; `ranks_per_node`
    None: all; `sleeps`: whether `--sleep_in_rollout` moves tensors, None: on a GPU."""
    per_node, on_gpu = ranks_per_node or ranks, device_memory > 0
    own = device_memory if on_gpu else host_memory // per_node
    roles, rows = roles_of(config, model_configs, ranks, own, on_gpu), 0
    if isinstance(config, PPOConfig):
        steps = config.schedule.max_steps or 1  # the data are not read, so how long the run is is not known
        plan = plan_ppo(config.ppo, MANY_PROMPTS, ranks, 0, config.memory.sequence_parallel_size, steps, on_gpu)
        of_tensors = int((usable(own) - GPU_CONTEXT) / (1 + FRAGMENTATION)) if on_gpu else usable(own)
        asleep = config.ppo_memory.sleep_in_rollout and (on_gpu if sleeps is None else sleeps)
        phases, rows = ppo_phases(config, plan, roles, model_configs["actor"], of_tensors, asleep)
    else:
        phases = supervised_phases(config, roles[0])
    return Plan(phases, roles, rows, ranks, per_node, device_memory, host_memory)


def roles_of(
    config: StepConfig, models: Mapping[str, PretrainedConfig], ranks: int, device_memory: int, on_gpu: bool
) -> list[Role]:
    """The models that a step holds; the actor is the first of step 3. `device_memory`: bytes of a rank's device, or on
    a CPU its share of the host's."""
    flags, dtype, roles = flatten(config), config.run.dtype, list[Role]()
    counted_as = replace(config.adapters, lora_dropout=0.0, load_in_4bit=False, load_in_8bit=False)
    bits = 4 if flags["load_in_4bit"] else 8 if flags["load_in_8bit"] else 0
    for name, model in models.items():
        scalar = name in ("critic", "reward") or (isinstance(config, FitConfig) and config.has_head)
        prefix, shared, adapter = {"model": "", "actor": "actor_", "critic": "critic_"}.get(name), 0, None
        if prefix is not None:  # it trains
            adapter = adapter_settings(config.lora, counted_as, prefix)
        size = parts_of(model, dtype, scalar, adapter, on_gpu)
        if prefix is not None:
            made = config_of_run(config, flags[f"{prefix}zero_stage"], ranks, "cuda" if on_gpu else "cpu")
            if name == "critic" and flags["share_base"]:
                shared = size.total - size.trained
        else:
            first, kind = roles[0], "teacher" if name.startswith("teacher") else name
            stage = flags["critic_zero_stage"] if kind == "reward" else first.stage
            if kind == "reference" and flags["ref_model_name_or_path"] is None:
                assert isinstance(config, PPOConfig)
                if config.actor_base_is_frozen:
                    shared = min(first.parts.total - first.parts.trained, size.total)
            elif kind == "reward" and flags["share_base"]:
                shared = size.total - size.head
            offloads = flags[f"offload_{kind}_model"]
            made = eval_config(first.stage if shared else stage, dtype, offloads, ranks)
        zero = made["zero_optimization"]
        on_host = {
            part: (zero.get(f"offload_{part}") or {}).get("device", "none") != "none" for part in ("optimizer", "param")
        }
        by_layer = name == "actor" and flags["unpin_actor_parameters"]
        roles.append(Role(
            name, size, dtype, ranks, zero["stage"], trains=prefix is not None,
            checkpoints=prefix is not None and flags[f"{prefix}gradient_checkpointing"],
            offloads_optimizer=zero["stage"] > 0 and on_host["optimizer"],
            offloads_weights=zero["stage"] == 3 and on_host["param"],
            kept_whole=not by_layer and may_be_whole(made, ITEMSIZE[dtype] * size.total, ranks, device_memory),
            shared=shared, on_gpu=on_gpu, bits=bits if size.adapted else 0,
            muon=size.matrices if prefix is not None and config.run.optimizer == "muon" else 0,
        ))  # fmt: skip
    return roles


def show_memory_plan(config: StepConfig) -> None:
    """Log the expected peak of a run that is about to train, and warn if it does not fit. If a model cannot be counted,
    there is no plan; if there is no such model, or flags do not fit together, the run itself says so."""
    if config.validate_only:
        return
    quiet_libraries()
    try:
        models = read_model_configs(config)
    except UserError:
        return
    device = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if dist.on_gpu() else 0
    with attempt() as tried:  # the flags are not checked against the models and the ranks yet
        plan = plan_step(config, models, dist.world_size(), device, host_memory(), dist.local_world_size())
    if tried.problem is not None:
        logger().warning(f"no memory plan: {in_one_line(tried.problem)}")
        return
    where = f"phase '{plan.peaks[0][0].name}'; python -m dschat_ppo.tools.plan shows the parts"
    logger().info(f"expected peak: {plan.peak_text()} ({where})")
    if shortages := plan.shortages():
        logger().warning(f"may run out of memory: {'; '.join(shortages)}")


def full_text(plan: Plan, title: str) -> str:
    """The table of a plan, and whether it fits."""
    nodes = -(-plan.ranks // plan.ranks_per_node)
    where = f"{plan.ranks} x " + (f"GPU of {plan.device_memory / GIB:.0f} GiB" if plan.device_memory else "CPU")
    each_machine = f" on each of {nodes} machines" if nodes > 1 else ""
    lines = [f"{title} on {where}, {plan.host_memory / GIB:.0f} GiB of host memory{each_machine}", ""]
    lines += ["GiB of one rank at the peak of each phase; 'all': what a device and a host need, libraries included;"]
    lines += ["a model that holds less than 0.005 GiB in a phase has no line there"]
    lines += [_memory_table(plan), ""]
    lines += [f"It does not fit: {each}." for each in plan.shortages()] or ["It fits."]
    if plan.rows:
        lines.append(f"A rank decodes {counted(plan.rows, 'sequence')} at a time.")
    return "\n".join(lines)


def _memory_table(plan: Plan) -> str:
    """GiB of a rank by phase, role and part; a line "all" for each phase, with what a device and a host need."""
    form = "{:18} {:10}" + " {:>11}" * len(PARTS) + " {:>9}" * 2
    lines = [form.format("phase", "role", *PARTS, "device", "host")]
    lines.append("-" * len(lines[0]))
    for phase in plan.phases:
        title = phase.name
        for role in [*dict.fromkeys(role for role, _ in phase.held), None]:
            parts, total = [phase.total(role, part) for part in PARTS], phase.total(role) if role else plan.needs(phase)
            sizes = [*(each.device + each.host for each in parts), total.device, total.host]
            shown = [f"{size / GIB:.2f}" if abs(size) >= 0.005 * GIB else "" for size in sizes]
            if role is None or any(shown):
                lines.append(form.format(title, role or "all", *shown).rstrip())
                title = ""
    return "\n".join(lines)
