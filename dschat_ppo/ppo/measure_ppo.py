"""Measures the parts of a PPO step on the models of a run (`--dry_run --measure`): the functions of
the loop, with few rows. The rows are made up of tokens of the prompts, so that none ends early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from statistics import median

import torch
from torch import Tensor

from dschat_ppo.common import dist
from dschat_ppo.errors import UserError
from dschat_ppo.planner.step_time import PPOMeasurement, usual_seconds
from dschat_ppo.ppo.components import PPOComponents
from dschat_ppo.ppo.loop import update
from dschat_ppo.ppo.mini_dataset import gather_rows
from dschat_ppo.ppo.rollouts import prompt_batch
from dschat_ppo.rollout.cache_memory import rows_for_memory
from dschat_ppo.rollout.continuous_batching import never
from dschat_ppo.rollout.sampling import StoppingCriteria
from dschat_ppo.types import (
    FinishReason,
    PromptBatch,
    Rollout,
    ScoredRollout,
    repeat_rows,
    to_device,
)

DECODE_STEPS = 8
SAMPLE = 64  # prompts whose length stands for that of all


def measure_ppo(ppo: PPOComponents) -> PPOMeasurement:
    """Measure the parts of a PPO step. The models train on the made-up rows, so that they are of no
    further use. Collective.

    Raises:
        UserError: programs take part in the responses of the run.
    """
    if ppo.collection.sampler.extensions:
        raise UserError(
            "--measure: responses in which tools or other programs take part take as long as these"
            " do, which is not measured; omit --measure"
        )
    rows, first_token, decode_step = _measure_generation(ppo)
    sizes = _update_sizes(ppo)
    reward, score = _measure_scoring(ppo, sizes[0])
    updates = [(size, _measure_update(ppo, size)) for size in sizes]
    return PPOMeasurement(rows, first_token, decode_step, sizes[0], reward, score, updates)


def _measure_generation(ppo: PPOComponents) -> tuple[int, float, float]:
    """(sequences at a time, seconds to the first token of each, seconds of a further token). That
    is measured in the middle of a response, since attention to longer rows takes longer."""
    sampler = ppo.collection.sampler
    samples = ppo.plan.samples
    half = ppo.config.ppo.max_answer_seq_len // 2
    prompts = _evenly_spaced_prompts(ppo, min(SAMPLE, ppo.plan.prompts_per_rank), columns=0)
    width = prompts.prompt_ids.shape[1] + ppo.config.ppo.max_answer_seq_len
    with sampler.hybrid.generating() as model:
        limit = sampler.config.rows or rows_for_memory(model, width)
        # ranks that gather weights together make as many passes
        fewest = torch.tensor(min(limit, ppo.plan.rows_per_rank), device=ppo.device)
    prompt_count = max(1, int(dist.all_reduce(fewest, "min")) // samples)

    def seconds(batch: PromptBatch, tokens: int) -> float:
        banned_ids = sampler.config.stopping.banned_ids
        stopping = StoppingCriteria(tokens, banned_ids=banned_ids)
        config = replace(sampler.config, stopping=stopping)
        seeds = torch.arange(prompt_count * samples)
        return usual_seconds(lambda: sampler.generate(batch, seeds, config, never))

    first_token = seconds(_evenly_spaced_prompts(ppo, prompt_count, columns=0), 1)
    begun = _evenly_spaced_prompts(ppo, prompt_count, columns=half)
    further = seconds(begun, 1 + DECODE_STEPS) - seconds(begun, 1)
    return prompt_count * samples, first_token, max(0.0, further) / DECODE_STEPS


def _evenly_spaced_prompts(ppo: PPOComponents, count: int, columns: int) -> PromptBatch:
    """`count` prompts at even distances in the data, each with `columns` more tokens."""
    sampler = ppo.collection.sampler
    indices = _indices(ppo, count)
    batch = prompt_batch(sampler.prompts, indices, sampler.pad_id, sampler.given_source)
    batch = to_device(batch, ppo.device)
    more = _made_up_tokens(ppo, batch, count, columns)
    return PromptBatch(
        torch.cat([batch.prompt_ids, more], dim=1),
        torch.cat([batch.prompt_mask, torch.ones_like(more, dtype=torch.bool)], dim=1),
        extra=batch.extra,
    )


def _indices(ppo: PPOComponents, count: int) -> list[int]:
    """`count` rows at even distances in the data; some of them twice if it has fewer."""
    total = len(ppo.collection.sampler.prompts)
    return [index * total // count for index in range(count)]


def _made_up_tokens(ppo: PPOComponents, batch: PromptBatch, rows: int, columns: int) -> Tensor:
    """(rows, columns) tokens drawn from those of the prompts, without banned ones."""
    tokens = batch.prompt_ids[batch.prompt_mask]
    banned_ids = ppo.collection.sampler.config.stopping.banned_ids
    if banned_ids:
        tokens = tokens[~torch.isin(tokens, tokens.new_tensor(banned_ids))]
    return tokens[torch.randint(len(tokens), (rows, columns), device=tokens.device)]


def _update_sizes(ppo: PPOComponents) -> list[int]:
    """Rows on a rank of the optimizer steps that are measured, whole groups each: those of the
    run's optimizer steps if they are few, else those of one micro-batch and of two."""
    plan = ppo.plan
    length = ppo.config.ppo.max_answer_seq_len
    prompts = _evenly_spaced_prompts(ppo, min(SAMPLE, plan.prompts_per_rank), columns=0)
    row_tokens = length + float(prompts.prompt_mask.sum(dim=1).double().mean())
    groups = -(-max(1, int(plan.micro_batch_tokens / row_tokens)) // plan.samples)
    one = groups * plan.samples
    rows_of_update = plan.global_batch // plan.world_size
    if rows_of_update <= 2 * one and rows_of_update % plan.samples == 0 and rows_of_update:
        return [rows_of_update]
    return [one, 2 * one]


def _rollout(ppo: PPOComponents, rows: int) -> Rollout:
    """`rows` responses of full length, in whole groups, with the log-probs of the actor."""
    prompts = _evenly_spaced_prompts(ppo, rows // ppo.plan.samples, columns=0)
    of_rows = repeat_rows(prompts, ppo.plan.samples)
    response_ids = _made_up_tokens(ppo, prompts, rows, ppo.config.ppo.max_answer_seq_len)
    every_token = torch.ones_like(response_ids, dtype=torch.bool)
    rollout = Rollout(
        prompt_ids=of_rows.prompt_ids,
        prompt_mask=of_rows.prompt_mask,
        response_ids=response_ids,
        response_mask=every_token,
        rollout_logprobs=torch.zeros_like(every_token, dtype=torch.float32),
        finish_reason=torch.full((rows,), FinishReason.LENGTH, dtype=torch.int8, device=ppo.device),
        extra=of_rows.extra,
    )
    actor_alone = replace(
        ppo.collection.passes,
        reference=None,
        critic=None,
        old_logprobs="recompute",
        kl_estimator="k1",
        further=(),
    )
    logprobs = actor_alone(rollout, _groups_of_rank(ppo, rows)).old_logprobs
    assert logprobs is not None
    return replace(rollout, rollout_logprobs=logprobs)


def _groups_of_rank(ppo: PPOComponents, rows: int) -> Tensor:
    """(rows,) the group of each row, unlike those of the other ranks."""
    groups = torch.arange(rows // ppo.plan.samples, device=ppo.device)
    first = dist.rank() * len(groups)
    return (first + groups).repeat_interleave(ppo.plan.samples)


def _measure_scoring(ppo: PPOComponents, rows: int) -> tuple[float, float]:
    """Seconds of the reward sources and of the forward passes, for `rows` rows."""
    collection = ppo.collection
    rollout = _rollout(ppo, rows)
    indices = _indices(ppo, rows // ppo.plan.samples)
    groups = _groups_of_rank(ppo, rows)

    def reward() -> None:
        request = collection.requests.request(rollout, indices, 0)
        collection.requests.mixture.begin(request, rollout)()

    ppo.engines.eval()
    return usual_seconds(reward), usual_seconds(lambda: collection.passes(rollout, groups))


def _measure_update(ppo: PPOComponents, rows: int) -> Mapping[str, float]:
    """Role -> seconds of one optimizer step over `rows` rows of each rank."""
    step = ppo.plan.warmup_rollouts + 1  # the actor trains
    scored = _scored(ppo, rows)
    ppo.mini_dataset = replace(ppo.mini_dataset, rows_per_update=len(scored.scores))
    by_role: list[dict[str, float]] = []  # of each repetition

    def make_update() -> None:
        computation = ppo.advantage_computation
        ppo.clock.take()
        valued = ppo.critic_pass(computation.with_rewards(scored), step)
        experience = computation.advantages(valued, step)
        ppo.state.begin_updates(experience, {})
        [minibatch] = ppo.mini_dataset.minibatches(experience, 1, step)
        ppo.engines.train()
        update(ppo, minibatch, step)
        seconds, _, _ = ppo.clock.take()
        by_role.append({role: seconds.get(f"train/{role}", 0.0) for role in ppo.engines.trained})

    usual_seconds(make_update)
    if len(by_role) > 1:
        del by_role[0]  # it warms up
    return {role: median(seconds[role] for seconds in by_role) for role in ppo.engines.trained}


def _scored(ppo: PPOComponents, rows: int) -> ScoredRollout:
    """Rows of all ranks with made-up scores."""
    rollout = _rollout(ppo, rows)
    forwarded = ppo.collection.passes(rollout, _groups_of_rank(ppo, rows))
    columns = {field.name: getattr(forwarded, field.name) for field in fields(forwarded)}
    scores = torch.rand(rows, device=ppo.device)
    sources = len(ppo.collection.requests.mixture.names)
    baselines = None
    if ppo.config.algorithm.advantage_estimator == "remax":
        baselines = torch.zeros_like(scores)
    return gather_rows(
        ScoredRollout(
            **columns,
            source_scores=scores.unsqueeze(1).expand(-1, sources).contiguous(),
            scores=scores,
            baselines=baselines,
        )
    )
