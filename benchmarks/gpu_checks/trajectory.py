"""Training runs on this device against the same runs on the CPU, and resumed against uninterrupted ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gpu_checks.run_part import Findings
from gpu_checks.train_runs import largest_difference, metrics_of, train

COMPARED = ("sft", "ppo", "grpo")
FURTHER = 3
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # which a process group leaves behind


def in_another_process(folder: Path, names: tuple[str, ...], **env: str) -> subprocess.Popen[bytes]:
    """Start `train_runs` on the runs `names`."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return subprocess.Popen([sys.executable, "-m", "gpu_checks.train_runs", folder, *names], env=inherited | env)


def trajectory(found: Findings, tiny: bool) -> None:
    """SFT, PPO and GRPO in fp32 on this device and on the CPU, at the same time.

    A PPO step makes four updates on the same answers, so that of the first step compares four optimizer steps. In the
    next rollout the smallest difference of a weight may draw another token: its metrics are shown, and not judged.
    """
    here, cpu = Path.cwd() / "device", Path.cwd() / "cpu"
    other = in_another_process(cpu, COMPARED, DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="2")
    train(here, list(COMPARED))
    if other.wait():
        raise RuntimeError(f"the runs on the CPU ended with exit code {other.returncode}")
    for name in COMPARED:
        found.add(name, compared(metrics_of(cpu / name), metrics_of(here / name)))


def compared(expected: dict[int, dict[str, float]], actual: dict[int, dict[str, float]]) -> dict[str, Any]:
    """The largest difference in the first step and in all steps, and the metrics in which they are."""
    by_step = {step: largest_difference(expected.get(step, {}), actual.get(step, {})) for step in expected | actual}
    first, worst = by_step[min(by_step)], max(by_step.values())
    return {"first_step": first[0], "in": first[1], "all_steps": worst[0], "all_in": worst[1], "steps": len(by_step)}


def weights_apart(one: Path, other: Path) -> float:
    """The largest absolute difference of a saved weight of the actors of two runs."""
    pairs = zip(load_file(one).items(), load_file(other).items(), strict=True)
    return max(float((x.float() - y.float()).abs().max()) for (_, x), (_, y) in pairs)


def resume(found: Findings, tiny: bool) -> None:
    """A PPO run, on a GPU in bf16, the same again, and one resumed in a new process from the checkpoint in its middle.

    On a CPU all three are equal. On a GPU sums in another order may make equal runs differ, and chance decides which is
    further from the first: then the resumed run must be at most `FURTHER` times as far from it as the second one.
    """
    folder = Path.cwd() / "resume"
    train(folder, ["whole", "again"])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if code := in_another_process(folder, ("resumed",)).wait():
        raise RuntimeError(f"the resumed run ended with exit code {code}")
    whole, apart = metrics_of(folder / "whole"), {}
    for name in ("again", "resumed"):
        metrics = metrics_of(folder / name)
        last = max(whole)
        apart[name] = max(largest_difference(whole[last], metrics[last])[0], weights_of(folder, name))
        found.add(name, {
            "metrics": largest_difference(whole[last], metrics[last])[0], "weights": weights_of(folder, name),
            "steps": sorted(metrics),
        })  # fmt: skip
    found.add("compared", {
        "bit_exact": apart["resumed"] == 0, "beyond_again": beyond_again(apart["again"], apart["resumed"])
    })  # fmt: skip


def beyond_again(again: float, resumed: float) -> float:
    """How much further a resumed run is from the first one than chance explains, if an equal run is `again` from it."""
    return max(0.0, resumed - FURTHER * again)


def weights_of(folder: Path, name: str) -> float:
    """How far the actor of a run is from that of the first."""
    return weights_apart(*(folder / run / "actor" / "model.safetensors" for run in ("whole", name)))
