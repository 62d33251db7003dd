"""What a run prints around its training: the models and the outputs at the start, the results at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger, table
from dschat_ppo.common.paths import shown_path
from dschat_ppo.common.progress import duration
from dschat_ppo.html_report.write_report import report_run
from dschat_ppo.monitor.writers import MODELS, MetricsWriter, write_result
from dschat_ppo.session.next_command import NO_NEXT
from dschat_ppo.types import Engine

VALIDATION = "validation"  # of `--validate_only`: inside --output_dir, where no run of training looks for outputs
CHECKPOINT_BYTES = 12  # of a parameter that trains: its fp32 weight and the two moments of Adam


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model, those of all ranks together."""

    total: int
    trained: int
    shared: int  # those that an earlier model of the list holds

    def __str__(self) -> str:
        text = f"{short_count(self.total)} parameters"
        if self.trained:
            text += f", {100 * self.trained / self.total:.3g} % trained"
        else:
            text += ", frozen"
        return text + (f", {short_count(self.shared)} shared" if self.shared else "")


def model_sizes(modules: Mapping[str, torch.nn.Module]) -> dict[str, ModelSize]:
    """The size of each model."""
    seen: set[int] = set()
    sizes = {}
    for name, module in modules.items():
        own = [(_count(weight), weight.requires_grad, id(weight) in seen) for weight in module.parameters()]
        seen |= {id(parameter) for parameter in module.parameters()}
        sizes[name] = ModelSize(
            sum(count for count, _, _ in own), sum(count for count, trains, _ in own if trains),
            sum(count for count, _, known in own if known),
        )  # fmt: skip
    return sizes


def _count(weight: torch.nn.Parameter) -> int:
    """Elements of a parameter, which ZeRO-3 empties and 4 bits pack in pairs."""
    quantised = getattr(weight, "quant_state", None)
    return int(quantised.shape.numel()) if quantised is not None else int(getattr(weight, "ds_numel", weight.numel()))


def short_count(count: int) -> str:
    """Such as 950, "1.7 M" or "7.24 B"."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 0.9995 * size:  # 999,600 is 1 M, not 1,000 K
            return f"{count / size:.3g} {letter}"
    return str(count)


def show_models(
    roles: Mapping[str, tuple[Engine | None, str | None]], dtype: str, output: Path,
    more: Sequence[tuple[str, str]] = (), trains: bool = True,
) -> None:  # fmt: skip
    """Log the models with their sizes, the devices and the output folder, and write all but the last to `models.json`.
    Warn if no checkpoint fits on its disk. Collective.

    Args:
        roles: role -> its engine, and the folder that it comes from; None: the run has no such model.
        more: further rows, (name, text).
        trains: False if the run only evaluates: then no weight trains.
    """
    modules: dict[str, Any] = {role: engine.module for role, (engine, _) in roles.items() if engine is not None}
    rows = []
    sizes = model_sizes(modules)
    for role, size in sizes.items():
        shown, folder = size if trains else replace(size, trained=0), shown_path(roles[role][1] or "")
        rows.append((role, f"{modules[role].config.model_type}, {shown}, from {folder}"))
    ranks = dist.world_size()
    rows.append(("devices", f"{ranks} {dist.device().type} rank{'s' if ranks > 1 else ''}, {dtype}"))
    rows += more
    logger().info(table("models", [*rows, ("outputs", f"{shown_path(output)} (report.html at the end)")]))
    write_result(output, dict(rows), MODELS)
    if trains and dist.is_main():
        needed = CHECKPOINT_BYTES * sum(size.trained for size in sizes.values()) / dist.machines()  # or on each machine
        if (free := shutil.disk_usage(output).free) < needed:
            logger().warning(
                f"--output_dir {shown_path(output)}: its disk has {free / 2**20:,.1f} MiB left, and a checkpoint takes "
                f"about {needed / 2**20:,.1f} MiB: free space, or name a folder on another disk"
            )


def show_end(
    title: str, steps: str, seconds: float, changes: Mapping[str, tuple[float, float]], saved: Sequence[Path],
    command: str, resumed: bool = False,
) -> None:  # fmt: skip
    """Log what the run has reached, where its models are, and what to run next.

    `steps`: such as "250 optimizer steps"; `seconds` are of this start of the run, which did only the last of them if
    it `resumed`. `changes`: name -> (value before training, value after it). `DSCHAT_PPO_NO_NEXT=1` omits the command.
    """
    spent = duration(seconds)
    rows = [("trained", f"{steps}, {spent} since it resumed" if resumed else f"{steps} in {spent}")]
    rows += [(name, f"{before:.4g} -> {after:.4g}") for name, (before, after) in changes.items()]
    rows += [("" if number else "saved to", shown_path(folder)) for number, folder in enumerate(saved)]
    if os.environ.get(NO_NEXT) != "1":
        rows.append(("next", command))
    logger().info(table(f"{title}: done", rows))


def changes_of(result: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """The numbers `NAME_before` and `NAME_after` of `result.json`; `names`: NAME -> what to call it."""
    return {
        label: (result[f"{name}_before"], result[f"{name}_after"])
        for name, label in names.items()
        if f"{name}_before" in result and f"{name}_after" in result
    }


def write_validation(folder: Path, metrics: dict[str, float], seconds: float) -> dict[str, Any]:
    """Write the metrics as step 0 of `metrics.jsonl`, `result.json` (returned) and the report. Collective."""
    with MetricsWriter(folder, None) as writer:
        writer.write(0, metrics)
    result = {**metrics, "world_size": dist.world_size(), "seconds": round(seconds, 2)}
    write_result(folder, result)
    if dist.is_main():
        report_run(folder)
    logger().info(f"validation: saved to {shown_path(folder)}; nothing was trained")
    return result
