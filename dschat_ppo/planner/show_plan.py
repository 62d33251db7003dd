"""The plan of a run on this machine, for its start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dschat_ppo.common import dist
from dschat_ppo.common.host_memory import host_memory
from dschat_ppo.common.logging import logger
from dschat_ppo.planner.config_numbers import PlanError
from dschat_ppo.planner.hardware import DEFAULT_GPU, HARDWARE, Hardware
from dschat_ppo.planner.model_parts import read_model_configs
from dschat_ppo.planner.plan_step import plan_step


def hardware_here() -> tuple[Hardware, int]:
    """The kind of this rank's device, and the bytes of its memory (on a CPU, of the host)."""
    if not dist.on_gpu():
        return HARDWARE["cpu"], host_memory()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = properties.name.lower().replace(" ", "")
    named = [part for part in HARDWARE.values() if part.on_gpu and part.name.split("-")[0] in name]
    nearest = min(named or [HARDWARE[DEFAULT_GPU]], key=lambda part: abs(part.memory - properties.total_memory))
    return replace(nearest, memory=properties.total_memory), properties.total_memory


def show_memory_plan(config: Any) -> None:
    """Log the expected peak on rank 0, and warn if it does not fit. Collective: names of models are resolved.

    The run continues without a plan if the planner does not understand the configuration of a model.

    Raises:
        UserError: see `read_model_configs` and `plan_step`.
    """
    models = read_model_configs(config)
    if not dist.is_main():
        return
    hardware, memory = hardware_here()
    try:
        plan = plan_step(config, models, dist.world_size(), memory, host_memory(), hardware, dist.local_world_size())
    except PlanError as problem:
        logger().warning(f"no memory plan: {problem}")
        return
    expected, *shortages = plan.short_lines()
    logger().info(expected)
    for line in shortages:
        logger().warning(line)
