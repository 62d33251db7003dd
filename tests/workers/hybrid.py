"""Toggles the hybrid engine under ZeRO-3 and reports what changed.

hybrid.py ASSETS OUT_FILE
"""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from deepspeed.runtime.zero import parameter_offload

from dschat_ppo.common import dist
from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.data.batches import collate_prompts
from dschat_ppo.models.forward import response_logprobs
from dschat_ppo.monitor.metric_sums import MetricSums
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.sampling import StoppingCriteria
from dschat_ppo.run.launch import leave
from dschat_ppo.types import Rollout, select_rows
from workers.ppo_setup import experience_of, make_ppo, score_answers, train_on, update_once
from workers.quick import be_quick

TOGGLES, SETTLED = 200, 20


def shards(engine):
    return [parameter.ds_tensor.clone() for parameter in engine.module.parameters()]


def hooks(module):
    return [(id(m._forward_hooks), list(m._forward_hooks), list(m._forward_pre_hooks)) for m in module.modules()]


def generate_some(ppo, count: int, max_new_tokens: int):
    batch = collate_prompts(ppo.collection.generator.prompts, range(count), 0)
    config = replace(ppo.collection.generator.config, stopping=StoppingCriteria(max_new_tokens, (1,)), rows=4)
    with ppo.engines.hybrid.generating() as model:
        return generate(
            model, batch, row_seeds(count * dist.rank(), count, 0), config, ppo.engines.hybrid.max_over_ranks
        )


def toggle_many(ppo) -> dict:
    """200 times into generation and back: weights, hooks, statuses and memory before and after."""
    engine, process = ppo.engines.actor, psutil.Process()
    parameters = list(engine.module.parameters())
    before = (shards(engine), hooks(engine.module), [p.ds_status for p in parameters])
    stack = len(parameter_offload.FWD_MODULE_STACK)
    memory = []
    for _ in range(TOGGLES):
        generate_some(ppo, 2, 3)
        memory.append(process.memory_info().rss)
    return {
        "weights_equal": all(torch.equal(a, b) for a, b in zip(before[0], shards(engine), strict=True)),
        "hooks_equal": before[1] == hooks(engine.module),
        "status_equal": before[2] == [p.ds_status for p in parameters],
        "partitioned": sum(p.numel() == 0 for p in parameters),
        "stack_growth": len(parameter_offload.FWD_MODULE_STACK) - stack,
        "memory_growth_mib": (memory[-1] - memory[SETTLED]) / 2**20,
        "training_mode": engine.module.training,
    }


def gathered_equals_engine(ppo) -> float:
    """Largest difference between log-probs by the lent model and by the ZeRO-3 engine."""
    rollout = generate_some(ppo, 4, 6)
    with ppo.engines.hybrid.generating() as model:
        lent = response_logprobs(model, rollout, 1.0).logprobs
    ppo.engines.eval()
    with torch.no_grad():
        trained = response_logprobs(ppo.engines.actor, rollout, 1.0).logprobs
    return float(((lent - trained).abs() * rollout.response_mask).max())


def uneven(ppo, empty: bool) -> dict:
    """Rank 0 generates 1 token a row, rank 1 twelve (or nothing at all); all rows go through score and update."""
    rollout = generate_some(ppo, 4, 1 if dist.rank() == 0 else 12)
    if empty and dist.rank() == 1:
        rollout = replace(rollout, response_mask=torch.zeros_like(rollout.response_mask))
    experience = experience_of(ppo, rollout)
    metrics = train_on(ppo, experience)
    return {"rows": experience.response_ids.shape[0], "tokens": int(experience.response_mask.sum()), **metrics}


def layer_by_layer(assets: Path) -> dict:
    """Answers of uneven lengths with weights gathered once, and layer by layer."""
    pinned, unpinned = (make_ppo(assets, *FLAGS, *words) for words in ((), ("--unpin_actor_parameters",)))
    before = shards(unpinned.engines.actor)
    tokens = 2 if dist.rank() == 0 else 9  # rank 0 is done long before rank 1
    expected, found = (generate_some(ppo, 4, tokens) for ppo in (pinned, unpinned))
    fast = unpinned.collection.generator.config
    unpinned.collection.generator.config = replace(fast, engine="padded")
    by_padded_batches = generate_some(unpinned, 4, tokens)
    unpinned.collection.generator.config = fast
    return {
        "engine": fast.engine,
        "collective": [ppo.engines.hybrid.max_over_ranks is not None for ppo in (unpinned, pinned)],
        "same_tokens": torch.equal(expected.response_ids, found.response_ids),
        "same_tokens_padded": torch.equal(expected.response_ids, by_padded_batches.response_ids),
        "difference": float((expected.rollout_logprobs - found.rollout_logprobs).abs().max()),
        "weights_equal": all(torch.equal(a, b) for a, b in zip(before, shards(unpinned.engines.actor), strict=True)),
        "longest": int(found.response_mask.sum(dim=1).max()),
        "partitioned": sum(p.numel() == 0 for p in unpinned.engines.actor.module.parameters()),
        "trains": all(math.isfinite(norm) and norm > 0 for norm in update_from_answers(unpinned)),
    }


def update_from_answers(ppo) -> list[float]:
    """Gradient norms of an update from fresh answers."""
    rollout = ppo.collection.generator.answer([0, 1, 2, 3], 1)
    metrics = train_on(ppo, experience_of(ppo, rollout))
    return [metrics["optim/grad_norm/actor"], metrics["optim/grad_norm/critic"]]


def answers_of_two_steps(assets: Path) -> list:
    """Tokens of all ranks' answers to eight prompts, in order, for two PPO steps."""
    per_rank = 8 // dist.world_size()
    ppo = make_ppo(assets, *FLAGS, "--per_device_generation_batch_size", per_rank)
    mine = list(range(dist.rank() * per_rank, (dist.rank() + 1) * per_rank))
    answers = []
    for step in (1, 2):
        rollout = ppo.collection.generator.answer(mine, step)
        ids = torch.where(rollout.response_mask, rollout.response_ids, -1)
        full = torch.nn.functional.pad(ids, (0, ppo.config.ppo.max_answer_seq_len - ids.shape[1]), value=-1)
        answers.append(dist.gather_cat(full).tolist())
    return answers


def updates_after_toggles(assets: Path, toggles: int, *words: object) -> list[float]:
    """Numbers of two updates from one stored rollout, after some toggles, on new engines."""
    ppo = make_ppo(assets, *FLAGS, *words)
    for _ in range(toggles):
        generate_some(ppo, 2, 3)
    rollout_fields = torch.load(assets / "rollout.pt", weights_only=True)
    mine = torch.arange(8).view(dist.world_size(), -1)[dist.rank()]
    experience = experience_of(ppo, select_rows(Rollout(**rollout_fields), mine))
    ppo.engines.train()
    numbers = []
    for minibatch in ppo.mini_dataset.minibatches(experience, 2, step=1):
        sums = MetricSums()
        norms = update_once(ppo, minibatch, sums).grad_norms
        for _ in range(toggles):
            generate_some(ppo, 2, 3)
        numbers += [*norms.values(), *sums.reduce().values()]
    return numbers


def dropout_in_scoring(assets: Path) -> dict:
    """Scores one rollout twice with models that drop half of their attention in training."""
    ppo = make_ppo(assets, *FLAGS, "--actor_dropout", 0.5, "--critic_dropout", 0.5)
    prompts = [0, 1, 2, 3]
    rollout = ppo.collection.generator.answer(prompts, 1)
    first, second = (score_answers(ppo, rollout, prompts) for _ in range(2))
    ppo.engines.train()
    with torch.no_grad():
        noisy = [response_logprobs(ppo.engines.actor, rollout, 1.0).logprobs for _ in range(2)]
    return {
        "scored_alike": torch.equal(first.old_logprobs, second.old_logprobs)
        and torch.equal(first.values, second.values),
        "as_in_rollout": float((first.old_logprobs - first.rollout_logprobs).abs().max()),
        "noise_in_training": float((noisy[0] - noisy[1]).abs().max()),
    }


def dropout_noise() -> float:
    """The first number of this rank's default random stream, from which dropout draws."""
    return float(torch.rand(()))


FLAGS = ("--actor_zero_stage", 3, "--critic_zero_stage", 3, "--per_device_generation_batch_size", 4)
FLAGS += ("--micro_batch_tokens", 48, "--per_device_training_batch_size", 4, "--old_logprobs", "recompute")
FLAGS += ("--actor_learning_rate", 0.01, "--critic_learning_rate", 0.01)
SETTINGS = Path(sys.argv[-1] + ".ds.json")  # every weight is partitioned, those of tiny models too
FLAGS += ("--deepspeed_config", SETTINGS)


def main() -> None:
    be_quick()
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    if dist.is_main():
        SETTINGS.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    while not SETTINGS.exists() or not SETTINGS.read_text():  # the ranks have not joined yet
        time.sleep(0.05)
    if dist.world_size() == 1:
        out.write_text(json.dumps({"answers": answers_of_two_steps(assets)}))
        leave(0)
    ppo = make_ppo(assets, *FLAGS)
    found = {
        "dropout_noise": dropout_noise(),
        "toggles": toggle_many(ppo),
        "gathered_difference": gathered_equals_engine(ppo),
        "uneven": uneven(ppo, empty=False),
        "one_rank_empty": uneven(ppo, empty=True),
        "without_toggles": updates_after_toggles(assets, 0),
        "with_toggles": updates_after_toggles(assets, 3),
        "asleep": updates_after_toggles(assets, 2, "--sleep_in_rollout"),
        "dropout": dropout_in_scoring(assets),
        "layer_by_layer": layer_by_layer(assets),
        "answers": answers_of_two_steps(assets),
    }
    (out.parent / f"{out.name}.{dist.rank()}").write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
