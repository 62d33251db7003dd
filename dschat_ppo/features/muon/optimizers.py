"""Muon for the matrices of the decoder layers, and AdamW for the rest, as DeepSpeed has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from dschat_ppo.config.step_config import StepConfig
from dschat_ppo.engine.optimizers import OptimizerKind
from dschat_ppo.features.muon.flags import MuonFlags

# As its author published it: https://kellerjordan.github.io/posts/muon/. DeepSpeed's default
# iteration is another.
MUON = {"momentum": 0.95, "ns_method": "standard"}
MARK = "use_muon"  # by which DeepSpeed knows the groups of Muon


def build_muon(groups: Sequence[dict[str, Any]], adamw: dict[str, Any]) -> torch.optim.Optimizer:
    """Muon for the groups that have `MARK`, and AdamW with these options for the others."""
    complete_groups = []
    for group in groups:
        defaults = {MARK: False, **adamw}
        if MARK in group:
            defaults = MUON
        complete_groups.append(defaults | group)
    module = import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    optimizer: torch.optim.Optimizer = module.MuonWithAuxAdam(
        complete_groups, torch.optim.AdamW, adamw
    )
    return optimizer


def is_layer_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon trains this parameter: a matrix that multiplies in a decoder layer, which a
    number in the name shows, and not the single row of a gate. DeepSpeed's own rule, by "embed" and
    "lm_head" in the name, takes score heads, and embeddings of GPT-2."""
    return len(shape) == 2 and min(shape) > 1 and re.search(r"\.\d+\..*weight$", name) is not None


def learning_rate(config: StepConfig) -> float | None:
    """`--muon_learning_rate`."""
    return config.of(MuonFlags).muon_learning_rate


def needed_settings(config: StepConfig) -> list[tuple[str, str, Any]]:
    """(setting of DeepSpeed, flag, value) that a file could use to turn off Muon, or what
    `refusals` refuses."""
    settings: list[tuple[str, str, Any]] = [
        ("optimizer.params.muon_lr", "muon_learning_rate", learning_rate(config))
    ]
    for key, value in MUON.items():
        settings.append((f"optimizer.params.{key}", f"optimizer muon's {key}", value))
    for model, stage in config.stages.items():
        settings.append(("zero_optimization.stage", f"{model}zero_stage", stage))
    settings += [
        ("zero_optimization.cpu_offload", "optimizer muon's offload", False),
        ("zero_optimization.offload_optimizer.device", "optimizer muon's device", "none"),
        ("data_types.grad_accum_dtype", "optimizer muon's sums of gradients", "fp32"),
    ]
    return settings


OPTIMIZER = OptimizerKind(
    name="muon",
    types=("muon",),
    build=build_muon,
    takes=is_layer_matrix,
    mark=MARK,
    learning_rate=learning_rate,
    rate_name="muon_lr",
    rate_label="Muon lr",
    state_names=("momentum_buffer",),
    needed_settings=needed_settings,
)
