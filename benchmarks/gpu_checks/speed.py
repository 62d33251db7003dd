"""What this machine can do, generation against Hugging Face `generate` and memory bandwidth, PPO
and GRPO steps with their use of the device's arithmetic, and how often the host waits for the
device."""

from __future__ import annotations

import math
import shutil
import statistics
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from torch.profiler import ProfilerActivity, profile
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config

from dschat_ppo.common.phases import current_phase
from dschat_ppo.features.cuda_graphs.step_recorders import RolloutGraphs
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.ppo.components import PPOComponents
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.types import repeat_rows
from gpu_checks.parts import Findings

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
    """64 rows of 512 + 512 tokens, more rows of varied lengths, nucleus sampling, and `generate` on
    the first."""
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
    """A first and a second rollout with `rows` at a time (0: as many as memory allows), and what
    they captured."""
    graphs, times, captures = RolloutGraphs(), [], [0]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        times.append(seconds(lambda: by_us(model, work, rows, sampling, graphs)))
        captures.append(graphs.recorder.captures)
    return {
        "tokens_per_s": work.tokens / times[1],
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
LARGE = 100 * GIB  # of a device that four models of 1.5 B weights fit into


@dataclass(frozen=True)
class Setting:
    """Sizes of a PPO step."""

    model: PretrainedConfig
    work: Workload
    flags: list[str]

    @classmethod
    def of(cls, algorithm: str, tiny: bool, memory: int) -> Setting:
        """PPO: 64 prompts x 512 + 512 tokens; models of 0.5 B weights on a device of less than
        `LARGE` bytes. GRPO: 16 prompts of 384 tokens x 8 answers of 64."""
        shape = "qwen2-0.5b" if algorithm == "ppo" and memory < LARGE else "qwen2-1.5b"
        model, shrink = (config_of(320, 2, 128), 16) if tiny else (SHAPES[shape], 1)
        name, prompts, flags = ("long", 64, []) if algorithm == "ppo" else ("group", 16, GRPO)
        budget = ["--micro_batch_tokens", str(8192 // shrink)]
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


def steps(found: Findings, tiny: bool, algorithm: str) -> None:
    """Some steps on random models; the last one counts."""
    device = init_process_group()
    setting = Setting.of(algorithm, tiny, memory_of(device))
    folder, work = Path.cwd() / algorithm, setting.work
    save_models(folder, setting.model, device.type, reward=algorithm == "ppo")
    count, longest = work.prompts.prompt_ids.shape
    ppo = make_ppo(
        folder, count, work.samples, (longest, int(work.answer_lengths.max())), setting.flags
    )
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
        captured = ppo.collection.sampler.recorder.recorder.captures
        counter.tokens.clear()
        ppo.clock.take()
        ppo_step(ppo, work, step)
        captured = ppo.collection.sampler.recorder.recorder.captures - captured
        phases, _, peaks = ppo.clock.take()
        numbers = {
            "seconds": phases,
            "samples_per_s": len(work.answer_lengths) / sum(phases.values()),
        }
        numbers |= {"peak_gib": peaks, "captures": captured, **memory()}
        numbers["rollout_tokens_per_s"] = work.tokens / phases["rollout"]
        numbers["tokens_run"] = {
            f"{phase}/{role}": tokens for (phase, role, _), tokens in sorted(counter.tokens.items())
        }
        for phase in ("score", "train"):
            numbers[f"{phase}_mfu"] = (
                counter.flops(phase, work) / phases.get(phase, math.inf) / rate
            )
        found.add("last_step" if step == STEPS else f"step_{step}", numbers)


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def small_config(tiny: bool) -> PretrainedConfig:
    """Two layers of the width of Qwen2 0.5B: how often the host waits does not depend on the number
    of layers."""
    if tiny:
        return config_of(320, 2, 128)
    return Qwen2Config(
        vocab_size=32000,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=2,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        num_labels=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def waits(found: Findings, tiny: bool) -> None:
    """A rollout after the one that captures, and a PPO step after the first one."""
    device, config = init_process_group(), small_config(tiny)
    found.measure("rollout", lambda: of_rollout(config, device, tiny))
    found.measure("step", lambda: of_step(config, device, tiny))


def of_rollout(config: PretrainedConfig, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Waits in rollouts of 64 rows of equal length, by the profiler: those per token are what the
    second half of the tokens adds."""
    model, rows = language_model(config, device.type), 4 if tiny else 64
    use_fast_layers(model)
    work, on_gpu, counts = (
        workload("fixed", config.vocab_size, rows, 8 if tiny else 1),
        device.type == "cuda",
        [],
    )
    for lengths in (work.answer_lengths // 2, work.answer_lengths):
        graphs, part = RolloutGraphs(), replace(work, answer_lengths=lengths)
        by_us(model, part, rows, recorder=graphs)
        captured = graphs.recorder.captures
        with profile(
            activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
        ) as profiler:
            by_us(model, part, rows, recorder=graphs)
        events = profiler.key_averages()
        counts.append({event.key: event.count for event in events if event.key in WAITS})
    kernels = sum(
        event.count for event in events if event.device_type != torch.autograd.DeviceType.CPU
    )
    tokens = int(work.answer_lengths.max())
    return {
        "per_token": (sum(counts[1].values()) - sum(counts[0].values())) / (tokens // 2),
        "tokens": tokens,
        "counts": counts[1],
        "captures": graphs.recorder.captures - captured,
        "kernels_per_token": kernels / tokens if on_gpu else None,
    }


def of_step(config: PretrainedConfig, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Waits in the scoring and the updates of a PPO step, by phase and by line, per micro-batch of
    a model."""
    folder, rows = Path.cwd() / "waits", 4 if tiny else 64
    save_models(folder, config, device.type)
    work = workload("fixed", config.vocab_size, rows, 8 if tiny else 1)
    prompt, answer = work.prompts.prompt_ids.shape[1], int(work.answer_lengths.max())
    budget = ["--micro_batch_tokens", (prompt + answer) * rows // 4]
    ppo = make_ppo(folder, rows, 1, (prompt, answer), budget)
    ppo_step(ppo, work, 1)
    passes, lines = PassCounter(ppo).passes, Counter[tuple[str, str]]()
    with seen_by_torch(lines) if device.type == "cuda" else nullcontext():
        ppo_step(ppo, work, 2)
    found: dict[str, Any] = {
        "where": {f"{phase} {line}": count for (phase, line), count in lines.most_common(25)}
    }
    for phase in ("score", "train"):
        count = sum(count for (name, _), count in lines.items() if name == phase)
        found |= {f"{phase}_waits": count, f"{phase}_passes": passes[phase]}
        found[f"{phase}_per_micro_batch"] = count / max(1, passes[phase])
    return found


@contextmanager
def seen_by_torch(lines: Counter[tuple[str, str]]) -> Iterator[None]:
    """Count (phase, line) of each wait that PyTorch warns of."""

    def count(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if "synchroniz" in str(message):
            lines[current_phase(), f"{Path(filename).name}:{lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
