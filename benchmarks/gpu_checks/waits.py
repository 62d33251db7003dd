"""How often the host waits for the device: in a rollout, and in scoring and updates."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import config_of, language_model, workload
from ppo_parts import make_ppo, ppo_step, save_models
from rollout import by_us
from torch.profiler import ProfilerActivity, profile
from transformers import PretrainedConfig, Qwen2Config

from dschat_ppo.common.phases import current_phase
from dschat_ppo.features.cuda_graphs.step_recorders import RolloutGraphs
from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.run.process_group import init_process_group
from gpu_checks.parts import Findings
from gpu_checks.speed import PassCounter

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
