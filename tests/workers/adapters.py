"""Trains tiny models with LoRA at several ZeRO stages and writes each one's trajectory and what it changed.

adapters.py ASSETS FOLDER OUT_FILE
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import TokenRows
from dschat_ppo.models.adapters import adapter_settings
from dschat_ppo.models.loading import load_causal_lm, load_sequence_classifier
from dschat_ppo.models.policy_model import PolicyModel
from dschat_ppo.models.saving import gather_state
from dschat_ppo.models.scalar_model import ScalarModel
from dschat_ppo.runtime.launch import leave
from dschat_ppo.runtime.process_group import init_process_group
from dschat_ppo.supervised.reward_objectives import reward_objective
from dschat_ppo.supervised.sft import sft_objective
from dschat_ppo.supervised.trainer import SupervisedTrainer, TrainerFlags, fit_ds_config
from workers.quick import be_quick

STEPS, ROWS = 4, 8
STAGES = {1: (0,), 2: (2, 3)}  # for this many ranks
FROZEN = ["--lora_dim", "4", "--only_optimize_lora"]
CASES = {
    "lora": ("sft", [*FROZEN, "--lora_learning_rate", "0.02"]),
    "beside": ("sft", ["--lora_dim", "4", "--lora_learning_rate", "0.02", "--learning_rate", "0.001"]),
    "reward": ("reward", [*FROZEN, "--lora_learning_rate", "0.02", "--learning_rate", "0.01"]),
    "dora": ("sft", [*FROZEN, "--use_dora", "--lora_learning_rate", "0.02"]),
}


def rows_of(step: str) -> Dataset:
    """Eight rows of uneven lengths."""
    answers = [[[20 + row, 30 + 2 * row, 1][row % 3 :]] for row in range(ROWS)]
    if step == "reward":
        answers = [[*chosen, [40 + row, 1]] for row, chosen in enumerate(answers)]
    rows = [{"prompt_ids": [10 + row, 11], "answers": chosen} for row, chosen in enumerate(answers)]
    return Dataset.from_list([{**row, "margin": 0.0} for row in rows] if step == "reward" else rows)


def trainer_of(case: str, stage: int, assets: Path, settings: Path) -> SupervisedTrainer:
    step, flags = CASES[case]
    model = str(assets / ("reward" if step == "reward" else "lm"))
    words = ["--model_name_or_path", model, "--data_path", "d", "--output_dir", "o", "--dtype", "fp32"]
    words += ["--zero_stage", str(stage), "--per_device_train_batch_size", str(ROWS // dist.world_size())]
    words += ["--num_train_epochs", str(STEPS), "--gradient_checkpointing", *flags]
    if stage == 3:
        words += ["--deepspeed_config", str(settings)]
    config = parse(step, words)
    ds_config = fit_ds_config(config.fit, config.run)
    adapter = adapter_settings(config.lora.lora_dim, config.lora.lora_module_name, config.adapters)
    seed_everything(5)
    torch.rand(dist.rank() + stage)  # what was drawn before does not matter
    if step == "sft":
        module = PolicyModel(load_causal_lm(model, "fp32", ds_config, adapter=adapter))
        objective = sft_objective(0, False, dist.device())
    else:
        module = ScalarModel(load_sequence_classifier(model, "fp32", ds_config, False, adapter=adapter))
        objective = reward_objective(0, dist.device(), config)
    module.gradient_checkpointing_enable()
    rows = TokenRows(rows_of(step), None)
    return SupervisedTrainer(module, ds_config, rows, objective, TrainerFlags.of(config))


def trained(case: str, stage: int, assets: Path, settings: Path, out: Path) -> dict:
    trainer = trainer_of(case, stage, assets, settings)
    before = gather_state(trainer.engine.module)
    names = set(before)
    trajectory = [
        [found["loss"], found["grad_norm"]] for found in (trainer.train_step(part) for part in trainer.steps_left())
    ]
    after = gather_state(trainer.engine.module)
    if stage != 2:
        trainer.save(out / f"{case}{stage}", AutoTokenizer.from_pretrained(assets / "lm"))
    changed = sorted(name for name in names if not torch.equal(before[name], after[name]))
    last = {name: after[name].double().sum().item() for name in changed[:: max(1, len(changed) // 6)]}
    first = {name: before[name].double().sum().item() for name in changed if "lora_A" in name}
    return {"trajectory": trajectory, "changed": changed, "names": sorted(names), "last": last, "first": first}


def main() -> None:
    be_quick()
    assets, folder, out = Path(sys.argv[-3]), Path(sys.argv[-2]), Path(sys.argv[-1])
    quiet_libraries()
    init_process_group()
    torch.set_num_threads(1)
    settings = folder / "partition_everything.json"
    found = {
        f"{case} {stage}": trained(case, stage, assets, settings, folder / str(dist.world_size()))
        for case in CASES
        for stage in STAGES[dist.world_size()]
    }
    if dist.is_main():
        out.write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
