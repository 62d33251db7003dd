"""Finished runs that are extended: `--max_steps` and fractions of an epoch."""

import json

import pytest
import torch
from launch import metrics_of, numbers_of, run_steps
from safetensors.torch import load_file

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

FIT = (
    "--data_split 1,0,0 --max_seq_len 48 --learning_rate 0.01 --dropout 0.1 --zero_stage 2 --dtype fp32 --save_minutes "
    "0 --per_device_train_batch_size 8 --eval_fraction 0.2 --keep_final_checkpoint"  # 32 rows: four steps an epoch
)
CONSTANT = "--lr_scheduler_type constant_with_warmup --num_warmup_steps 2"
CASES = {  # name -> (flags, output folder); in this order
    "long": (f"{CONSTANT} --max_steps 6", "long"),
    "short": (f"{CONSTANT} --num_train_epochs 0.75", "short"),
    "shorter": (f"{CONSTANT} --max_steps 2", "short"),
    "extended": (f"{CONSTANT} --max_steps 6", "short"),
    "cosine": ("--max_steps 3 --min_lr_ratio 0.5", "cosine"),
    "refused": ("--max_steps 5 --min_lr_ratio 0.5", "cosine"),
    "forced": ("--max_steps 5 --min_lr_ratio 0.5 --resume_force True", "cosine"),
}


def test_a_finished_run_is_extended_if_its_rate_does_not_depend_on_the_length_or_it_is_forced(assets, tmp_path):
    known = f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl {FIT}"
    found = run_steps({
        name: ("sft", [*known.split(), *words.split(), "--output_dir", tmp_path / output])
        for name, (words, output) in CASES.items()
    }, tmp_path, ranks=1)  # fmt: skip
    assert {name for name, end in found.items() if end["error"]} == {"shorter", "refused"}
    assert "step_000003 is beyond the end of this run, which has 2 steps" in found["shorter"]["error"]
    assert "  --max_steps: 3 -> 5" in found["refused"]["error"]
    assert "resuming from" in found["extended"]["said"] and "3 steps are done" in found["extended"]["said"]
    long, short = (numbers_of(tmp_path / name) for name in ("long", "short"))
    assert [line["step"] for line in short if "eval_loss" in line] == [0, 3, 4, 6], "ends of the runs and the epoch"
    for one, other in zip(long, short, strict=True):
        assert all(one[name] == other[name] for name in one.keys() | other.keys() if not name.startswith("eval_"))
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("long", "short")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0].keys() | weights[1].keys())
    assert json.loads((tmp_path / "short/result.json").read_text())["optimizer_steps"] == 6
    rates = [line["lr"] for line in metrics_of(tmp_path / "cosine")[1:]]
    # the cosine from 1 to 0.5 over 3 steps, then over 5: steps 0, 1, 2 of 3 and 3, 4 of 5
    assert rates == pytest.approx([0.01 * share for share in (1, 0.875, 0.625, 0.67274575, 0.54774575)], rel=1e-6)
