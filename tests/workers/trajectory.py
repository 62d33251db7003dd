"""Runs ZeRO stages with splits into micro-batches on one number of ranks and writes each one's trajectory.

trajectory.py ASSETS OUT_FILE
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
from dschat_ppo.data.batches import epoch_order, optimizer_steps
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.supervised.reward_objectives import reward_objective
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.supervised.trainer import SupervisedTrainer, TrainerFlags, fit_ds_config
from dschat_ppo.types import Rollout, select_rows
from workers.ppo_setup import experience_of, ppo_of, update_numbers
from workers.quick import be_quick

GLOBAL_BATCH, STEPS = 8, 5
# number of ranks -> (stage, rows of a micro-batch)
SPLITS = {1: ((0, 4),), 2: ((0, 1), (1, 2), (2, 1), (3, 4))}


def split_flags(micro: int) -> list[str]:
    return ["--gradient_accumulation_steps", str(GLOBAL_BATCH // (micro * dist.world_size()))]


def fit_trajectory(step: str, assets: Path, stage: int, micro: int, device, *more: str) -> list[list[float]]:
    """Loss and gradient norm of the first steps of SFT or reward training."""
    model, data = {"sft": ("lm", "sft"), "reward": ("reward", "pairs")}[step]
    words = ["--model_name_or_path", str(assets / model), "--data_path", str(assets / f"{data}.jsonl")]
    words += ["--output_dir", "unused", "--dtype", "fp32", "--zero_stage", str(stage), "--learning_rate", "0.01"]
    words += ["--per_device_train_batch_size", str(micro), *split_flags(micro), "--data_split", "1,1,0", *more]
    config = parse(step, words)
    tokenizer = load_tokenizer(str(assets / model), "model")
    rows = prepare("sft" if step == "sft" else "preference", tokenizer, config.data, 64).train
    ds_config = fit_ds_config(config.fit, config.run, config.memory)
    if step == "sft":
        trained = PolicyModel(load_causal_lm(str(assets / model), config.run.dtype, ds_config))
        objective = sft_objective(0, False, device)
        if config.fit.gradient_checkpointing:
            trained.gradient_checkpointing_enable()
    else:
        classifier = load_sequence_classifier(str(assets / model), "fp32", ds_config, new_head=False)
        trained, objective = ScalarModel(classifier), reward_objective(0, device, config)
    fit = SupervisedTrainer(trained, ds_config, TokenRows(rows, None), objective, TrainerFlags.of(config))
    order = [index for epoch in range(3) for index in epoch_order(len(rows), 7, epoch)]
    taken = optimizer_steps(order, micro, fit.plan.flags.gradient_accumulation_steps, dist.world_size(), dist.rank())
    steps = [fit.train_step(indices) for indices, _ in zip(taken, range(STEPS), strict=False)]
    return [[step["loss"], step["grad_norm"]] for step in steps]


def stored_rollout(assets: Path, refill_padding: bool) -> Rollout:
    fields = torch.load(assets / "rollout.pt", weights_only=True)
    if refill_padding:
        generator = torch.Generator().manual_seed(9)
        for ids, mask in (("prompt_ids", "prompt_mask"), ("response_ids", "response_mask")):
            other = torch.randint(5, 300, fields[ids].shape, generator=generator)
            fields[ids] = torch.where(fields[mask], fields[ids], other)
    return Rollout(**fields)


def ppo_trajectory(assets: Path, stage: int, micro: int, device, refill_padding: bool = False) -> list[list[float]]:
    """Losses and gradient norms of the first updates from one stored rollout."""
    words = ["--actor_model_name_or_path", str(assets / "lm"), "--critic_model_name_or_path", str(assets / "reward")]
    words += ["--data_path", "unused", "--output_dir", "unused", "--dtype", "fp32", "--actor_zero_stage", str(stage)]
    words += ["--critic_zero_stage", str(stage), "--per_device_training_batch_size", str(micro), *split_flags(micro)]
    words += ["--micro_batch_tokens", str(micro * 14)]  # `micro` of the longest rows
    words += ["--per_device_generation_batch_size", str(16 // dist.world_size()), "--ppo_epochs", "3"]
    words += ["--num_warmup_steps", "0", "--actor_learning_rate", "0.01", "--critic_learning_rate", "0.01"]
    words += ["--entropy_coef", "0.01", "--old_logprobs", "recompute"]  # none are recorded in the stored rollout
    config = parse("ppo", words)
    ppo = ppo_of(config, Dataset.from_dict({"row": ["{}"] * 40}), device)
    mine = torch.arange(16).view(dist.world_size(), -1)[dist.rank()]
    experience = experience_of(ppo, select_rows(stored_rollout(assets, refill_padding), mine))
    return update_numbers(ppo, experience, STEPS)


def main() -> None:
    be_quick()
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    quiet_libraries()
    device = init_process_group()
    torch.set_num_threads(1)
    found = {}
    for stage, micro in SPLITS[dist.world_size()]:
        for step in ("sft", "reward", "ppo"):
            seed_everything(1)
            if step == "ppo":
                trajectory = ppo_trajectory(assets, stage, micro, device)
            else:
                trajectory = fit_trajectory(step, assets, stage, micro, device)
            found[f"{step} stage {stage} micro {micro}"] = trajectory
    if dist.world_size() == 2:
        seed_everything(1)
        found["ppo other ids in padding"] = ppo_trajectory(assets, 3, 2, device, refill_padding=True)
        for flag in ("--gradient_checkpointing", "--offload"):
            seed_everything(1)
            found[f"sft stage 3 {flag}"] = fit_trajectory("sft", assets, 3, 2, device, flag)
        for stage in (1, 2, 3):
            seed_everything(1)
            found[f"bf16 stage {stage}"] = fit_trajectory("sft", assets, stage, 2, device, "--dtype", "bf16")
    if dist.is_main():
        out.write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
