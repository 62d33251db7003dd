"""Generation: from prompts to a rollout, with the engine that the configuration selects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.forward import vocabulary_size
from dschat_ppo.rollout.continuous_batching import ContinuousBatching, MaxOverRanks, never
from dschat_ppo.rollout.cuda_graphs import RolloutGraphs, StaticMemory
from dschat_ppo.rollout.flash_decode import flash_decode
from dschat_ppo.rollout.fused_layers import can_prepack, prepacked
from dschat_ppo.rollout.fused_operations import fused_norms, fused_rotary
from dschat_ppo.rollout.kv_pool import SPARE, KVPool
from dschat_ppo.rollout.memory import pool_limits, rows_for_memory
from dschat_ppo.rollout.padded_batches import PaddedBatches
from dschat_ppo.rollout.pool_scheduler import PoolScheduler
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.rollout.scheduler import Scheduler
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria
from dschat_ppo.types import PromptBatch, Rollout

EngineName = Literal["continuous", "padded", "recomputed"]
ENGINES: dict[EngineName, str] = {  # the faster ones first
    "continuous": "continuous batching", "padded": "padded batches", "recomputed": "passes of whole rows",
}  # fmt: skip

TYPICAL_ROWS = 32  # of a product with packed weights, a hint for their layout
MIN_SHARED_TOKENS = 32  # shorter prompts are copied for each sample; longer ones are read from one copy
WIDTH_STEP = 64  # of prompts, so that buffers and graphs of one rollout fit the next
POLL = 8  # tokens between two checks for finished sequences, where steps are CUDA graphs


@dataclass(frozen=True)
class GenerationConfig:
    """How rollouts are generated: `samples` responses per prompt, by `engine`, one of `ENGINES`.

    `rows` sequences run at a time, 0 = as many as memory allows, up to `MAX_ROWS` or `MAX_ROWS_GPU`. `prepack` lays the
    weights out for oneDNN (CPU, bf16), at the cost of their memory. `static` runs decode steps at fixed addresses, as
    CUDA graphs on a GPU (None: on a GPU, unless forward passes are collective).
    """

    sampling: SamplingParameters
    stopping: StoppingCriteria
    samples: int = 1
    rows: int = 0
    prepack: bool = True
    static: bool | None = None
    engine: EngineName = "continuous"


def generate(
    model: PreTrainedModel, prompts: PromptBatch, seeds: Tensor, config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None = None, limits: Tensor | None = None,
    cancelled: Callable[[], bool] = never, graphs: RolloutGraphs | None = None,
) -> Rollout:  # fmt: skip
    """Sample responses: B * `samples` rows, those of one prompt one after another, padded to the longest.

    After a cancellation unfinished responses have no token. Arguments that do not match raise a `ValueError`.

    Args:
        model: in eval mode, as lent by `HybridEngine.generating`.
        prompts: B left-padded prompts on the model's device, each of at least one token.
        seeds: (B * samples,) int64, one per response. A response depends on its prompt, its seed and the weights, not
            on the other rows (up to rounding, which can differ with the shapes of matrix products).
        config: everything else.
        max_over_ranks: this rank's number -> the largest number of all ranks. Needed where forward passes are
            collective (ZeRO-3 weights gathered layer by layer), and not with static steps: every rank then makes the
            same number of passes.
        limits: (B * samples,) int64, most tokens of each response, from 1 to `max_new_tokens`; None: `max_new_tokens`.
        cancelled: called before each token (static steps: each poll); once it returns True, this rank generates no more
            tokens.
        graphs: CUDA graphs of all rollouts of a run; None: of this one.
    """
    _validate(model, prompts, seeds, config, max_over_ranks, limits)
    on_gpu = prompts.prompt_ids.is_cuda
    static = on_gpu and max_over_ranks is None if config.static is None else config.static
    with ExitStack() as stack:
        if config.prepack and max_over_ranks is None and can_prepack(model):
            stack.enter_context(prepacked(model, TYPICAL_ROWS))
        if max_over_ranks is None:
            stack.enter_context(fused_norms(model))
        if on_gpu and max_over_ranks is None:
            stack.enter_context(fused_rotary(model))
        if static and config.engine == "continuous":
            graphs = RolloutGraphs() if graphs is None and on_gpu else graphs
            return _generate_static(model, prompts, seeds, config, limits, cancelled, graphs)
        buffers = SequenceBuffers(
            prompts, seeds, config.samples, config.sampling, config.stopping, vocabulary_size(model), 1, limits
        )
        rows = min(config.rows or rows_for_memory(model, buffers.width), buffers.count)
        if config.engine != "continuous":
            cached = config.engine == "padded"
            PaddedBatches(model, buffers, config.sampling, rows, max_over_ranks, cancelled, cached).run()
        else:
            scheduler = Scheduler(*_lengths_and_prompts(buffers), rows, config.samples, MIN_SHARED_TOKENS)
            ContinuousBatching(model, buffers, scheduler, config.sampling, max_over_ranks, cancelled=cancelled).run()
    return buffers.rollout()


def engine_text(model: PreTrainedModel, config: GenerationConfig, max_over_ranks: MaxOverRanks | None = None) -> str:
    """The engine and the kernels of `generate` with these arguments, for the log."""
    on_gpu, whole = next(model.parameters()).is_cuda, max_over_ranks is None
    parts = [ENGINES[config.engine]]
    if config.engine == "continuous":
        weight = next(model.parameters())
        compiled = "compiled attention" if can_run(weight) and not config.static else "PyTorch attention"
        parts.append("flash attention" if flash_decode(weight.device) is not None else compiled)
    if on_gpu and config.engine == "continuous":
        static = whole if config.static is None else config.static
        parts.append("CUDA graphs" if static else "no CUDA graphs")
    if config.prepack and whole and can_prepack(model):
        parts.append("prepacked weights")
    return ", ".join([*parts, "whole weights" if whole else "weights gathered layer by layer"])


def _generate_static(
    model: PreTrainedModel, prompts: PromptBatch, seeds: Tensor, config: GenerationConfig, limits: Tensor | None,
    cancelled: Callable[[], bool], graphs: RolloutGraphs | None,
) -> Rollout:  # fmt: skip
    """Continuous batching with decode steps at fixed addresses; `graphs` records them, or reuses those that it kept."""
    key, width = (config, len(seeds)), prompts.prompt_ids.shape[1]
    kept = graphs.take(key, width, model) if graphs else None
    if kept:
        buffers, memory = kept
        buffers.fill(prompts, seeds, limits)
    else:
        room = -(-width // WIDTH_STEP) * WIDTH_STEP if graphs else width
        buffers = SequenceBuffers(
            prompts, seeds, config.samples, config.sampling, config.stopping, vocabulary_size(model), POLL, limits, room
        )
        rows, slots = pool_limits(model, min(config.rows, buffers.count), buffers.width)
        pool = KVPool(graphs.capacity(key, slots) if graphs else SPARE + 1)
        memory = StaticMemory(pool, min(rows, buffers.count), slots, prompts.prompt_ids.device)
    scheduler = PoolScheduler(
        *_lengths_and_prompts(buffers), buffers.limits[:-1].cpu().numpy(), memory.entries.shape[1], memory.pool,
        memory.most_slots, POLL, config.samples, MIN_SHARED_TOKENS,
    )  # fmt: skip
    recorder = graphs.recorder if graphs else None
    ContinuousBatching(model, buffers, scheduler, config.sampling, None, cancelled, memory, recorder).run()
    if graphs and scheduler.rows == memory.entries.shape[1]:  # else memory ran out, and the rows were halved
        graphs.keep(key, model, buffers, memory)
    return buffers.rollout()


def _lengths_and_prompts(buffers: SequenceBuffers) -> tuple[np.ndarray, np.ndarray]:
    """Prompt length and prompt number of each sequence, (A,) int64."""
    return buffers.prompt_lengths[:-1].cpu().numpy(), np.arange(buffers.count) // buffers.samples


def _validate(
    model: PreTrainedModel, prompts: PromptBatch, seeds: Tensor, config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None, limits: Tensor | None,
) -> None:  # fmt: skip
    count, vocabulary = len(prompts.prompt_ids), vocabulary_size(model)
    if not count or not bool(prompts.prompt_mask.any(dim=1).all()):
        raise ValueError("there are no prompts" if not count else "a prompt is empty")
    if len(seeds) != count * config.samples:
        raise ValueError(f"{len(seeds)} seeds for {count} prompts x {config.samples} samples")
    most = config.stopping.max_new_tokens
    if limits is not None and (limits.shape != seeds.shape or not bool(((limits > 0) & (limits <= most)).all())):
        raise ValueError(f"limits must be {len(seeds)} numbers from 1 to {most}")
    if not all(0 <= number < vocabulary for number in config.stopping.ids):
        raise ValueError(f"the ids that end a response, {config.stopping.ids}, must be below {vocabulary}")
    if config.static and max_over_ranks is not None:
        raise ValueError("static steps do not support synchronised ranks")
