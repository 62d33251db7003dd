"""Generation: from prompts to a rollout, with the engine that the configuration selects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.cpu_kernels.operations import can_run
from dschat_ppo.models.backbone import has_states
from dschat_ppo.models.fast_layers import kernels_for
from dschat_ppo.models.wrapped_models import vocabulary_size
from dschat_ppo.rollout.cache_memory import pool_limits, rows_for_memory
from dschat_ppo.rollout.continuous_batching import (
    POLL,
    ContinuousBatching,
    MaxOverRanks,
    Turns,
    never,
)
from dschat_ppo.rollout.cuda_graphs import RolloutGraphs, StaticMemory
from dschat_ppo.rollout.decode_kernels import flash_decode
from dschat_ppo.rollout.fused_layers import can_prepack, fp32_logits, fused
from dschat_ppo.rollout.kv_cache import SPARE, KVCache
from dschat_ppo.rollout.padded_batches import PaddedBatches
from dschat_ppo.rollout.sampling import SamplingParameters, StoppingCriteria
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.rollout.turn_by_turn import generate_turn_by_turn
from dschat_ppo.types import PromptBatch, Rollout, repeat_rows

EngineName = Literal["continuous", "padded", "recomputed"]
ENGINES: dict[EngineName, str] = {  # the faster ones first
    "continuous": "continuous batching",
    "padded": "padded batches",
    "recomputed": "passes of whole rows",
}

WIDTH_STEP = 64  # of prompts, so that buffers and graphs of one rollout fit the next


@dataclass(frozen=True)
class GenerationConfig:
    """How rollouts are generated: `samples` responses per prompt, by `engine`, one of `ENGINES`.

    `rows` sequences run at a time, 0 = as many as memory allows, up to `MAX_ROWS` or
    `MAX_ROWS_GPU`. `prepack` lays the weights out for few rows (on a CPU), at the cost of their
    memory. `static` runs decode steps at fixed addresses, as CUDA graphs on a GPU (None: on a GPU,
    unless forward passes are collective).
    """

    sampling: SamplingParameters
    stopping: StoppingCriteria
    samples: int = 1
    rows: int = 0
    prepack: bool = True
    static: bool | None = None
    engine: EngineName = "continuous"


def generate(  # noqa: PLR0913
    model: PreTrainedModel,
    prompts: PromptBatch,
    seeds: Tensor,
    config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None = None,
    limits: Tensor | None = None,
    cancelled: Callable[[], bool] = never,
    graphs: RolloutGraphs | None = None,
    turns: Turns | None = None,
    drawn: Tensor | None = None,
) -> Rollout:
    """Sample responses: B * `samples` rows, those of one prompt one after another, padded to the
    longest. A response depends on its prompt, its seed and the weights, not on the other rows (up
    to rounding, which can differ with the shapes of matrix products).

    Args:
        model: in eval mode, as lent by `HybridEngine.generating`.
        prompts: B left-padded prompts on the model's device, each of at least one token.
        seeds: (B * samples,) int64, one for each response.
        config: sampling, stopping criteria and engine.
        max_over_ranks: this rank's integer -> the largest one of all ranks. Needed where forward
            passes are collective (ZeRO-3 weights gathered layer by layer): every rank then makes
            the same number of passes.
        limits: (B * samples,) int64, most tokens of each response, from 1 to `max_new_tokens`;
            None: `max_new_tokens`.
        cancelled: called before each token (static steps: each poll). Once it returns True, this
            rank generates no more tokens, and unfinished responses have none.
        graphs: CUDA graphs of all rollouts of a run; None: of this one.
        turns: of episodes, whose limits count all tokens after the prompt.
        drawn: (B * samples,) int64, how many tokens were drawn with each seed before; None: none.
    """
    on_gpu = prompts.prompt_ids.is_cuda
    is_static = _is_static(model, config, max_over_ranks, turns, on_gpu)
    if turns is not None and not is_static:
        return _turn_by_turn(
            model, prompts, seeds, config, max_over_ranks, limits, cancelled, turns
        )
    with ExitStack() as stack:
        if max_over_ranks is None:
            if config.prepack and can_prepack(model):
                stack.enter_context(fused(model))
            if on_gpu:
                stack.enter_context(fp32_logits(model))
            if on_gpu and kernels_for(next(model.parameters())):
                stack.enter_context(fused(model))
        if is_static:
            if not on_gpu and turns is not None:
                graphs = None
            elif on_gpu and graphs is None:
                graphs = RolloutGraphs()
            return _generate_static(model, prompts, seeds, config, limits, cancelled, graphs, turns)
        buffers = SequenceBuffers(
            prompts,
            seeds,
            config.samples,
            config.sampling,
            config.stopping,
            vocabulary_size(model),
            1,
            limits,
        )
        if drawn is not None:
            buffers.skip(seeds, drawn)
        rows = min(config.rows or rows_for_memory(model, buffers.width), buffers.count)
        if config.engine == "continuous":
            ContinuousBatching(model, buffers, rows, max_over_ranks, cancelled).run()
        else:
            has_cache = config.engine == "padded"
            PaddedBatches(model, buffers, rows, max_over_ranks, cancelled, has_cache).run()
    return buffers.rollout()


def _is_static(
    model: PreTrainedModel,
    config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None,
    turns: Turns | None,
    on_gpu: bool,
) -> bool:
    """Whether decode steps run at fixed addresses: on a GPU, with `config.static`, and for
    episodes in continuous batching; not for layers that hold a state."""
    if config.engine != "continuous" or has_states(model.config):
        return False
    if turns is not None and max_over_ranks is None:
        return True
    if config.static is not None:
        return config.static
    return on_gpu and max_over_ranks is None


def _turn_by_turn(
    model: PreTrainedModel,
    prompts: PromptBatch,
    seeds: Tensor,
    config: GenerationConfig,
    max_over_ranks: MaxOverRanks | None,
    limits: Tensor | None,
    cancelled: Callable[[], bool],
    turns: Turns,
) -> Rollout:
    """Episodes that this function generates turn by turn, each turn by `generate`."""
    starts = repeat_rows(prompts, config.samples)
    if limits is None:
        most_tokens = [config.stopping.max_new_tokens] * len(starts.prompt_ids)
    else:
        most_tokens = limits.tolist()
    one_sample = replace(config, samples=1)

    def sample(prompts: PromptBatch, seeds: Tensor, limits: Tensor, drawn: Tensor) -> Rollout:
        return generate(
            model, prompts, seeds, one_sample, max_over_ranks, limits, cancelled, drawn=drawn
        )

    return generate_turn_by_turn(
        sample,
        starts,
        seeds,
        most_tokens,
        max_over_ranks or (lambda value: value),
        cancelled,
        turns,
    )


def _generate_static(
    model: PreTrainedModel,
    prompts: PromptBatch,
    seeds: Tensor,
    config: GenerationConfig,
    limits: Tensor | None,
    cancelled: Callable[[], bool],
    graphs: RolloutGraphs | None,
    turns: Turns | None,
) -> Rollout:
    """Continuous batching with decode steps at fixed addresses; `graphs` records them, or reuses
    those that it kept."""
    key = (config, len(seeds))
    width = prompts.prompt_ids.shape[1]
    memory = None
    if graphs is not None:
        memory = graphs.take(key, width, model)
    if memory is not None:
        memory.buffers.fill(prompts, seeds, limits)
    else:
        prompt_width = width
        if graphs is not None:
            prompt_width = -(-width // WIDTH_STEP) * WIDTH_STEP
        buffers = SequenceBuffers(
            prompts,
            seeds,
            config.samples,
            config.sampling,
            config.stopping,
            vocabulary_size(model),
            POLL,
            limits,
            prompt_width,
        )
        rows, slots = pool_limits(model, min(config.rows, buffers.count), buffers.width)
        capacity = SPARE + 1
        recorder = None
        if graphs is not None:
            capacity = graphs.capacity(key, slots)
            recorder = graphs.recorder
        memory = StaticMemory(
            buffers, KVCache(1, capacity), min(rows, buffers.count), slots, recorder
        )
    rows = memory.entries.shape[1]
    engine = ContinuousBatching(model, memory.buffers, rows, None, cancelled, memory, turns)
    engine.run()
    if graphs is not None and engine.rows == rows:  # else memory ran out; the rows were halved
        graphs.keep(key, model, memory)
    return memory.buffers.rollout()


def engine_text(
    model: PreTrainedModel, config: GenerationConfig, max_over_ranks: MaxOverRanks | None = None
) -> str:
    """The engine and the kernels of `generate` with these arguments, for the log."""
    weight = next(model.parameters())
    has_whole_weights = max_over_ranks is None
    parts = [ENGINES[config.engine]]
    if config.engine == "continuous":
        if flash_decode(weight.device) is not None:
            parts.append("flash attention")
        elif can_run(weight):
            parts.append("compiled attention")
        else:
            parts.append("PyTorch attention")
        if weight.is_cuda:
            if has_whole_weights and not has_states(model.config):
                parts.append("CUDA graphs")
            else:
                parts.append("no CUDA graphs")
    if config.prepack and has_whole_weights and can_prepack(model):
        parts.append("prepacked weights")
    if has_whole_weights:
        parts.append("whole weights")
    else:
        parts.append("weights gathered layer by layer")
    return ", ".join(parts)
