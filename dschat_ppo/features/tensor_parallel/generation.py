"""Generation with layers that are divided over the ranks of a group."""

from __future__ import annotations

from functools import partial

import torch

from dschat_ppo.common import dist
from dschat_ppo.common.logging import logger
from dschat_ppo.config.ppo_config import PPOConfig
from dschat_ppo.engine.hybrid_engine import Division, GenerationChange, HybridEngine
from dschat_ppo.engine.rlhf_engine import RLHFEngine
from dschat_ppo.errors import UserError, attempt
from dschat_ppo.features.tensor_parallel.flags import TensorParallelFlags
from dschat_ppo.features.tensor_parallel.layers import (
    TensorParallel,
    reason_not_to_shard,
    sharded_layers,
)
from dschat_ppo.models.backbone import of_any_rank, unfit
from dschat_ppo.models.wrapped_models import vocabulary_size


def generation_change(config: PPOConfig, engines: RLHFEngine) -> GenerationChange | None:
    """With `--inference_tp_size`, the ranks of a group divide the actor's layers, or gather them
    one at a time where they cannot be divided. Collective then."""
    flags = config.of(TensorParallelFlags)
    size = flags.inference_tp_size
    if size == 1:
        return None
    if reason_not_to_shard(engines.actor.module.config, config.undivided) is not None:
        return GenerationChange(by_layer=True)
    group = dist.group_of(size)
    parallel = TensorParallel(group, dist.rank() % size, size, flags.tp_gather_partition_size)
    return GenerationChange(division=division_of(parallel))


def division_of(parallel: TensorParallel) -> Division:
    """Layers divided over the ranks of a group, for the hybrid engine."""
    return Division(
        parallel.group,
        parallel.rank,
        divided=partial(sharded_layers, parallel=parallel),
        check=partial(check_divided_layers, size=parallel.size),
    )


def check_divided_layers(hybrid: HybridEngine, size: int) -> None:
    """Require layers that are divided over `size` ranks to give the log-probs of whole ones, up to
    rounding. Collective; called once, before the first rollout.

    Raises:
        UserError: they differ, or the model fails with divided layers.
    """
    model = hybrid.model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary_size(model), (2, 12), generator=generator)
    ids = ids.to(dist.device())
    was_training = model.training
    hybrid.engine.eval()
    with torch.no_grad():
        whole_logprobs = model(ids, use_cache=False).logits.float().log_softmax(dim=-1)
    hybrid.engine.train(was_training)
    logprobs = torch.full_like(whole_logprobs, torch.inf)
    with attempt() as tried, hybrid.generating() as sharded:
        logprobs = sharded(ids, use_cache=False).logits.float().log_softmax(dim=-1)
    error = of_any_rank(unfit(tried), ids.device)
    likeliest = whole_logprobs.argmax(dim=-1, keepdim=True)
    differences = logprobs.gather(2, likeliest) - whole_logprobs.gather(2, likeliest)
    mean_difference = differences.abs().mean()
    # the largest of all ranks, so that all of them decide alike
    difference = float(dist.all_reduce(mean_difference, "max"))
    tolerance = 0.3
    if model.dtype == torch.float32:
        tolerance = 1e-3
    name = type(model).__name__
    if error or not difference <= tolerance:
        problem = error or f"log-probs differ from those of whole layers by {difference:.2g}"
        raise UserError(
            f"--inference_tp_size {size}: with divided layers of {name} {problem}; use"
            " --unpin_actor_parameters"
        )
    logger().info(
        f"rollout: {name} divided over {size} ranks agrees with the whole layers ({difference:.1e})"
    )
