"""Step 2 with a policy on real ranks: the saved model reproduces its evaluation in plain transformers."""

import json
import math

import numpy as np
import pytest
import torch
from launch import forked, metrics_of, succeed
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_ppo.config.cli import parse
from dschat_ppo.config.data_flags import StepData
from dschat_ppo.data.prepare import prepare

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@torch.no_grad()
def logprob(model, prompt: list[int], answer: list[int]) -> float:
    table = torch.log_softmax(model(torch.tensor([prompt + answer])).logits[0].double(), dim=-1)
    return sum(float(table[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))


def test_the_evaluation_matches_the_saved_policy_and_the_margin_of_training_pairs_grows(assets, tmp_path):
    words = f"--objective dpo_nll --nll_coef 0.5 --model_name_or_path {assets}/lm --data_path {assets}/pairs.jsonl"
    words += f" --data_split 0,1,0 --dtype fp32 --zero_stage 3 --output_dir {tmp_path} --per_device_train_batch_size 3"
    words += " --eval_fraction 0.2 --per_device_eval_batch_size 3 --learning_rate 0.003 --num_train_epochs 3"
    words += " --offload_reference_model --print_loss"
    printed = succeed(forked(2, "training/step2_dpo/main.py", *words.split()))
    for name in ("offload_reference_model", "print_loss"):
        assert (printed.stdout + printed.stderr).count(f"note: --{name} has no effect") == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rows = prepare(StepData("preference", parse("reward", words.split()).data, 512, eval_fraction=0.2), tokenizer).eval
    models = [AutoModelForCausalLM.from_pretrained(name) for name in (tmp_path, assets / "lm")]
    losses, leads, nlls = [], [], []
    for row in rows:
        sums = np.array([[logprob(model, row["prompt_ids"], a) for a in row["answers"]] for model in models])
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
