"""The plan of a run: memory by phase, whether it fits, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.on_policy import old_logprobs_source
from dschat_ppo.config.steps import PPOConfig
from dschat_ppo.planner.hardware import GIB, HARDWARE, Hardware
from dschat_ppo.planner.phase import Phase
from dschat_ppo.planner.role_memory import Memory, Role
from dschat_ppo.planner.step_phases import generates_by_layer, ppo_phases, supervised_phases
from dschat_ppo.planner.step_roles import roles_of
from dschat_ppo.planner.step_time import StepTime, ppo_time, supervised_time

MANY_PROMPTS = 10**6  # of a data set that is not read: enough for any batch
# Share of a device's and of a host's memory that a plan which fits leaves free. Peaks were planned up to 8 % too low
# (docs/memory.md), a card of 80 GiB has about 79 for its programs, and a host also holds the system and its page cache.
MARGIN = 0.1
HOST_PROCESS = int(0.75 * GIB)  # resident memory of a rank without models: libraries (measured on Linux, CPU)


@dataclass(frozen=True)
class Plan:
    """What a run needs, by arithmetic from its flags and model configurations.

    Attributes:
        phases: with bytes of one rank.
        roles: the models.
        time: of a PPO step, or of an optimizer step.
        rows: sequences that a rank decodes at a time; 0 without generation.
        hardware: the device.
        ranks: of the run.
        ranks_per_node: that share the memory of a host.
        device_memory: bytes of a rank's device; on a CPU, of its share of the host.
        host_memory: bytes of a host.
    """

    phases: list[Phase]
    roles: list[Role]
    time: StepTime
    rows: int
    hardware: Hardware
    ranks: int
    ranks_per_node: int
    device_memory: int
    host_memory: int

    def needs(self, phase: Phase) -> Memory:
        """Bytes of a rank's device, and of a host, in a phase, with what is not tensors (`Hardware`).

        On a CPU, host memory is the device's, so that all counts as the host's.
        """
        total, ranks = phase.total(), self.ranks_per_node
        if not self.hardware.on_gpu:
            return Memory(0, ranks * (total.device + total.host + HOST_PROCESS) + phase.once)
        device = int(total.device * (1 + self.hardware.fragmentation)) + self.hardware.context
        return Memory(device, ranks * (total.host + HOST_PROCESS) + phase.once)

    @property
    def device_peak(self) -> Phase:
        """The phase that needs most of the device (on a CPU, of the host)."""
        on_gpu = self.hardware.on_gpu
        return max(self.phases, key=lambda phase: self.needs(phase).device if on_gpu else self.needs(phase).host)

    @property
    def host_peak(self) -> Phase:
        """The phase that needs most of the host."""
        return max(self.phases, key=lambda phase: self.needs(phase).host)

    @property
    def fits(self) -> bool:
        """Whether each phase fits into device and host memory, and leaves `MARGIN` of both free."""
        return not self.shortages()

    def shortages(self) -> list[str]:
        """One line for each kind of memory that is too small; empty if the run fits."""
        device, host, ranks = self.device_peak, self.host_peak, self.ranks_per_node
        found = []
        if self.hardware.on_gpu and self.needs(device).device > usable(self.device_memory):
            found.append(
                f"the phase '{device.name}' needs about {_gib(self.needs(device).device)} of a device, and "
                f"{_gib(usable(self.device_memory))} of its {_gib(self.device_memory)} are to be used"
            )
        if self.needs(host).host > usable(self.host_memory):
            found.append(
                f"the phase '{host.name}' needs about {_gib(self.needs(host).host)} of host memory for {ranks} "
                f"rank{'s' if ranks > 1 else ''}, and {_gib(usable(self.host_memory))} of "
                f"{_gib(self.host_memory)} are to be used"
            )
        return found

    def short_lines(self) -> list[str]:
        """One or two lines for the start of a run: the peak, and what is too small."""
        peak = self.device_peak
        if self.hardware.on_gpu:
            text = f"{_gib(self.needs(peak).device)} of {_gib(self.device_memory)} per device"
            text += f", {_gib(self.needs(self.host_peak).host)} of {_gib(self.host_memory)} of host memory"
        else:
            text = f"{_gib(self.needs(peak).host)} of {_gib(self.host_memory)} of host memory"
        lines = [f"expected peak: {text} (phase '{peak.name}'; python -m dschat_ppo.tools.plan shows the parts)"]
        if self.shortages():
            lines.append(f"may run out of memory: {'; '.join(self.shortages())}")
        return lines


def usable(memory: int) -> int:
    """Bytes of a device's or host's memory that a plan may need."""
    return int((1 - MARGIN) * memory)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def plan_step(
    config: Any, model_configs: Mapping[str, PretrainedConfig], world_size: int, device_memory_bytes: int,
    host_memory_bytes: int, hardware: Hardware = HARDWARE["cpu"], ranks_per_node: int | None = None,
    sleeps: bool | None = None,
) -> Plan:  # fmt: skip
    """Plan a step. Nothing is loaded.

    Args:
        config: `SFTConfig`, `PreferenceConfig` or `PPOConfig`.
        model_configs: by role, see `read_model_configs`.
        world_size: ranks of the run.
        device_memory_bytes: of a rank's device; not used on a CPU, where ranks divide host memory.
        host_memory_bytes: of each host.
        hardware: the kind of device.
        ranks_per_node: ranks that share a host; None: all.
        sleeps: whether `--sleep_in_rollout` moves tensors; None: on a GPU.

    Raises:
        UserError: batch sizes do not fit each other, or `--deepspeed_config` cannot be used.
    """
    per_node, shared = ranks_per_node or world_size, config.memory.sequence_parallel_size
    if per_node < world_size:  # ranks move bytes as fast as the slowest link
        hardware = replace(hardware, link=min(hardware.link, hardware.node_link))
    own = device_memory_bytes if hardware.on_gpu else host_memory_bytes // per_node
    roles = roles_of(config, model_configs, world_size, own, hardware.on_gpu)
    rows = 0
    if isinstance(config, PPOConfig):
        steps = config.schedule.max_steps or 1  # the data are not read, so how long the run is is not known
        plan = plan_ppo(config.ppo, MANY_PROMPTS, world_size, 0, shared, steps)
        of_tensors = int((usable(own) - hardware.context) / (1 + hardware.fragmentation))
        asleep = config.ppo_memory.sleep_in_rollout and (hardware.on_gpu if sleeps is None else sleeps)
        phases, rows = ppo_phases(config, plan, roles, model_configs["actor"], of_tensors, asleep)
        source, _ = old_logprobs_source(config, plan, [each.to_dict() for each in model_configs.values()])
        by_layer = generates_by_layer(config, roles[0], model_configs["actor"])
        time = ppo_time(config, plan, roles, hardware, rows, source, by_layer)
    else:
        phases = supervised_phases(config, roles[0])
        time = supervised_time(config, roles[0], hardware)
    return Plan(phases, roles, time, rows, hardware, world_size, per_node, own, host_memory_bytes)
