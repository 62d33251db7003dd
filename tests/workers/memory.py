"""Trains and generates with memory flags; reports numbers that must not depend on them.

memory.py ASSETS OUT_FILE
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from tiny_models import VOCABULARY, new_model

from dschat_ppo.common import dist
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.engine import hybrid_engine
from dschat_ppo.engine.hybrid_engine import HybridEngine
from dschat_ppo.engine.tensor_parallel import check_tensor_parallel, tensor_parallel
from dschat_ppo.run.launch import leave
from workers.ppo_setup import experience_of, make_ppo, train_on
from workers.quick import be_quick

ROWS = 8  # prompts of a PPO step over all ranks
NUMBERS = ("policy/loss", "value/loss", "optim/grad_norm/actor", "optim/grad_norm/critic", "reward/score_mean")


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
        rollout = ppo.collection.generator.answer(rows, step)
        ids = torch.where(rollout.response_mask, rollout.response_ids, -1)
        full = torch.nn.functional.pad(ids, (0, 8 - ids.shape[1]), value=-1)
        answers.append(dist.gather_cat(full).tolist())
        found = train_on(ppo, experience_of(ppo, rollout, rows))
        metrics.append([found[name] for name in NUMBERS if name in found])
    weights = list(ppo.engines.actor.module.parameters())
    groups = {getattr(weight, "ds_secondary_tensor_group_size", None) for weight in weights}
    partitioned = sum(weight.numel() == 0 for weight in weights)
    return {"answers": answers, "metrics": metrics, "ranks of a copy": list(groups), "partitioned": partitioned}


@torch.no_grad()
def divided_models() -> dict:
    """For each architecture: the largest difference of logits to the whole model, and the share of weights held."""
    parallel, found = tensor_parallel(2, layers=1), {}
    for name in ("llama", "qwen2", "qwen3", "gpt-neox", "phi3", "gemma2", "gemma3"):
        torch.distributed.barrier()
        model, ids = new_model(name), torch.randint(2, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(3))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        whole, count = model(ids).logits, sum(weight.numel() for weight in model.parameters())
        config = model.config.get_text_config()
        check_tensor_parallel(config, 2, 2)
        with HybridEngine(SimpleNamespace(module=model), parallel=parallel).generating() as lent:
            difference = float((lent(ids).logits - whole).abs().max())
            held = sum(weight.numel() for weight in lent.parameters())
        layers = model.gpt_neox.layers if name == "gpt-neox" else model.model.layers
        found[name] = {
            "difference": difference,
            "freed": count - held,
            "layers": sum(layer.weight.numel() for layer in layers.modules() if isinstance(layer, torch.nn.Linear)),
            "restored": all(torch.equal(before[key], value) for key, value in model.state_dict().items()),
            "forwards": sum("forward" in vars(module) for module in model.modules()),
        }
    return found


def stages(stage: int) -> tuple[object, ...]:
    """Flags of a ZeRO stage; at stage 3 every weight is partitioned, the small ones of tiny models too."""
    return ("--actor_zero_stage", stage, "--critic_zero_stage", stage, "--deepspeed_config", sys.argv[-1] + ".ds.json")


def main() -> None:
    be_quick()
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    settings = Path(f"{out}.ds.json")
    if dist.is_main():
        settings.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    while not settings.exists() or not settings.read_text():  # the ranks have not joined yet
        time.sleep(0.05)
    found = {"stage 3": two_steps(assets, *stages(3))}
    if dist.world_size() == 4:
        found["hpZ"] = two_steps(assets, *stages(3), "--zero_hpz_partition_size", 2)
    else:
        found["stage 2"] = two_steps(assets, *stages(2))
        found["offload_optimizer"] = two_steps(assets, *stages(3), "--offload_optimizer")
        found["offload_reference and reward"] = two_steps(
            assets, *stages(3), "--offload_reference_model", "--offload_reward_model"
        )
        found["divided"] = divided_models()
        found["tensor parallel"] = two_steps(
            assets, *stages(3), "--inference_tp_size", 2, "--tp_gather_partition_size", 1
        )
        hybrid_engine.on_device = lambda tensor: True  # as on a GPU: tensors do move
        for stage in (2, 3):
            found[f"sleep {stage}"] = two_steps(assets, *stages(stage), "--sleep_in_rollout")
    (out.parent / f"{out.name}.{dist.rank()}").write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
