"""PPO and GRPO steps: seconds by phase, use of the device's arithmetic, peak memory, captured graphs."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import SHAPES, Workload, config_of, workload
from ppo_parts import GRPO, make_ppo, ppo_step, save_models
from torch import nn
from transformers import PretrainedConfig

from dschat_ppo.common.phases import current_phase
from dschat_ppo.ppo.state import PPOComponents
from dschat_ppo.run.process_group import init_process_group
from gpu_checks.machine import matmul_rate
from gpu_checks.run_part import Findings

GIB = 2**30
STEPS = 3  # the first one captures, compiles and allocates
LARGE = 100 * GIB  # of a device that four models of 1.5 B weights fit into


@dataclass(frozen=True)
class Setting:
    """Sizes of a PPO step."""

    model: PretrainedConfig
    work: Workload
    flags: list[str]

    @classmethod
    def of(cls, algorithm: str, tiny: bool, memory: int) -> Setting:
        """PPO: 64 prompts x 512 + 512 tokens; models of 0.5 B weights on a device of less than `LARGE` bytes. GRPO: 16
        prompts of 384 tokens x 8 answers of 64."""
        shape = "qwen2-0.5b" if algorithm == "ppo" and memory < LARGE else "qwen2-1.5b"
        model, shrink = (config_of(320, 2, 128), 16) if tiny else (SHAPES[shape], 1)
        name, prompts, flags = ("long", 64, []) if algorithm == "ppo" else ("group", 16, GRPO)
        budget = ["--micro_batch_tokens", str(8192 // shrink)]
        return cls(model, workload(name, model.vocab_size, max(2, prompts // shrink), shrink), [*flags, *budget])


class PassCounter:
    """Tokens that run through each model, padding included, by phase and with or without gradients.

    Rollouts are not counted: the hybrid engine takes the hooks off for them.
    """

    def __init__(self, ppo: PPOComponents):
        self.tokens: Counter[tuple[str, str, bool]] = Counter()
        self.passes: Counter[str] = Counter()  # by phase, of all models together
        engines = ppo.engines
        self.engines = {"actor": engines.actor, "reference": engines.reference, "critic": engines.critic,
                        "reward": engines.reward}  # fmt: skip
        for role, engine in self.engines.items():
            if engine is not None:
                engine.module.backbone.register_forward_pre_hook(partial(self._count, role), with_kwargs=True)

    def _count(self, role: str, module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        self.passes[current_phase()] += 1
        self.tokens[current_phase(), role, torch.is_grad_enabled()] += named["input_ids"].numel()

    def flops(self, phase: str, work: Workload) -> float:
        """Model FLOPs of a phase: 2 per weight and token without gradients, 6 with; the actor's and the reference's
        heads only at response tokens. Attention, padding and repeated work do not count. A prompt that is computed once
        for all its answers counts once."""
        prompts = int(work.prompts.prompt_mask.sum())
        by_rows, shared, total = prompts * work.samples + work.tokens, prompts + work.tokens, 0.0
        for (name, role, gradients), tokens in self.tokens.items():
            if name == phase:
                useful = min(tokens, by_rows if tokens >= by_rows else shared)
                body, head = weights_of(self.engines[role].module.backbone)
                head *= role in ("actor", "reference")
                total += (6 if gradients else 2) * (body * useful + head * work.tokens)
        return total


def weights_of(backbone: Any) -> tuple[int, int]:
    """Weights of the layers of a backbone, and of a head as large as its table of embeddings."""

    def count(module: nn.Module) -> int:
        return sum(getattr(weight, "ds_numel", weight.numel()) for weight in module.parameters())

    table = count(backbone.get_input_embeddings())
    return count(backbone) - table, table


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU; 0 on a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def memory() -> dict[str, float]:
    """GiB that the allocator holds at most, and how often it ran out and freed its cache."""
    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    return {"reserved_gib": stats["reserved_bytes.all.peak"] / GIB, "retries": stats["num_alloc_retries"]}


def steps(found: Findings, tiny: bool, algorithm: str) -> None:
    """Some steps on random models; the last one counts."""
    device = init_process_group()
    setting = Setting.of(algorithm, tiny, memory_of(device))
    folder, work = Path.cwd() / algorithm, setting.work
    save_models(folder, setting.model, device.type, reward=algorithm == "ppo")
    count, longest = work.prompts.prompt_ids.shape
    ppo = make_ppo(folder, count, work.samples, (longest, int(work.answer_lengths.max())), setting.flags)
    shutil.rmtree(folder)  # gigabytes
    counter, rate = PassCounter(ppo), matmul_rate(device, tiny)
    held = torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else None
    found.add("setting", {
        "weights": sum(weights_of(ppo.engines.actor.module.backbone)), "rows": len(work.answer_lengths),
        "answer_tokens": work.tokens, "matmul_tflop_s": rate / 1e12, "models_gib": held,
    })  # fmt: skip
    for step in range(1, STEPS + 1):
        captured = ppo.collection.generator.graphs.recorder.captures
        counter.tokens.clear()
        ppo.clock.take()
        ppo_step(ppo, work, step)
        captured = ppo.collection.generator.graphs.recorder.captures - captured
        seconds, _, peaks = ppo.clock.take()
        numbers = {"seconds": seconds, "samples_per_s": len(work.answer_lengths) / sum(seconds.values())}
        numbers |= {"peak_gib": peaks, "captures": captured, **memory()}
        numbers["rollout_tokens_per_s"] = work.tokens / seconds["rollout"]
        numbers["tokens_run"] = {
            f"{phase}/{role}": tokens for (phase, role, _), tokens in sorted(counter.tokens.items())
        }
        for phase in ("score", "train"):
            numbers[f"{phase}_mfu"] = counter.flops(phase, work) / seconds.get(phase, math.inf) / rate
        found.add("last_step" if step == STEPS else f"step_{step}", numbers)
