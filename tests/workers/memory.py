"""Trains and generates with memory flags; reports numbers that must not depend on them.

memory.py ASSETS OUT_FILE
"""

import json
import sys
from pathlib import Path

import torch

from dschat_ppo.common import dist
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.engine import sleep
from dschat_ppo.runtime.launch import leave
from workers.ppo_setup import experience_of, make_ppo, train_on
from workers.quick import be_quick

ROWS = 8  # prompts of a PPO step over all ranks
NUMBERS = ("policy/loss", "value/loss", "grad_norm/actor", "grad_norm/critic", "reward/score_mean")


def two_steps(assets: Path, *words: object) -> dict:
    """Answers and metrics of two PPO steps: those of the second depend on the updates of the first."""
    seed_everything(1)
    mine = ROWS // dist.world_size()
    common = ("--per_device_generation_batch_size", mine, "--per_device_training_batch_size", mine)
    common += ("--actor_learning_rate", 0.01, "--critic_learning_rate", 0.01, "--max_answer_seq_len", 8)
    ppo = make_ppo(assets, *common, *words)
    rows = list(range(dist.rank() * mine, (dist.rank() + 1) * mine))
    answers, metrics = [], []
    for step in (1, 2):
        rollout = ppo.collection.generator.generate(rows, step)
        ids = torch.where(rollout.response_mask, rollout.response_ids, -1)
        full = torch.nn.functional.pad(ids, (0, 8 - ids.shape[1]), value=-1)
        answers.append(dist.gather_cat(full).tolist())
        found = train_on(ppo, experience_of(ppo, rollout, rows))
        metrics.append([found[name] for name in NUMBERS if name in found])
    weights = list(ppo.engines.actor.module.parameters())
    groups = {getattr(weight, "ds_secondary_tensor_group_size", None) for weight in weights}
    return {"answers": answers, "metrics": metrics, "ranks of a copy": list(groups)}


def stages(stage: int) -> tuple[object, ...]:
    return ("--actor_zero_stage", stage, "--critic_zero_stage", stage)


def main() -> None:
    be_quick()
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    found = {"stage 3": two_steps(assets, *stages(3))}
    found["hpZ"] = two_steps(assets, *stages(3), "--zero_hpz_partition_size", 2)
    if dist.world_size() == 2:
        found["offload_optimizer 2"] = two_steps(assets, *stages(2), "--offload_optimizer")
        found["offload_optimizer 3"] = two_steps(assets, *stages(3), "--offload_optimizer")
        found |= {f"stage {stage}": two_steps(assets, *stages(stage)) for stage in range(3)}
        found["offload_reference and reward"] = two_steps(
            assets, *stages(3), "--offload_reference_model", "--offload_reward_model"
        )
        found["experience_on_host"] = two_steps(assets, *stages(3), "--experience_on_host")
        sleep.on_device = lambda tensor: True  # as on a GPU: tensors do move
        for stage in range(4):
            found[f"sleep {stage}"] = two_steps(assets, *stages(stage), "--sleep_in_rollout")
    (out.parent / f"{out.name}.{dist.rank()}").write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
