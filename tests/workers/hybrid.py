"""Toggles the hybrid engine under ZeRO-3 and reports what changed.

hybrid.py ASSETS OUT_FILE
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from deepspeed.runtime.zero import parameter_offload

from dschat_ppo.common import dist
from dschat_ppo.common.launch import leave
from dschat_ppo.common.seeding import row_seeds
from dschat_ppo.data.collators import collate_prompts
from dschat_ppo.models.forward import response_logprobs
from dschat_ppo.monitor.metrics import MetricSums
from dschat_ppo.rollout.generator import generate
from dschat_ppo.rollout.stopping import Stopping
from dschat_ppo.types import Rollout, select_rows
from workers.ppo_setup import make_trainer

TOGGLES, SETTLED = 200, 20


def shards(engine):
    return [parameter.ds_tensor.clone() for parameter in engine.module.parameters()]


def hooks(module):
    return [(id(m._forward_hooks), list(m._forward_hooks), list(m._forward_pre_hooks)) for m in module.modules()]


def generate_some(trainer, count: int, max_new_tokens: int):
    batch = collate_prompts(trainer.prompts, range(count), 0)
    how = replace(trainer.rollouts.how, stopping=Stopping(max_new_tokens, (1,)), rows=4)
    with trainer.engines.hybrid.generating() as model:
        return generate(model, batch, row_seeds(count * dist.rank(), count, 0), how, trainer.engines.hybrid.agree)


def toggle_many(trainer) -> dict:
    """200 times into generation and back: weights, hooks, statuses and memory before and after."""
    engine, process = trainer.engines.actor, psutil.Process()
    parameters = list(engine.module.parameters())
    before = (shards(engine), hooks(engine.module), [p.ds_status for p in parameters])
    stack = len(parameter_offload.FWD_MODULE_STACK)
    memory = []
    for _ in range(TOGGLES):
        generate_some(trainer, 2, 3)
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


def gathered_equals_engine(trainer) -> float:
    """Largest difference between log-probs by the lent model and by the ZeRO-3 engine."""
    rollout = generate_some(trainer, 4, 6)
    with trainer.engines.hybrid.generating() as model:
        lent = response_logprobs(model, rollout, 1.0)
    trainer.engines.eval()
    with torch.no_grad():
        trained = response_logprobs(trainer.engines.actor, rollout, 1.0)
    return float(((lent - trained).abs() * rollout.response_mask).max())


def uneven(trainer, empty: bool) -> dict:
    """Rank 0 generates 1 token a row, rank 1 twelve (or nothing at all); all rows go through score and update."""
    rollout = generate_some(trainer, 4, 1 if dist.rank() == 0 else 12)
    if empty and dist.rank() == 1:
        rollout = replace(rollout, response_mask=torch.zeros_like(rollout.response_mask))
    trainer.mini_dataset.add(trainer.score(rollout))
    experience = trainer.mini_dataset.collect(whiten=True)
    metrics = trainer.update(experience, step=1)
    return {"rows": experience.response_ids.shape[0], "tokens": int(experience.response_mask.sum()), **metrics}


def updates_after_toggles(assets: Path, toggles: int) -> list[float]:
    """Numbers of two updates from one stored rollout, after some toggles, on new engines."""
    trainer = make_trainer(assets, *FLAGS)
    for _ in range(toggles):
        generate_some(trainer, 2, 3)
    rollout_fields = torch.load(assets / "rollout.pt", weights_only=True)
    mine = torch.arange(8).view(dist.world_size(), -1)[dist.rank()]
    trainer.mini_dataset.add(trainer.score(select_rows(Rollout(**rollout_fields), mine)))
    experience = trainer.mini_dataset.collect(whiten=True)
    trainer.engines.train()
    numbers = []
    for part in trainer.mini_dataset.updates(experience, 2, step=1):
        sums = MetricSums()
        norms = trainer.update_once(part.micro_batches, part.num_tokens, sums)
        for _ in range(toggles):
            generate_some(trainer, 2, 3)
        numbers += [*norms.values(), *sums.reduce().values()]
    return numbers


def dropout_in_scoring(assets: Path) -> dict:
    """Scores one rollout twice with models that drop half of their attention in training."""
    trainer = make_trainer(assets, *FLAGS, "--actor_dropout", 0.5, "--critic_dropout", 0.5)
    rollout = trainer.rollout([0, 1, 2, 3], step=1)
    first, second = trainer.score(rollout), trainer.score(rollout)
    trainer.engines.train()
    with torch.no_grad():
        noisy = [response_logprobs(trainer.engines.actor, rollout, 1.0) for _ in range(2)]
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
FLAGS += (
    "--micro_batch_tokens",
    48,
    "--per_device_training_batch_size",
    4,
    "--actor_learning_rate",
    0.01,
    "--critic_learning_rate",
    0.01,
)


def main() -> None:
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    trainer = make_trainer(assets, *FLAGS)
    found = {
        "dropout_noise": dropout_noise(),
        "toggles": toggle_many(trainer),
        "gathered_difference": gathered_equals_engine(trainer),
        "uneven": uneven(trainer, empty=False),
        "one_rank_empty": uneven(trainer, empty=True),
        "without_toggles": updates_after_toggles(assets, 0),
        "with_toggles": updates_after_toggles(assets, 3),
        "dropout": dropout_in_scoring(assets),
    }
    (out.parent / f"{out.name}.{dist.rank()}").write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
