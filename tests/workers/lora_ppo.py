"""Step 3 with LoRA on every ZeRO stage: trajectories, and switches to generation.

lora_ppo.py ASSETS OUT_FILE     ASSETS has `reward_adapter`, `reward_dora` and `rollout.pt` too
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.cli import parse
from dschat_ppo.models.adapters import adapter_layers
from dschat_ppo.models.forward import response_logprobs
from dschat_ppo.ppo.state import PPOComponents
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.types import Rollout, select_rows
from workers.ppo_setup import experience_of, ppo_of, update_numbers
from workers.quick import be_quick

SWITCHES, STEPS, ROWS = 25, 3, 16
FLAGS = ["--data_path", "unused", "--output_dir", "unused", "--num_warmup_steps", "0", "--ppo_epochs", "3"]
FLAGS += ["--actor_lora_dim", "4", "--critic_lora_dim", "4", "--only_optimize_lora", "--lora_alpha", "8"]
FLAGS += ["--actor_lora_learning_rate", "0.01", "--critic_lora_learning_rate", "0.01"]
FLAGS += ["--critic_learning_rate", "0.01", "--old_logprobs", "recompute"]
FULL_KL = ["--kl_estimator", "full", "--kl_loss_coef", "0.1", "--kl_loss_estimator", "full"]
CHECKPOINTING = ["--actor_gradient_checkpointing", "--critic_gradient_checkpointing"]


def ppo_with(assets: Path, actor: str, critic: str, stage: int, device, *words: str) -> PPOComponents:
    """Step 3 on these model folders; half of the rows are in each of two micro-batches over all ranks."""
    ranks = dist.world_size()
    flags = ["--actor_model_name_or_path", str(assets / actor), "--critic_model_name_or_path", str(assets / critic)]
    flags += ["--actor_zero_stage", str(stage), "--critic_zero_stage", str(stage)]
    flags += ["--per_device_training_batch_size", str(4 // ranks), "--gradient_accumulation_steps", "2"]
    flags += ["--micro_batch_tokens", str(4 // ranks * 14), "--per_device_generation_batch_size", str(ROWS // ranks)]
    seed_everything(1)
    return ppo_of(parse("ppo", [*flags, *FLAGS, *words]), Dataset.from_dict({"row": ["{}"] * 40}), device)


def my_rows(assets: Path) -> Rollout:
    fields = torch.load(assets / "rollout.pt", weights_only=True)
    return select_rows(Rollout(**fields), torch.arange(ROWS).view(dist.world_size(), -1)[dist.rank()])


def trajectory(ppo: PPOComponents, assets: Path) -> list[list[float]]:
    """Scores of a stored rollout, then losses and gradient norms of updates on it."""
    experience = experience_of(ppo, my_rows(assets))
    means = [experience.scores, experience.ref_logprobs, experience.kl, experience.values, experience.old_logprobs]
    numbers = [[float(tensor.float().mean()) for tensor in means]]
    return numbers + update_numbers(ppo, experience, STEPS)


def held(ppo: PPOComponents) -> list[torch.Tensor]:
    """Copies of the tensors that this rank holds of the actor."""
    return [getattr(p, "ds_tensor", p).detach().clone() for p in ppo.engines.actor.module.parameters()]


def switch_often(ppo: PPOComponents, assets: Path) -> dict:
    """Into generation and back, after an update: what changed, and how log-probs of the merged model differ."""
    engine, rows = ppo.engines.actor, my_rows(assets)
    before = held(ppo)
    layers = adapter_layers(engine.module)
    ppo.engines.eval()
    with torch.no_grad():
        trained = response_logprobs(engine, rows, 1.0).logprobs
        reference = response_logprobs(ppo.engines.reference, rows, 1.0).logprobs
    ppo.engines.train()
    for _ in range(SWITCHES):
        with ppo.engines.hybrid.generating() as model:
            inside = {type(module).__name__ for module in model.modules()}
            merged = model.model.layers[0].self_attn.q_proj.weight
            has_whole_weights = merged.numel() > 0
    with ppo.engines.hybrid.generating() as model:
        lent = response_logprobs(model, rows, 1.0).logprobs
    ppo.engines.eval()
    with torch.no_grad():
        again = response_logprobs(engine, rows, 1.0).logprobs
        reference_again = response_logprobs(ppo.engines.reference, rows, 1.0).logprobs
    real = rows.response_mask
    return {
        "weights_equal": all(torch.equal(a, b) for a, b in zip(before, held(ppo), strict=True)),
        "layers_equal": layers == adapter_layers(engine.module) and len(layers) > 0,
        "plain": "Linear" in inside and "ModuleDict" not in inside,
        "whole": has_whole_weights,
        "same_forward": torch.equal(trained, again) and torch.equal(reference, reference_again),
        "merged_difference": float((lent - trained)[real].abs().max()),
        "adapter_effect": float((reference - trained)[real].abs().max()),
    }


def main() -> None:
    be_quick()
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    quiet_libraries()
    device = init_process_group()
    torch.set_num_threads(1)
    found: dict = {"trajectories": {}, "dora": {}, "switches": {}}
    several = dist.world_size() > 1
    bases = [(0, "own bases", []), (3, "one base", ["--share_base"])]
    if several:
        offloaded = ["--share_base", "--offload", *CHECKPOINTING]
        bases = [(2, "own bases", []), (3, "own bases", CHECKPOINTING), (3, "one base, offloaded", offloaded)]
    for stage, label, words in bases:
        ppo = ppo_with(assets, "lm", "reward_adapter", stage, device, "--dtype", "fp32", *FULL_KL, *words)
        found["trajectories"][f"stage {stage} {label}"] = trajectory(ppo, assets)
    # on one rank ZeRO-3 does not copy what it gathers
    layouts = [(0, "bf16"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (3, "bf16")] if several else [(3, "fp32")]
    for stage, dtype in layouts:
        critic, kind = ("reward_dora", ["--use_dora"]) if stage % 2 else ("reward_adapter", [])
        ppo = ppo_with(assets, "lm", critic, stage, device, "--dtype", dtype, "--share_base", *kind)
        numbers = trajectory(ppo, assets)
        if kind and dtype == "fp32":
            found["dora"][f"stage {stage}"] = numbers
        found["switches"][f"stage {stage} {dtype}"] = switch_often(ppo, assets)
    if dist.is_main():
        out.write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
