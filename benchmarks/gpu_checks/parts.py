"""Names, time limits and targets of the parts of `gpu.sh`, and where a part keeps what it finds.
Imports no torch."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Part:
    """One part: `function` of `gpu_checks.MODULE`, called with findings, whether sizes are tiny,
    and `arguments`."""

    module: str
    function: str
    seconds: int  # its time limit
    what: str
    arguments: tuple[str, ...] = ()
    extra: bool = False  # runs only where `--only` names it


LIMIT = 585  # seconds of all parts that run unasked: theirs add up to it at most

# in the order of their worth: if the time is up, the last ones are missing
PARTS = {
    "kernels": Part(
        "kernels",
        "compare_kernels",
        45,
        "each kernel at the sizes of a model: error, time, bandwidth",
    ),
    "parity": Part(
        "parity",
        "parity",
        80,
        "generation and scoring against plain transformers, in fp32 and bf16",
    ),
    "rollout_small": Part(
        "speed",
        "rollout",
        95,
        "tokens/s of 0.5 B weights, with the kernels and without, and where the time goes",
        ("qwen2-0.5b",),
    ),
    "grpo": Part(
        "speed",
        "steps",
        95,
        "GRPO steps, two models of 1.5 B weights, likewise",
        ("grpo",),
    ),
    "ppo": Part(
        "speed",
        "steps",
        95,
        "PPO steps, four models of 1.5 B weights (0.5 B below 100 GiB), likewise",
        ("ppo",),
    ),
    "machine": Part(
        "speed", "limits", 30, "bandwidth, matrix products, attention at shapes not seen before"
    ),
    "trajectory": Part(
        "trajectory",
        "trajectory",
        95,
        "SFT, PPO and GRPO in fp32 against the same runs on the CPU",
    ),
    "waits": Part(
        "waits", "waits", 50, "waits of the host for the GPU, per token and per micro-batch"
    ),
    "resume": Part(
        "trajectory",
        "resume",
        75,
        "a resumed PPO run against two uninterrupted ones, in bf16",
        extra=True,
    ),
    "grpo_large": Part(
        "speed",
        "steps",
        95,
        "GRPO steps with micro-batches of 16,384 tokens",
        ("grpo", "qwen2-1.5b", "16384"),
        extra=True,
    ),
    "rollout_7b": Part(
        "speed",
        "rollout",
        130,
        "tokens/s of 7 B weights with 4 key heads",
        ("qwen2-7b",),
        extra=True,
    ),
    "rollout_qwen3": Part(
        "speed", "rollout", 95, "tokens/s of Qwen3 1.7 B", ("qwen3-1.7b",), extra=True
    ),
    "grpo_qwen3": Part(
        "speed", "steps", 95, "GRPO steps of Qwen3 1.7 B", ("grpo", "qwen3-1.7b"), extra=True
    ),
    "rollout_gpt2": Part(
        "speed", "one_row", 45, "tokens/s of one row of GPT-2, greedy", ("gpt2-124m",), extra=True
    ),
    "rollout_large": Part(
        "speed",
        "rollout",
        130,
        "tokens/s of 7 B weights without grouped heads",
        ("llama-7b",),
        extra=True,
    ),
}


@dataclass(frozen=True)
class Target:
    """A number that should be at least, or at most, this. `right`: it is a matter of right or
    wrong, not of speed."""

    path: str  # PART.ENTRY.NAME in the results
    at_least: float | None = None
    at_most: float | None = None
    right: bool = False

    def is_met(self, value: Any) -> bool:
        """Whether a number that was found meets it."""
        if not isinstance(value, (int, float)):
            return False
        low = self.at_least is None or value >= self.at_least
        return low and (self.at_most is None or value <= self.at_most)


TARGETS = (
    Target("kernels.wrong", at_most=0, right=True),
    Target("kernels.slowest_tb_s", at_least=2),
    Target("parity.architectures.wrong", at_most=0, right=True),
    Target("parity.fp32.ok", at_least=1, right=True),
    Target("parity.bf16.ok", at_least=1, right=True),
    Target("trajectory.sft.first_step", at_most=1e-3, right=True),
    Target("trajectory.sft.all_steps", at_most=1e-3, right=True),
    Target("trajectory.ppo.first_step", at_most=1e-3, right=True),
    Target("trajectory.grpo.first_step", at_most=1e-3, right=True),
    Target("resume.compared.beyond_again", at_most=0, right=True),
    Target("machine.attention.new_shape_ms", at_most=5),
    # at 0.5 B the products of the layers alone take longer than the limit: 0.6 is out of reach
    Target("rollout_small.ours_64.share_of_limit", at_least=0.25),
    Target("rollout_small.ratio_to_transformers", at_least=5),
    Target("rollout_small.ours_64.captures_first", at_least=1),
    Target("rollout_small.ours_64.captures_again", at_most=0),
    Target("rollout_small.profile.launches_per_token", at_most=420),  # 24 layers of 12, and 112
    Target("rollout_small.profile.idle_share", at_most=0.1),
    # 0.7 times the 767 tokens/s that are published of vLLM on an H200
    Target("rollout_gpt2.ours_1.tokens_per_s", at_least=540),
    Target("rollout_7b.ours_64.share_of_limit", at_least=0.6),
    Target("rollout_large.ours_64.share_of_limit", at_least=0.6),
    Target(
        "rollout_large.ratio_to_transformers", at_least=2
    ),  # memory bandwidth allows 3.4 on an H100
    Target(
        "rollout_large.ours_64.captures_first", at_least=1
    ),  # and again: its cache is too large to be kept
    Target("ppo.last_step.score_mfu", at_least=0.45),
    Target("ppo.last_step.train_mfu", at_least=0.4),
    Target("ppo.profile.train.idle_share", at_most=0.15),
    Target("ppo.last_step.update_peak_to_plan", at_least=0.95, at_most=1.05),
    Target("ppo.last_step.captures", at_most=0),
    Target("grpo.last_step.score_mfu", at_least=0.45),
    Target("grpo.last_step.train_mfu", at_least=0.4),
    Target("grpo.profile.train.idle_share", at_most=0.15),
    Target("grpo.last_step.update_peak_to_plan", at_least=0.95, at_most=1.05),
    Target("grpo.last_step.captures", at_most=0),
    Target(
        "waits.rollout.per_token", at_most=2 / 8
    ),  # a poll of 8 tokens copies the rows, and reads their ends
    # those of an update and of the layouts before its first pass, shared by its micro-batches
    Target("waits.step.train_per_micro_batch", at_most=8),
)


def at(found: dict[str, Any], path: str) -> Any:
    """The value at a path such as "ppo.last_step.captures"; None if there is none."""
    value: Any = found
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def missed(found: dict[str, Any], right_only: bool) -> list[dict[str, Any]]:
    """The targets of the parts in `found` that are not met; `right_only` leaves those of speed
    out."""
    lines = []
    for target in TARGETS:
        value = at(found, target.path)
        if (
            target.path.split(".")[0] in found
            and (target.right or not right_only)
            and not target.is_met(value)
        ):
            bounds = {"at_least": target.at_least, "at_most": target.at_most}
            given = {name: bound for name, bound in bounds.items() if bound is not None}
            lines.append({"path": target.path, "is": value, **given, "right": target.right})
    return lines


class Findings:
    """What a part has found so far, in a file that is always whole."""

    def __init__(self, file: Path):
        self.file = file
        self.found: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Keep a number, or a dict of them."""
        self.found[name] = value
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.found), encoding="utf-8")
        partial.replace(self.file)

    def measure(self, name: str, run: Callable[[], Any]) -> Any:
        """Keep what `run` returns; if it fails, say so in its place, and let the part continue.
        Returns that, or {}."""
        try:
            value = run()
        except Exception as problem:  # noqa: BLE001  one number that cannot be had must not cost the others
            traceback.print_exc()
            self.add(name, {"failed": f"{type(problem).__name__}: {problem}"[:300]})
            return {}
        self.add(name, value)
        return value
