"""Step 2 with a policy on real ranks: the saved model reproduces its evaluation in plain
transformers; finished runs that are extended: `--max_steps` and fractions of an epoch."""

import json
import math

import numpy as np
import pytest
import torch
from launch import forked, metrics_of, numbers_of, run_steps, succeed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.prepare import prepare

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@torch.no_grad()
def logprob(model, prompt: list[int], answer: list[int]) -> float:
    table = torch.log_softmax(model(torch.tensor([prompt + answer])).logits[0].double(), dim=-1)
    return sum(float(table[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))


def test_the_evaluation_matches_the_saved_policy_and_the_margin_of_training_pairs_grows(
    assets, tmp_path
):
    words = (
        f"--objective dpo_nll --nll_coef 0.5 --model_name_or_path {assets}/lm --data_path"
        f" {assets}/pairs.jsonl"
    )
    words += (
        f" --data_split 0,1,0 --dtype fp32 --zero_stage 3 --output_dir {tmp_path}"
        " --per_device_train_batch_size 3"
    )
    words += (
        " --eval_fraction 0.2 --per_device_eval_batch_size 3 --learning_rate 0.003"
        " --num_train_epochs 3"
    )
    words += " --offload_reference_model --print_loss"
    printed = succeed(forked(2, "training/step2_dpo/main.py", *words.split()))
    for name in ("offload_reference_model", "print_loss"):
        assert (printed.stdout + printed.stderr).count(f"note: --{name} has no effect") == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rows = prepare(
        StepData("preference", parse("reward", words.split()).data, 512, eval_fraction=0.2),
        tokenizer,
    ).eval
    models = [AutoModelForCausalLM.from_pretrained(name) for name in (tmp_path, assets / "lm")]
    losses, leads, nlls = [], [], []
    for row in rows:
        sums = np.array(
            [[logprob(model, row["prompt_ids"], a) for a in row["answers"]] for model in models]
        )
        leads.append((sums[0, 0] - sums[1, 0]) - (sums[0, 1] - sums[1, 1]))
        nlls.append(-sums[0, 0] / len(row["answers"][0]))
        losses.append(math.log(1 + math.exp(-0.1 * leads[-1])) + 0.5 * nlls[-1])
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(rows) == 8
    assert np.mean(losses) == pytest.approx(result["eval_loss_after"], abs=1e-4)
    assert 0.1 * np.mean(leads) == pytest.approx(result["eval_margin_after"], abs=1e-4)
    assert np.mean(nlls) == pytest.approx(result["eval_nll_after"], abs=1e-4)
    assert result["eval_margin_before"] == pytest.approx(0.0, abs=1e-5)
    assert result["eval_nll_after"] < result["eval_nll_before"] - 0.1
    _, first, *_, last = metrics_of(tmp_path)
    assert abs(first["margin"]) < 1e-5 and last["margin"] > 0.01


FIT = (
    "--data_split 1,0,0 --max_seq_len 48 --learning_rate 0.01 --dropout 0.1 --zero_stage 2 --dtype"
    " fp32 --save_minutes "
    # 32 rows: four steps an epoch
    "0 --per_device_train_batch_size 8 --eval_fraction 0.2 --keep_final_checkpoint"
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


def test_a_finished_run_is_extended_if_its_rate_does_not_depend_on_the_length_or_it_is_forced(
    assets, tmp_path
):
    known = f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl {FIT}"
    found = run_steps(
        {
            name: ("sft", [*known.split(), *words.split(), "--output_dir", tmp_path / output])
            for name, (words, output) in CASES.items()
        },
        tmp_path,
        ranks=1,
    )
    assert {name for name, end in found.items() if end["error"]} == {"shorter", "refused"}
    assert (
        "step_000003 is beyond the end of this run, which has 2 steps" in found["shorter"]["error"]
    )
    assert "  --max_steps: 3 -> 5" in found["refused"]["error"]
    assert (
        "resuming from" in found["extended"]["said"]
        and "3 steps are done" in found["extended"]["said"]
    )
    long, short = (numbers_of(tmp_path / name) for name in ("long", "short"))
    assert [line["step"] for line in short if "eval_loss" in line] == [
        0,
        3,
        4,
        6,
    ], "ends of the runs and the epoch"
    for one, other in zip(long, short, strict=True):
        assert all(
            one[name] == other[name]
            for name in one.keys() | other.keys()
            if not name.startswith("eval_")
        )
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("long", "short")]
    assert all(
        torch.equal(weights[0][key], weights[1][key])
        for key in weights[0].keys() | weights[1].keys()
    )
    assert json.loads((tmp_path / "short/result.json").read_text())["optimizer_steps"] == 6
    rates = [line["lr"] for line in metrics_of(tmp_path / "cosine")[1:]]
    # the cosine from 1 to 0.5 over 3 steps, then over 5: steps 0, 1, 2 of 3 and 3, 4 of 5
    assert rates == pytest.approx(
        [0.01 * share for share in (1, 0.875, 0.625, 0.67274575, 0.54774575)], rel=1e-6
    )
