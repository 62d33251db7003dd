"""The cases of `memory.py --planner`: settings whose measured peaks are compared with the planner's.

The comparison takes the largest peak of the second step over its phases. Measured: resident memory
of a rank beyond an idle one, minus the same measurement of a model of 0.3 M parameters (`BASELINES`), which is what the
libraries take while they work. Planned: weights, states, activations and buffers of one rank. On a CPU, device and host
memory are the same, so both count; sleep moves tensors as if there were a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
from measure import markdown

from dschat_ppo.planner.model_parts import read_model_configs
from dschat_ppo.planner.plan_step import plan_step

GIB = 2**30
# phase of `memory.py` -> phases of a plan
SAME = {
    "rollout": "rollout", "score": "scoring", "actor": "actor update", "critic": "critic update",
    "update": "update",
}  # fmt: skip

MEDIUM, LARGE, SMALL = (8192, 8, 768), (8192, 8, 1024), (8192, 8, 512)  # vocabulary, layers, hidden size
_Z2, _Z3 = (f"--actor_zero_stage {stage} --critic_zero_stage {stage}" for stage in (2, 3))
_LORA = "--actor_lora_dim 16 --critic_lora_dim 16 --only_optimize_lora"


@dataclass(frozen=True)
class Case:
    """A run whose peak is measured."""

    step: str  # "ppo", "sft" or "reward"
    flags: str
    ranks: int
    shape: tuple[int, int, int]  # vocabulary, layers, hidden size
    rows: int  # of a rank
    prompt: int  # tokens
    answer: int  # tokens


BASELINES = {
    "baseline, step 3": Case("ppo", _Z2, 2, (512, 1, 128), 1, 8, 4),
    "baseline, step 1": Case("sft", "--zero_stage 2", 2, (512, 1, 128), 1, 8, 4),
}
CASES = {
    **BASELINES,
    "step 3, ZeRO 0, 1 rank": Case("ppo", "", 1, MEDIUM, 8, 64, 32),
    "step 3, ZeRO 0, 1 rank, fp32": Case("ppo", "--dtype fp32", 1, SMALL, 8, 64, 64),
    "step 3, ZeRO 2": Case("ppo", _Z2, 2, LARGE, 4, 64, 64),
    "step 3, ZeRO 3": Case("ppo", _Z3, 2, MEDIUM, 8, 64, 32),
    "step 3, ZeRO 2, optimizer offloaded": Case("ppo", f"{_Z2} --offload_optimizer", 2, MEDIUM, 8, 64, 32),
    "step 3, ZeRO 2, sleep": Case("ppo", f"{_Z2} --sleep_in_rollout", 2, MEDIUM, 8, 64, 32),
    "step 3, ZeRO 2, LoRA": Case("ppo", f"{_Z2} {_LORA}", 2, LARGE, 4, 192, 64),
    "step 3, ZeRO 2, one base": Case("ppo", f"{_Z2} {_LORA} --share_base", 2, LARGE, 4, 192, 64),
    "step 1, ZeRO 0, 1 rank, long rows": Case("sft", "", 1, MEDIUM, 4, 384, 128),
    "step 1, ZeRO 2, packed, checkpointing": Case(
        "sft", "--zero_stage 2 --packing --gradient_checkpointing", 2, LARGE, 4, 384, 128
    ),
    "step 1, ZeRO 3, fp32": Case("sft", "--zero_stage 3 --dtype fp32", 2, MEDIUM, 2, 192, 64),
    "step 2, ZeRO 2": Case("reward", "--zero_stage 2", 2, LARGE, 4, 192, 64),
}


def planned_peaks(config: Any, ranks: int) -> dict[str, float]:
    """GiB of tensors of one rank by phase, under the names of `memory.py`."""
    host = psutil.virtual_memory().total
    plan = plan_step(config, read_model_configs(config), ranks, 0, host, sleeps=True)
    by_phase = {phase.name: phase.total() for phase in plan.phases}
    found = {name: by_phase[phase] for name, phase in SAME.items() if phase in by_phase}
    if "update" in found:  # of steps 1 and 2; `memory.py` calls it by the first role that is updated
        found["actor"] = found.pop("update")
    return {name: (memory.device + memory.host) / GIB for name, memory in found.items()}


def comparison(planned: dict[str, dict[str, float]], results: dict[str, Any]) -> str:
    """The table of docs/memory.md: for each case the phase with the measured peak, both peaks, and their difference."""
    rows, differences = [], []
    for name in (name for name in CASES if name in planned and name not in BASELINES):
        fixed = results["baseline, step 3" if CASES[name].step == "ppo" else "baseline, step 1"]["peak"]
        found = {phase: peak - fixed[phase] for phase, peak in results[name]["peak"].items()}
        phase = max(found, key=lambda phase: found[phase])
        measured, expected = found[phase], max(planned[name].values())
        difference = expected / measured - 1
        differences.append(abs(difference))
        shown = f"{phase} update" if CASES[name].step == "ppo" and phase in ("actor", "critic") else "update"
        shown = phase if phase in ("load", "rollout", "score") else shown
        rows.append([name, shown, f"{expected:.2f}", f"{measured:.2f}", f"{100 * difference:+.0f} %"])
    rows.append(["largest difference", "", "", "", f"{100 * max(differences, default=0.0):.0f} %"])
    return markdown(["case", "phase of the peak", "planned, GiB", "measured, GiB", "difference"], rows)
