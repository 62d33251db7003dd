"""Lengths of runs on two ranks: `--max_steps`, fractions of an epoch, and finished runs that are extended."""

import json

import pytest
import torch
from launch import metrics_of, numbers_of, run_steps
from safetensors.torch import load_file

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

FIT = (
    "--data_split 1,0,0 --max_seq_len 48 --learning_rate 0.01 --dropout 0.1 --zero_stage 2 --dtype bf16 --save_minutes "
    "0 --per_device_train_batch_size 4 --eval_fraction 0.2 --keep_final_checkpoint"  # 32 rows: four steps an epoch
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


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """(folder of the outputs, name -> how the run ended and what it said)."""
    folder = tmp_path_factory.mktemp("lengths")
    known = f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl {FIT}"
    cases = {
        name: ("sft", [*known.split(), *words.split(), "--output_dir", folder / output])
        for name, (words, output) in CASES.items()
    }
    return folder, run_steps(cases, folder)


def compared(folder) -> list[dict]:
    """Numbers of each step without evaluations."""
    return [{name: line[name] for name in line if not name.startswith("eval_")} for line in numbers_of(folder)]


def test_a_finished_run_is_extended_if_its_rate_does_not_depend_on_the_length(runs):
    folder, found = runs
    assert [found[name]["error"] for name in ("long", "short", "extended")] == [None] * 3
    assert "resuming from" in found["extended"]["said"] and "3 steps are done" in found["extended"]["said"]
    assert compared(folder / "short") == compared(folder / "long") and len(metrics_of(folder / "long")) == 7
    one, other = (load_file(folder / name / "model.safetensors") for name in ("long", "short"))
    assert all(torch.equal(one[key], other[key]) for key in one.keys() | other.keys())
    assert json.loads((folder / "short/result.json").read_text())["optimizer_steps"] == 6
    evaluated = [line["step"] for line in metrics_of(folder / "short") if "eval_loss" in line]
    assert evaluated == [0, 3, 4, 6], "the ends of both runs and of the epoch"


def test_a_run_that_would_end_before_its_checkpoint_is_refused(runs):
    error = runs[1]["shorter"]["error"]
    assert error is not None and "step_000003 is beyond the end of this run, which has 2 steps" in error


def test_an_extension_that_changes_the_rates_needs_resume_force(runs):
    folder, found = runs
    assert found["refused"]["error"] is not None and "  --max_steps: 3 -> 5" in found["refused"]["error"]
    assert found["forced"]["error"] is None
    rates = [line["lr"] for line in metrics_of(folder / "cosine")[1:]]
    # the cosine from 1 to 0.5 over 3 steps, then over 5: steps 0, 1, 2 of 3 and 3, 4 of 5
    assert rates == pytest.approx([0.01 * share for share in (1, 0.875, 0.625, 0.67274575, 0.54774575)], rel=1e-6)
