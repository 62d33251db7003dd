"""Tokens per second of generation, against Hugging Face `generate` and what memory bandwidth allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from measure import wait
from models import SHAPES, Workload, config_of, language_model, workload
from rollout import by_transformers, by_us, memory_limit
from transformers import PreTrainedModel

from dschat_ppo.models.fast_layers import use_fast_layers
from dschat_ppo.rollout.cuda_graphs import RolloutGraphs
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.types import repeat_rows
from gpu_checks.run_part import Findings


def seconds(run: Callable[[], object]) -> float:
    """Wall time until the device is idle."""
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def rollout(found: Findings, tiny: bool, shape: str) -> None:
    """64 rows of 512 + 512 tokens, more rows of varied lengths, nucleus sampling, and `generate` on the first."""
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
        found.add("ours_64", ours | {"share_of_limit": ours["tokens_per_s"] / found.found["limit_64"]})
    by_transformers(theirs, replace(work, answer_lengths=work.answer_lengths.clamp_max(4)), rows)  # warm-up
    plain = found.measure("transformers_64", lambda: work.tokens / seconds(lambda: by_transformers(theirs, work, rows)))
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
        for weight, place in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            weight.data = place.view_as(weight)


def varied(work: Workload, times: int) -> Workload:
    """`times` as many rows, with lognormal lengths up to that of `work`."""
    prompts, most = repeat_rows(work.prompts, times), int(work.answer_lengths.max())
    drawn = np.random.default_rng(1).lognormal(np.log(most / 3), 0.8, len(prompts.prompt_ids))
    return Workload(prompts, 1, torch.from_numpy(np.clip(drawn, 1, most).astype(np.int64)))


def measured(
    model: PreTrainedModel, work: Workload, rows: int, sampling: SamplingParameters | None = None
) -> dict[str, Any]:
    """A first and a second rollout with `rows` at a time (0: as many as memory allows), and what they captured."""
    graphs, times, captures = RolloutGraphs(), [], [0]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        times.append(seconds(lambda: by_us(model, work, rows, sampling, graphs)))
        captures.append(graphs.recorder.captures)
    return {
        "tokens_per_s": work.tokens / times[1], "seconds": times[1], "first_seconds": times[0],
        "captures_first": captures[1], "captures_again": captures[2] - captures[1],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    }  # fmt: skip
