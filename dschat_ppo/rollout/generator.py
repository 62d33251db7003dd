"""Generation: prompts in, a rollout out, by the fastest engine that is right for the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.models.forward import vocabulary_size
from dschat_ppo.rollout.continuous_batching import Agree, ContinuousBatching, never
from dschat_ppo.rollout.kv_cache import KVCache
from dschat_ppo.rollout.memory import rows_for_memory
from dschat_ppo.rollout.padded_batches import PaddedBatches
from dschat_ppo.rollout.prepack import can_prepack, prepacked
from dschat_ppo.rollout.sampling import SamplingParameters
from dschat_ppo.rollout.scheduler import Scheduler
from dschat_ppo.rollout.sequence_buffers import SequenceBuffers
from dschat_ppo.rollout.stopping_criteria import StoppingCriteria
from dschat_ppo.types import PromptBatch, Rollout

Engine = Literal["continuous", "padded"]

TYPICAL_ROWS = 32  # of a product with packed weights, a hint for their layout
SHARE_FROM = 32  # tokens of a prompt that several answers read from one copy
POLL = 8  # tokens between two looks at what is finished, where steps are CUDA graphs


@dataclass(frozen=True)
class GenerationConfig:
    """How rollouts are made.

    `samples` answers per prompt; `rows` at work at a time, 0 = as many as memory allows, up to `MOST_ROWS`; `prepack`
    lays the weights out for oneDNN (CPU, bf16), at the cost of their memory; `static` steps at fixed addresses, as CUDA
    graphs on a GPU (None: on a GPU where nothing forbids it); `engine` is "continuous" or "padded".
    """

    sampling: SamplingParameters
    stopping: StoppingCriteria
    samples: int = 1
    rows: int = 0
    prepack: bool = True
    static: bool | None = None
    engine: Engine = "continuous"


def generate(
    model: PreTrainedModel, prompts: PromptBatch, seeds: Tensor, how: GenerationConfig, agree: Agree | None = None,
    limits: Tensor | None = None, cancelled: Callable[[], bool] = never,
) -> Rollout:  # fmt: skip
    """Sample answers.

    Args:
        model: in eval mode, as `HybridEngine.generating` lends it.
        prompts: B left-padded prompts on the model's device, each of at least one token.
        seeds: (B * samples,) int64, one per answer. An answer depends on its prompt, its seed and the weights, not on
            the other rows (up to rounding, which can differ with the shapes of matrix products).
        how: everything else.
        agree: needed where forward passes are collective (ZeRO-3 weights gathered layer by layer): this rank's number
            -> the largest of all ranks. Every rank then makes the same number of passes.
        limits: (B * samples,) int64, most tokens of each answer, from 1 to `max_new_tokens`; None: `max_new_tokens`.
        given_up: asked before each token; once it is true this rank generates no more.

    Returns:
        B * samples rows, the answers of a prompt one after another, as long as the longest answer. Given
        up, those that are not finished have no token.

    Raises:
        ValueError: no prompts, an empty one, not one seed or limit in range per answer, an end that is no token of the
            model, or static steps together with `agree` or stop strings, for which every token must be looked at.
    """
    _check(model, prompts, seeds, how, agree, limits)
    every_token = agree is not None or bool(how.stopping.stop_strings)
    static = prompts.prompt_ids.is_cuda and not every_token if how.static is None else how.static
    poll = POLL if static else 1
    answers = SequenceBuffers(
        prompts, seeds, how.samples, how.sampling, how.stopping, vocabulary_size(model), poll, limits
    )
    pack = how.prepack and agree is None and can_prepack(model)
    with prepacked(model, TYPICAL_ROWS) if pack else nullcontext():
        rows = min(how.rows or rows_for_memory(model, answers.width), answers.count)
        if how.engine == "padded":
            PaddedBatches(model, answers, how.sampling, rows, agree, cancelled).run()
        else:
            scheduler = _scheduler(answers, how.samples, rows, static)
            ContinuousBatching(model, answers, scheduler, how.sampling, agree, poll, cancelled).run()
    return answers.rollout()


def _check(
    model: PreTrainedModel, prompts: PromptBatch, seeds: Tensor, how: GenerationConfig, agree: Agree | None,
    limits: Tensor | None,
) -> None:  # fmt: skip
    count, vocabulary = len(prompts.prompt_ids), vocabulary_size(model)
    if not count or not bool(prompts.prompt_mask.any(dim=1).all()):
        raise ValueError("there are no prompts" if not count else "a prompt is empty")
    if len(seeds) != count * how.samples:
        raise ValueError(f"{len(seeds)} seeds for {count} prompts x {how.samples} answers")
    most = how.stopping.max_new_tokens
    if limits is not None and (limits.shape != seeds.shape or not bool(((limits > 0) & (limits <= most)).all())):
        raise ValueError(f"limits are not {len(seeds)} numbers from 1 to {most}")
    if not all(0 <= number < vocabulary for number in how.stopping.ids):
        raise ValueError(f"of the ids that end an answer, {how.stopping.ids}, some are not below {vocabulary}")
    if how.static and (agree is not None or how.stopping.stop_strings):
        raise ValueError("static steps can neither keep ranks in step nor look for stop strings")


def _scheduler(answers: SequenceBuffers, samples: int, rows: int, static: bool) -> Scheduler:
    prompt = torch.arange(answers.count // samples).repeat_interleave(samples)
    return Scheduler(
        answers.prompt_length[:-1].cpu().numpy(),
        prompt.numpy(),
        rows,
        samples,
        share_from=0 if static else SHARE_FROM,
        fixed=KVCache(rows, answers.width + 1) if static else None,
    )
