"""Step 2 on real ranks: the trajectory does not depend on the split, and the saved policy reproduces its evaluation."""

import json
import math

import numpy as np
import pytest
import torch
from launch import forked, succeed
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_ppo.config.cli import parse
from dschat_ppo.data.prepare import prepare

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def trajectories(assets, tmp_path_factory):
    """Ranks -> label -> output of the worker."""
    folder = tmp_path_factory.mktemp("preference")
    for ranks in (1, 2):
        succeed(forked(ranks, "tests/workers/preference.py", assets, folder / f"{ranks}.json"))
    return {ranks: json.loads((folder / f"{ranks}.json").read_text()) for ranks in (1, 2)}


def test_trajectory_does_not_depend_on_ranks_micro_batches_or_zero_stage(trajectories):
    reference = np.array(trajectories[1]["dpo stage 0 micro 2"]["steps"])
    assert reference.shape == (4, 4)
    assert reference[0, 0] == pytest.approx(math.log(2), abs=1e-5)
    assert np.abs(np.diff(reference[:, 0])).max() > 1e-2, "nothing was trained"
    for label in ("dpo stage 0 micro 1", "dpo stage 3 micro 2"):
        np.testing.assert_allclose(trajectories[2][label]["steps"], reference, rtol=1e-4, atol=2e-6, err_msg=label)


@pytest.mark.parametrize("task", ["dpo_nll", "ipo", "reward"])
def test_other_objectives_do_not_depend_on_ranks(trajectories, task):
    one, two = (trajectories[ranks][f"{task} stage 3 micro 1"] for ranks in (1, 2))
    assert np.abs(np.diff(np.array(one["steps"])[:, 0])).max() > 1e-2, "nothing was trained"
    np.testing.assert_allclose(two["steps"], one["steps"], rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(two["described"], one["described"], rtol=1e-4)
    assert len(one["described"]) == (2 if task == "reward" else 0)


def test_an_untrained_policy_is_its_own_reference(trajectories):
    for found in trajectories.values():
        for label, one in found.items():
            assert one["lead"] < 1e-5, label


@pytest.fixture(scope="module")
def trained(assets, tmp_path_factory):
    """Output folder of `--objective dpo_nll` on two ZeRO-3 ranks, and the words that made it."""
    folder = tmp_path_factory.mktemp("dpo") / "out"
    words = f"--objective dpo_nll --nll_coef 0.5 --model_name_or_path {assets}/lm --data_path {assets}/pairs.jsonl"
    words += f" --data_split 0,1,0 --dtype fp32 --zero_stage 3 --output_dir {folder} --per_device_train_batch_size 3"
    words += " --eval_fraction 0.2 --per_device_eval_batch_size 3 --learning_rate 0.003 --num_train_epochs 5"
    words += " --offload_reference_model --print_loss"
    result = succeed(forked(2, "training/step2_dpo/main.py", *words.split()))
    (folder / "log").write_text(result.stdout + result.stderr)
    return folder, words.split()


def test_the_evaluation_matches_the_saved_policy_in_plain_transformers(assets, trained):
    folder, words = trained
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = prepare("preference", tokenizer, parse("reward", words).data, 512, eval_fraction=0.2).eval
    models = [AutoModelForCausalLM.from_pretrained(name) for name in (folder, assets / "lm")]
    losses, leads, nlls = [], [], []
    for row in rows:
        sums = np.array([[_logprob(model, row["prompt_ids"], a) for a in row["answers"]] for model in models])
        leads.append((sums[0, 0] - sums[1, 0]) - (sums[0, 1] - sums[1, 1]))
        nlls.append(-sums[0, 0] / len(row["answers"][0]))
        losses.append(math.log(1 + math.exp(-0.1 * leads[-1])) + 0.5 * nlls[-1])
    result = json.loads((folder / "result.json").read_text())
    assert len(rows) == 8
    assert np.mean(losses) == pytest.approx(result["eval_loss_after"], abs=1e-4)
    assert 0.1 * np.mean(leads) == pytest.approx(result["eval_margin_after"], abs=1e-4)
    assert np.mean(nlls) == pytest.approx(result["eval_nll_after"], abs=1e-4)
    assert result["eval_margin_before"] == pytest.approx(0.0, abs=1e-5)
    assert result["eval_nll_after"] < result["eval_nll_before"] - 0.1


@torch.no_grad()
def _logprob(model, prompt: list[int], answer: list[int]) -> float:
    table = torch.log_softmax(model(torch.tensor([prompt + answer])).logits[0].double(), dim=-1)
    return sum(float(table[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))


def test_the_margin_of_training_pairs_grows(trained):
    folder, _ = trained
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert abs(lines[1]["margin"]) < 1e-5
    assert lines[-1]["margin"] > 0.01
    wanted = {"loss", "accuracy", "margin", "nll"}
    wanted |= {f"{side}_{what}" for side in ("chosen", "rejected") for what in ("logprob", "reward")}
    assert all(wanted <= set(line) for line in lines[1:])


def test_flags_without_effect_print_a_note(trained):
    log = (trained[0] / "log").read_text()
    for name in ("offload_reference_model", "print_loss"):
        assert log.count(f"note: --{name} has no effect") == 1
