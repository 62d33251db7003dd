"""Generation: prompts in, a rollout out, by the fastest engine that is right for the model."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_ppo.common.dist import local_world_size
from dschat_ppo.models.forward import vocabulary_size
from dschat_ppo.rollout.answers import Answers
from dschat_ppo.rollout.continuous import Agree, ContinuousBatching
from dschat_ppo.rollout.kv_store import KeyValueStore
from dschat_ppo.rollout.padded import PaddedBatches, bytes_per_token
from dschat_ppo.rollout.prepack import can_prepack, prepacked
from dschat_ppo.rollout.sampling import Sampling
from dschat_ppo.rollout.scheduler import Scheduler
from dschat_ppo.rollout.stopping import Stopping
from dschat_ppo.types import PromptBatch, Rollout

_log = logging.getLogger(__name__)

Engine = Literal["continuous", "padded"]

MOST_ROWS = 256  # chosen from memory; more make a step longer and no token cheaper
MEMORY_SHARE = 0.5  # of what is free, for keys and values
SHARE_FROM = 32  # tokens of a prompt that several answers read from one copy
POLL = 8  # tokens between two looks at what is finished, where steps are CUDA graphs


@dataclass(frozen=True)
class Generation:
    """How rollouts are made.

    `samples` answers per prompt; `rows` at work at a time, 0 = as many as memory allows, up to `MOST_ROWS`; `prepack`
    lays the weights out for oneDNN (CPU, bf16), at the cost of their memory; `static` steps at fixed addresses, as CUDA
    graphs on a GPU (None: on a GPU where nothing forbids it); `engine` is "continuous" or "padded".
    """

    sampling: Sampling
    stopping: Stopping
    samples: int = 1
    rows: int = 0
    prepack: bool = True
    static: bool | None = None
    engine: Engine = "continuous"


def generate(
    model: PreTrainedModel, prompts: PromptBatch, seeds: Tensor, how: Generation, agree: Agree | None = None,
    limits: Tensor | None = None,
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

    Returns:
        B * samples rows, the answers of a prompt one after another, as long as the longest answer.

    Raises:
        ValueError: an empty prompt, or not one seed per answer.
    """
    if not bool(prompts.prompt_mask.any(dim=1).all()):
        raise ValueError("a prompt is empty")
    if len(seeds) != len(prompts.prompt_ids) * how.samples:
        raise ValueError(f"{len(seeds)} seeds for {len(prompts.prompt_ids)} prompts x {how.samples} answers")
    static = agree is None and not how.stopping.stop_strings and prompts.prompt_ids.is_cuda
    static = static if how.static is None else how.static
    poll = POLL if static else 1
    answers = Answers(prompts, seeds, how.samples, how.sampling, how.stopping, vocabulary_size(model), poll, limits)
    rows = min(how.rows or rows_for_memory(model, answers.width), answers.count)
    pack = how.prepack and agree is None and can_prepack(model)
    with prepacked(model, rows) if pack else nullcontext():
        if how.engine == "padded":
            PaddedBatches(model, answers, how.sampling, rows, agree).run()
        else:
            scheduler = _scheduler(answers, how.samples, rows, static)
            ContinuousBatching(model, answers, scheduler, how.sampling, agree, poll).run()
    return answers.rollout()


def _scheduler(answers: Answers, samples: int, rows: int, static: bool) -> Scheduler:
    prompt = torch.arange(answers.count // samples).repeat_interleave(samples)
    return Scheduler(
        answers.prompt_length[:-1].cpu().numpy(),
        prompt.numpy(),
        rows,
        samples,
        share_from=0 if static else SHARE_FROM,
        fixed=KeyValueStore(rows, answers.width + 1) if static else None,
    )


def rows_for_memory(model: PreTrainedModel, length: int) -> int:
    """How many sequences of `length` tokens have their keys and values in `MEMORY_SHARE` of the free memory."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        free = (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    else:
        free = psutil.virtual_memory().available // local_world_size()
    return max(1, min(MOST_ROWS, int(MEMORY_SHARE * free / (bytes_per_token(model) * length))))
