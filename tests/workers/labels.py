"""Trains on labelled answers, labelled steps and pairs without a reference, on this number of ranks, and
writes each one's trajectory.

labels.py ASSETS SEQUENCE_RANKS OUT_FILE       reads kto.jsonl and steps.jsonl beside OUT_FILE

Ranks that share rows train some of the splits of one rank.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from dschat_ppo.common import dist
from dschat_ppo.common.logging import quiet_libraries
from dschat_ppo.common.seeding import seed_everything
from dschat_ppo.config.cli import parse
from dschat_ppo.data.batches import epoch_order, optimizer_steps
from dschat_ppo.data.prepare import TokenRows, prepare
from dschat_ppo.models.tokenizers import load_tokenizer
from dschat_ppo.run.launch import leave
from dschat_ppo.run.process_group import init_process_group
from dschat_ppo.supervised.train_preference import OBJECTIVES, load_trained_model
from dschat_ppo.supervised.trainer import SupervisedTrainer, TrainerFlags, fit_ds_config
from workers.quick import be_quick

GLOBAL_BATCH, STEPS = 4, 5
# name, stage, rows of a micro-batch
OTHERS = [("process", 3, 1), ("orpo", 3, 1), ("simpo", 3, 1), ("cpo", 2, 1)]
SPLITS = {
    1: [("kto", 0, 2), ("kto", 3, 1), *OTHERS],
    2: [("kto", 0, 1), ("kto", 3, 2), ("kto packed", 0, 1), ("process", 0, 2), *OTHERS],
}
SHARED = [("kto", 3, 1), ("process", 3, 1), ("orpo", 3, 1)]


def trajectory(assets: Path, folder: Path, name: str, stage: int, micro: int, device) -> dict:
    task = name.split()[0]
    model = str(assets / "lm")
    data = {"kto": folder / "kto.jsonl", "process": folder / "steps.jsonl"}.get(task, assets / "pairs.jsonl")
    accumulation = GLOBAL_BATCH // (micro * dist.data_ranks())
    words = ["--model_name_or_path", model, "--data_path", str(data), "--data_split", "0,1,0", "--max_seq_len", "64"]
    words += ["--output_dir", "unused", "--dtype", "fp32", "--zero_stage", str(stage), "--learning_rate", "0.003"]
    words += ["--per_device_train_batch_size", str(micro), "--gradient_accumulation_steps", str(accumulation)]
    words += ["--per_device_eval_batch_size", str(micro + 1), "--objective", task]
    words += ["--kto_undesirable_weight", "0.2"] if task == "kto" else []
    config = parse("reward", words)
    tokens = prepare(config.reward.data_use, load_tokenizer(model, "model"), config.data, 64).train
    # 11 rows: the third step of an epoch is short, and two ranks do not divide them, so that there are filler rows
    rows = TokenRows(tokens.select(range(11)), tokens.select(range(11, 16)))
    ds_config = fit_ds_config(config.fit, config.run)
    seed_everything(1)
    trained = load_trained_model(model, config, ds_config)
    fit = SupervisedTrainer(trained, ds_config, rows, OBJECTIVES[task](0, device, config), TrainerFlags.of(config))
    assert trained.layout.divided == (dist.sequence_ranks() > 1)
    if name.endswith("packed"):
        fit.engine.module.layout = replace(fit.engine.module.layout, packed=True)
    order = [epoch_order(11, 7, epoch) for epoch in range(2)]
    steps = [step for part in order for step in optimizer_steps(
        part, micro, accumulation, dist.data_ranks(), dist.data_rank()
    )]  # fmt: skip
    metrics = [fit.train_step(indices) for indices in steps[:STEPS]]
    names = [key for key in metrics[0] if key not in ("samples", "tokens")]
    found = {"steps": [{key: step[key] for key in names} for step in metrics], "eval": fit.evaluate()}
    found["described"] = fit.objective.describe(fit.engine, fit.rows) if fit.objective.describe else {}
    return found


def main() -> None:
    be_quick()
    assets, shared, out = Path(sys.argv[-3]), int(sys.argv[-2]), Path(sys.argv[-1])
    quiet_libraries()
    device = init_process_group()
    torch.set_num_threads(1)
    dist.share_rows(shared)
    found = {}
    for name, stage, micro in SPLITS[dist.world_size()] if shared == 1 else SHARED:
        found[f"{name} stage {stage} micro {micro}"] = trajectory(assets, out.parent, name, stage, micro, device)
    if dist.is_main():
        out.write_text(json.dumps(found))
    dist.shutdown()
    leave(0)


main()
