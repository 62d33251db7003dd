"""Trains on pairs on this number of ranks and writes each one's trajectory.

preference.py ASSETS OUT_FILE
"""

import json
import sys
from pathlib import Path

import torch

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import epoch_order, optimizer_steps
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.models.forward import answer_logprobs
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.supervised.policy_objectives import dpo_objective
from dschat_ppo.supervised.reward_objectives import reward_objective
from dschat_ppo.supervised.train_preference import load_trained_model
from dschat_ppo.supervised.trainer import SupervisedTrainer, TrainerFlags, fit_ds_config
from workers.quick import be_quick

GLOBAL_BATCH, STEPS = 4, 4
METRICS = ("loss", "grad_norm", "margin", "accuracy")
TASKS = {
    "dpo": ["--objective", "dpo"],
    "dpo_nll": ["--objective", "dpo_nll", "--beta", "0.3"],
    "ipo": ["--objective", "ipo"],
    "reward": ["--center_rewards_coef", "0.1"],
}


@torch.no_grad()
def largest_lead(fit: SupervisedTrainer, rows) -> float:
    """Largest |D| over the rows, in training mode, in other batches than the reference was computed in."""
    largest = 0.0
    for start in range(0, len(rows), 3):
        batch = fit.objective.collate(rows, range(start, min(start + 3, len(rows))))
        ratios = answer_logprobs(fit.engine, batch.input_ids, batch.answer_mask) - batch.ref_logprobs
        chosen, rejected = ratios.chunk(2)
        largest = max(largest, float((chosen - rejected).abs().max()))
    return largest


def trajectory(assets: Path, task: str, stage: int, micro: int, device) -> dict:
    model = str(assets / ("reward" if task == "reward" else "lm"))
    accumulation = GLOBAL_BATCH // (micro * dist.world_size())
    words = ["--model_name_or_path", model, "--data_path", str(assets / "pairs.jsonl"), "--data_split", "0,1,0"]
    words += ["--output_dir", "unused", "--dtype", "fp32", "--zero_stage", str(stage), "--learning_rate", "0.003"]
    words += ["--per_device_train_batch_size", str(micro), "--gradient_accumulation_steps", str(accumulation)]
    words += ["--per_device_eval_batch_size", str(micro + 1), *TASKS[task]]
    config = parse("reward", words)
    # 11 rows: the third step of an epoch is short, and two ranks do not divide them, so that there are filler pairs
    rows = prepare("preference", load_tokenizer(model, "model"), config.data, 64).train.select(range(11))
    ds_config = fit_ds_config(config.fit, config.run)
    objective = (reward_objective if task == "reward" else dpo_objective)(0, device, config)
    trained = load_trained_model(model, config, ds_config)
    fit = SupervisedTrainer(trained, ds_config, TokenRows(rows, None), objective, TrainerFlags.of(config))
    found = {"lead": 0.0 if task == "reward" else largest_lead(fit, fit.rows.train)}
    order = [epoch_order(len(rows), 7, epoch) for epoch in range(2)]
    steps = [step for part in order for step in optimizer_steps(
        part, micro, accumulation, dist.world_size(), dist.rank()
    )]  # fmt: skip
    metrics = [fit.train_step(indices) for indices in steps[:STEPS]]
    found["steps"] = [[step[name] for name in METRICS] for step in metrics]
    found["described"] = list(objective.describe(fit.engine, fit.rows).values()) if objective.describe else []
    return found


def main() -> None:
    be_quick()
    assets, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    quiet_libraries()
    device = init_process_group()
    torch.set_num_threads(1)
    found = {}
    splits = [("dpo", 0, 2)] if dist.world_size() == 1 else [("dpo", 0, 1), ("dpo", 3, 2)]
    for task, stage, micro in [*splits, *[(task, 3, 1) for task in ("dpo_nll", "ipo", "reward")]]:
        seed_everything(1)
        found[f"{task} stage {stage} micro {micro}"] = trajectory(assets, task, stage, micro, device)
    if dist.is_main():
        out.write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
