"""Step 3 with LoRA on one and two ranks: one trajectory, one base, exact switches to generation."""

import json

import numpy as np
import pytest
import torch
from adapter_folders import save_adapter
from launch import forked, metrics_of, run_steps, succeed
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(assets, stored_rollout, tmp_path_factory):
    """What one and two ranks report."""
    save_adapter(assets / "lm", assets / "reward_adapter", scalar=True)
    save_adapter(assets / "lm", assets / "reward_dora", scalar=True, use_dora=True)
    folder = tmp_path_factory.mktemp("lora_ppo")
    results = []
    for ranks in (1, 2):
        succeed(forked(ranks, "tests/workers/lora_ppo.py", assets, folder / f"{ranks}.json", timeout=300))
        results.append(json.loads((folder / f"{ranks}.json").read_text()))
    return results


def test_trajectories_do_not_depend_on_ranks_stages_or_the_number_of_bases(found):
    reference = [np.array(row) for row in found[0]["trajectories"]["stage 0 own bases"]]
    assert len(reference) == 4 and abs(reference[1] - reference[-1]).max() > 1e-3, "nothing was trained"
    for result in found:
        for label, trajectory in result["trajectories"].items():
            for row, expected in zip(trajectory, reference, strict=True):
                np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5, err_msg=label)


def test_trajectories_of_dora_do_not_depend_on_ranks_or_stages(found):
    alone, (first, second) = found[0]["dora"]["stage 3"], found[1]["dora"].values()
    for trajectory in (first, second):
        for row, expected in zip(trajectory, alone, strict=True):
            np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)


def test_switches_change_no_bit(found):
    assert [len(result["switches"]) for result in found] == [1, 5]
    for result in found:
        for label, seen in result["switches"].items():
            for name in ("weights_equal", "layers_equal", "plain", "whole", "same_forward"):
                assert seen[name], f"{label}: {name}"


def test_the_merged_model_gives_the_log_probs_of_training(found):
    for result in found:
        for label, seen in result["switches"].items():
            assert seen["adapter_effect"] > 0.05, f"{label}: the adapter does nothing, so nothing was tested"
            assert seen["merged_difference"] < (1e-4 if "fp32" in label else 0.3), label


RUN = (
    "--data_split 0,0,1 --dtype fp32 --actor_zero_stage 3 --critic_zero_stage 3 --max_prompt_seq_len 32 "
    "--max_answer_seq_len 6 --per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
    "--num_warmup_steps 0 --enable_test_mode --test_stop_step 2 --actor_lora_dim 4 --critic_lora_dim 4 --lora_alpha 8 "
    "--only_optimize_lora --share_base --enable_ema --ema_decay 0.5 --save_steps 1 --keep_final_checkpoint"
)


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """A run of two PPO steps, one that resumes from its first checkpoint, and one that saves merged models."""
    save_adapter(assets / "lm", assets / "actor_adapter", scalar=False, seed=7)
    save_adapter(assets / "lm", assets / "reward_adapter", scalar=True)
    folder = tmp_path_factory.mktemp("lora_runs")
    flags = f"--actor_model_name_or_path {assets}/actor_adapter --critic_model_name_or_path {assets}/reward_adapter "
    flags += f"--data_path {assets}/prompts.jsonl {RUN} --output_dir {folder}/"
    cases = {
        "whole": f"{flags}whole",
        "resumed": f"{flags}resumed --resume {folder}/whole/checkpoints/step_000001",
        "merged": f"{flags}merged --lora_merge",
        "rank": f"{flags}rank --critic_lora_dim 8",
    }
    found = run_steps({name: ("ppo", words.split()) for name, words in cases.items()}, folder)
    return folder, found


def test_saved_adapters_load_in_peft_and_merged_models_give_the_same_logits(runs, assets):
    folder, found = runs
    assert found["whole"]["error"] is found["merged"]["error"] is None
    assert "a frozen copy of its first adapter; no reference model is held" in found["whole"]["said"]
    ids = torch.tensor([[5, 6, 7, 8]])
    for role in ("actor", "actor_ema"):
        adapted = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(assets / "lm"), folder / "whole" / role
        )
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged" / role)
        torch.testing.assert_close(adapted.eval()(ids).logits, merged.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    weights = {
        role: load_file(folder / "whole" / role / "adapter_model.safetensors") for role in ("actor", "actor_ema")
    }
    before = load_file(assets / "actor_adapter/adapter_model.safetensors")
    assert weights["actor"].keys() == weights["actor_ema"].keys() == before.keys(), "nothing but the adapter"
    for name, first in before.items():
        assert not torch.equal(weights["actor"][name], first), f"{name} was not trained"
        assert not torch.equal(weights["actor"][name], weights["actor_ema"][name])
    plain = AutoModelForSequenceClassification.from_pretrained(assets / "lm", num_labels=1)
    critic = PeftModel.from_pretrained(plain, folder / "whole/critic")
    assert critic.eval()(ids).logits.isfinite().all()


def test_a_run_over_one_base_resumes_bit_for_bit(runs):
    folder, found = runs
    assert found["resumed"]["error"] is None
    for role in ("actor", "actor_ema", "critic"):
        whole, resumed = (load_file(folder / run / role / "adapter_model.safetensors") for run in ("whole", "resumed"))
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole), role
    last = [metrics_of(folder / run)[-1] for run in ("whole", "resumed")]
    assert last[0]["policy/loss"] == last[1]["policy/loss"] and last[0]["optim/lr/actor"] == last[1]["optim/lr/actor"]


def test_another_rank_than_that_of_the_adapter_is_refused_before_a_model_is_loaded(runs):
    _, found = runs
    assert found["rank"]["error"].startswith("--critic_lora_dim 8: ") and "rank 4" in found["rank"]["error"]
    assert "frozen" not in found["rank"]["said"], "no model was loaded"
