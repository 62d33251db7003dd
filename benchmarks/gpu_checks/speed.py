"""What this machine can do, generation against Hugging Face `generate` and memory bandwidth, and
PPO and GRPO steps with their use of the device's arithmetic; with Triton's kernels and without."""

from __future__ import annotations

import math
import shutil
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import transformers
from measure import matmul_rate, read_bandwidth, seconds, wait
from models import SHAPES, Workload, config_of, language_model, workload
from ppo_parts import GRPO, make_ppo, ppo_step, save_models
from rollout import by_transformers, by_us, memory_limit
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_ppo.common.host_memory import host_memory
from dschat_ppo.common.phases import current_phase
from dschat_ppo.features.cuda_graphs.step_recorders import RolloutGraphs
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.planner.model_parts import read_model_configs
from dschat_ppo.planner.plan_step import plan_step
from dschat_ppo.ppo.components import PPOComponents
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.types import repeat_rows
from gpu_checks.parts import Findings
from gpu_checks.profiles import KernelProfile, without_kernels

LENGTHS, ROWS = range(700, 1070, 37), 8


def limits(found: Findings, tiny: bool) -> None:
    """Versions, bandwidth, matrix products and attention, with the settings of a run."""
    device = init_process_group()
    found.add(
        "versions",
        {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "transformers": transformers.__version__,
            "deepspeed": deepspeed.__version__,
        },
    )
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found.add(
            "device",
            {
                "name": torch.cuda.get_device_name(),
                "capability": torch.cuda.get_device_capability(),
                "gib": total / 2**30,
                "free_gib": free / 2**30,
            },
        )
    found.measure("read_tb_s", lambda: read_bandwidth(device) / 1e12)
    found.measure("matmul_tflop_s", lambda: peak_rate(device, tiny) / 1e12)
    found.measure(
        "attention",
        lambda: attention(device, [length // 16 for length in LENGTHS] if tiny else LENGTHS),
    )


def peak_rate(device: torch.device, tiny: bool) -> float:
    """Floating-point operations per second of a large matrix product."""
    width = 128 if tiny else 8192
    return matmul_rate(device, width, width, width)


def attention(device: torch.device, lengths: Any) -> dict[str, Any]:
    """Milliseconds of forward and backward (8 rows, 14 heads over 2, width 64, bf16), and the
    kernels that ran."""

    def run(length: int) -> None:
        query = torch.randn(
            ROWS, 14, length, 64, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        key, value = (
            torch.randn(ROWS, 2, length, 64, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        out.sum().backward()

    run(64)
    new, known = (statistics.median(seconds(partial(run, n)) for n in lengths) for _ in range(2))
    with torch.profiler.profile() as profiler:
        run(lengths[0])
        wait()
    names = {event.key[:80] for event in profiler.key_averages()}
    kernels = sorted(
        name for name in names if any(word in name.lower() for word in ("flash", "cudnn", "fmha"))
    )
    return {"new_shape_ms": 1e3 * new, "known_shape_ms": 1e3 * known, "kernels": kernels[:8]}


def rollout(found: Findings, tiny: bool, shape: str) -> None:
    """64 rows of 512 + 512 tokens, with Triton's kernels and without; the kernels of its steps;
    more rows of varied lengths, nucleus sampling, and `generate` on the first."""
    device = init_process_group()
    config = config_of(512, 2, 128) if tiny else SHAPES[shape]
    theirs, model = (language_model(config, device.type) for _ in range(2))
    use_fast_layers(model)
    lay_flat(model)
    rows, shrink = (4, 32) if tiny else (64, 1)
    work = workload("long", model.config.vocab_size, rows, shrink)
    found.measure("limit_64", lambda: memory_limit(model, work, rows))
    ours = found.measure("ours_64", lambda: measured(model, work, rows))
    if "tokens_per_s" in ours and isinstance(found.found["limit_64"], float):
        found.add(
            "ours_64", ours | {"share_of_limit": ours["tokens_per_s"] / found.found["limit_64"]}
        )
    with without_kernels():
        found.measure("without_kernels_64", lambda: measured(model, work, rows))
    found.measure("profile", lambda: decode_profile(model, work, rows))
    # warm-up
    by_transformers(theirs, replace(work, answer_lengths=work.answer_lengths.clamp_max(4)), rows)
    plain = found.measure(
        "transformers_64",
        lambda: work.tokens / seconds(lambda: by_transformers(theirs, work, rows)),
    )
    if isinstance(plain, float) and "tokens_per_s" in ours:
        found.add("ratio_to_transformers", ours["tokens_per_s"] / plain)
    nucleus = SamplingParameters(top_p=0.9)
    found.measure("top_p_64", lambda: measured(model, work, rows, nucleus))
    found.measure("varied_256", lambda: measured(model, varied(work, 4), 0))


def one_row(found: Findings, tiny: bool, shape: str) -> None:
    """One row of 128 + 32 tokens, greedy, as figures of others are published."""
    device = init_process_group()
    config = config_of(512, 2, 128) if tiny else SHAPES[shape]
    model = language_model(config, device.type)
    use_fast_layers(model)
    lay_flat(model)
    work = workload("fixed", model.config.vocab_size, 1, 8 if tiny else 1)
    work = replace(work, answer_lengths=work.answer_lengths // 4)
    greedy = SamplingParameters(top_k=1)
    found.measure("ours_1", lambda: measured(model, work, 1, greedy))
    found.measure("profile", lambda: decode_profile(model, work, 1))


def decode_profile(model: PreTrainedModel, work: Workload, rows: int) -> dict[str, Any]:
    """The kernels of a rollout of an eighth of the tokens, whose prompts count too. The launches
    per token are what the second half of these tokens adds."""
    profiles = []
    lengths = []
    for divisor in (16, 8):
        answer_lengths = (work.answer_lengths // divisor).clamp_min(1)
        short = replace(work, answer_lengths=answer_lengths)
        graphs = RolloutGraphs()
        by_us(model, short, rows, recorder=graphs)
        with KernelProfile() as kernels:
            by_us(model, short, rows, recorder=graphs)
        profiles.append(kernels)
        lengths.append(int(answer_lengths.max()))
    added = profiles[1].launches.total() - profiles[0].launches.total()
    launches_per_token = added / max(1, lengths[1] - lengths[0])
    return {**profiles[1].summary(), "launches_per_token": launches_per_token}


def lay_flat(model: PreTrainedModel) -> None:
    """Lay the weights side by side in one tensor, as DeepSpeed's optimizers do below ZeRO-3."""
    for matrices in (True, False):
        weights = [weight for weight in model.parameters() if (weight.dim() > 1) is matrices]
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        for weight, place in zip(
            weights, flat.split([weight.numel() for weight in weights]), strict=True
        ):
            weight.data = place.view_as(weight)


def varied(work: Workload, times: int) -> Workload:
    """`times` as many rows, with lognormal lengths up to that of `work`."""
    prompts, most = repeat_rows(work.prompts, times), int(work.answer_lengths.max())
    drawn = np.random.default_rng(1).lognormal(np.log(most / 3), 0.8, len(prompts.prompt_ids))
    return Workload(prompts, 1, torch.from_numpy(np.clip(drawn, 1, most).astype(np.int64)))


def measured(
    model: PreTrainedModel, work: Workload, rows: int, sampling: SamplingParameters | None = None
) -> dict[str, Any]:
    """Three rollouts with `rows` at a time (0: as many as memory allows), and what they captured.
    The second counts; the third says how far to trust it."""
    graphs, times, captures = RolloutGraphs(), [], [0]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        times.append(seconds(lambda: by_us(model, work, rows, sampling, graphs)))
        captures.append(graphs.recorder.captures)
    return {
        "tokens_per_s": work.tokens / times[1],
        "again_tokens_per_s": work.tokens / times[2],
        "seconds": times[1],
        "first_seconds": times[0],
        "captures_first": captures[1],
        "captures_again": captures[2] - captures[1],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30
        if torch.cuda.is_available()
        else None,
    }


GIB = 2**30
STEPS = 3  # the first one captures, compiles and allocates
WITHOUT = 2  # further ones without Triton's kernels
LARGE = 100 * GIB  # of a device that four models of 1.5 B weights fit into


@dataclass(frozen=True)
class Setting:
    """Sizes of a PPO step."""

    model: PretrainedConfig
    work: Workload
    flags: list[str]

    @classmethod
    def of(cls, algorithm: str, tiny: bool, memory: int, shape: str, tokens: int) -> Setting:
        """PPO: 64 prompts x 512 + 512 tokens; models of 0.5 B weights on a device of less than
        `LARGE` bytes. GRPO: 16 prompts of 384 tokens x 8 answers of 64. `tokens` of a
        micro-batch."""
        if algorithm == "ppo" and memory < LARGE:
            shape = "qwen2-0.5b"
        model, shrink = (config_of(320, 2, 128), 16) if tiny else (SHAPES[shape], 1)
        name, prompts, flags = ("long", 64, []) if algorithm == "ppo" else ("group", 16, GRPO)
        budget = ["--micro_batch_tokens", str(tokens // shrink)]
        return cls(
            model,
            workload(name, model.vocab_size, max(2, prompts // shrink), shrink),
            [*flags, *budget],
        )


class PassCounter:
    """Tokens that run through each model, padding included, by phase and with or without gradients.

    Rollouts are not counted: the hybrid engine takes the hooks off for them.
    """

    def __init__(self, ppo: PPOComponents):
        self.tokens: Counter[tuple[str, str, bool]] = Counter()
        self.passes: Counter[str] = Counter()  # by phase, of all models together
        engines = ppo.engines
        self.engines = {
            "actor": engines.actor,
            "reference": engines.reference,
            "critic": engines.critic,
            "reward": engines.reward,
        }
        for role, engine in self.engines.items():
            if engine is not None:
                engine.module.backbone.register_forward_pre_hook(
                    partial(self._count, role), with_kwargs=True
                )

    def _count(self, role: str, module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        self.passes[current_phase()] += 1
        self.tokens[current_phase(), role, torch.is_grad_enabled()] += named["input_ids"].numel()

    def flops(self, phase: str, work: Workload) -> float:
        """Model FLOPs of a phase: 2 per weight and token without gradients, 6 with; the actor's and
        the reference's heads only at response tokens. Attention, padding and repeated work do not
        count. A prompt that is computed once for all its answers counts once."""
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
    return {
        "reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
        "retries": stats["num_alloc_retries"],
    }


def steps(
    found: Findings, tiny: bool, algorithm: str, shape: str = "qwen2-1.5b", tokens: str = "8192"
) -> None:
    """Some steps on random models, of which the last one counts; one with a profile; and some
    without Triton's kernels, whose rollouts still run the recorded ones."""
    device = init_process_group()
    setting = Setting.of(algorithm, tiny, memory_of(device), shape, int(tokens))
    folder, work = Path.cwd() / algorithm, setting.work
    save_models(folder, setting.model, device.type, reward=algorithm == "ppo")
    count, longest = work.prompts.prompt_ids.shape
    ppo = make_ppo(
        folder, count, work.samples, (longest, int(work.answer_lengths.max())), setting.flags
    )
    planned = found.measure("planned_update_gib", lambda: planned_update(ppo, device))
    shutil.rmtree(folder)  # gigabytes
    counter, rate = PassCounter(ppo), peak_rate(device, tiny)
    held = torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else None
    found.add(
        "setting",
        {
            "weights": sum(weights_of(ppo.engines.actor.module.backbone)),
            "rows": len(work.answer_lengths),
            "answer_tokens": work.tokens,
            "matmul_tflop_s": rate / 1e12,
            "models_gib": held,
        },
    )
    for step in range(1, STEPS + 1):
        numbers = timed_step(ppo, work, step, counter, rate)
        if planned:
            numbers["update_peak_to_plan"] = numbers["peak_gib"]["train"] / planned
        found.add("last_step" if step == STEPS else f"step_{step}", numbers)
    found.measure("profile", lambda: profiled_step(ppo, work, STEPS + 1, counter))
    with without_kernels():
        for step in range(STEPS + 2, STEPS + 2 + WITHOUT):
            found.add("without_kernels", timed_step(ppo, work, step, counter, rate))


def planned_update(ppo: PPOComponents, device: torch.device) -> float:
    """GiB of tensors at the peak of an update, as the planner computes them. The models' folders
    must exist."""
    plan = plan_step(
        ppo.config, read_model_configs(ppo.config), 1, memory_of(device), host_memory()
    )
    updates = [phase for phase in plan.phases if phase.name.endswith("update")]
    return max(phase.total(on_host=False) for phase in updates) / GIB


def timed_step(
    ppo: PPOComponents, work: Workload, step: int, counter: PassCounter, rate: float
) -> dict[str, Any]:
    """Seconds, memory and use of the arithmetic of one PPO step; `rate`: FLOP/s of the device."""
    recorder = ppo.collection.sampler.recorder.recorder
    captured = recorder.captures
    counter.tokens.clear()
    ppo.clock.take()
    ppo_step(ppo, work, step)
    phases, _, peaks = ppo.clock.take()
    measured_step: dict[str, Any] = {
        "seconds": phases,
        "samples_per_s": len(work.answer_lengths) / sum(phases.values()),
        "peak_gib": peaks,
        "captures": recorder.captures - captured,
        **memory(),
        "rollout_tokens_per_s": work.tokens / phases["rollout"],
        "tokens_run": {
            f"{phase}/{role}": tokens for (phase, role, _), tokens in sorted(counter.tokens.items())
        },
    }
    for phase in ("score", "train"):
        useful = counter.flops(phase, work)
        measured_step[f"{phase}_mfu"] = useful / phases.get(phase, math.inf) / rate
    return measured_step


def profiled_step(
    ppo: PPOComponents, work: Workload, step: int, counter: PassCounter
) -> dict[str, Any]:
    """The kernels of the scoring and of the update of a PPO step, and how many each pass of a model
    launches."""
    scoring, updates = KernelProfile(), KernelProfile()
    passes = ppo.collection.passes

    def profiled(*arguments: Any) -> Any:
        with scoring:
            return passes(*arguments)

    counter.passes.clear()
    ppo.collection.passes = profiled  # type: ignore[assignment]
    try:
        ppo_step(ppo, work, step, updates)
    finally:
        ppo.collection.passes = passes
    return {
        "score": scoring.summary({"pass": counter.passes["score"]}),
        "train": updates.summary({"pass": counter.passes["train"]}),
    }
