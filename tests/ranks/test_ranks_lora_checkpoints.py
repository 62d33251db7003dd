"""Checkpoints of LoRA runs hold only what trains, and a run resumes from them exactly."""

import pytest
from launch import ROOT, numbers_of, run_resumes

from dschat_ppo.checkpoint.engine_state import common_state

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

FIT = (
    "--data_split 1,0,0 --max_seq_len 48 --eval_interval 2 --eval_fraction 0.2 --save_minutes 0 --lora_dim 4 "
    "--lora_learning_rate 0.02 --learning_rate 0.02 --num_warmup_steps 1 --save_total_limit 9 "
    "--per_device_train_batch_size 4 "
    "--keep_final_checkpoint"
)
PPO = (
    "--data_split 0,0,1 --max_prompt_seq_len 32 --max_answer_seq_len 4 --per_device_generation_batch_size 4 "
    "--per_device_training_batch_size 4 --num_warmup_steps 0 --actor_lora_dim 4 --critic_lora_dim 2 --share_base "
    "--only_optimize_lora --actor_lora_learning_rate 0.02 --critic_lora_learning_rate 0.02 --use_reward_model False "
    "--enable_test_mode --test_stop_step 3 --save_minutes 0 --enable_ema --ema_decay 0.5 --dtype bf16 "
    "--actor_zero_stage 3 --critic_zero_stage 3 "
    "--keep_final_checkpoint"
)


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """(folder, what each start gave): runs that stop and resume on the same ranks."""
    folder = tmp_path_factory.mktemp("lora")
    fit = f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl {FIT} --dtype bf16"
    frozen = "--only_optimize_lora --lora_dropout 0.1 --metric_for_best perplexity --save_hf_steps 2"
    reward = f"--use_reward_model False --reward_function {ROOT}/tests/reward_functions.py:lengths"
    models = f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/lm"
    flags = {
        "adapter": ("sft", f"{fit} {frozen} --zero_stage 3"),
        "dora": ("sft", f"{fit} {frozen} --zero_stage 2 --use_dora --lora_merge"),
        "beside": ("sft", f"{fit} --zero_stage 1"),  # weights without LoRA train too
        "shared": ("ppo", f"{models} --data_path {assets}/prompts.jsonl {PPO} {reward}"),
    }
    cases = {}
    for name, (step, given) in flags.items():
        for how, stops in (("whole", []), ("cut", ["step_000002"])):
            words = [*given.split(), "--output_dir", f"{folder}/{name}/{how}"]
            cases[f"{name} {how}"] = (step, words, stops, True)
    return folder, run_resumes(cases, folder)


@pytest.mark.parametrize("name", ["adapter", "dora", "beside", "shared"])
def test_a_resumed_run_has_the_metrics_and_models_of_an_uninterrupted_one(runs, name):
    folder, found = runs
    stopped, resumed = found[f"{name} cut"]
    assert "saved as" in stopped["ended"] and "resuming from" in resumed["said"]
    whole, cut = folder / name / "whole", folder / name / "cut"
    assert numbers_of(cut) == numbers_of(whole)
    models = sorted(path.relative_to(whole) for path in whole.rglob("*.safetensors"))
    assert models == sorted(path.relative_to(cut) for path in cut.rglob("*.safetensors"))
    folders = {"adapter": {"best", "hf"}, "dora": {"best", "hf"}, "shared": {"actor", "actor_ema", "critic"}}
    assert {path.parts[0] for path in models if len(path.parts) > 1} == folders.get(name, set())
    if "hf" in folders.get(name, ()):
        saved = ["models of step 2:" in start["said"] for start in (stopped, resumed)]
        assert saved == [True, False] and "models of step 4:" in resumed["said"]
    for path in models:
        assert (whole / path).read_bytes() == (cut / path).read_bytes(), path


@pytest.mark.parametrize("name", ["adapter", "dora", "shared"])
def test_checkpoints_do_not_hold_the_frozen_base(runs, assets, name):
    folder, _ = runs
    for checkpoint in (folder / name / "whole/checkpoints").glob("step_*"):
        size = sum(path.stat().st_size for path in checkpoint.glob("*/*.pt"))
        states = [common_state(role) for role in checkpoint.iterdir() if role.is_dir()]
        assert len(states) == (2 if name == "shared" else 1)
        for common in states:
            assert common["shapes"] and all(".lora_" in key or key.endswith("score.weight") for key in common["shapes"])
            assert len(common["frozen"]) > 15 and not any(".lora_" in key for key in common["frozen"])
        assert size < (assets / "lm/model.safetensors").stat().st_size
