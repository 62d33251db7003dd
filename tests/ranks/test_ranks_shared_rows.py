"""Whole runs with `--sequence_parallel_size`: the numbers of one rank, resumed on the same ranks and on others."""

import json

import pytest
from launch import numbers_of, run_resumes

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
INSIDE = "step_000001_update_0002"  # a place inside a PPO step
PPO = (
    "--data_split 0,0,1 --max_prompt_seq_len 32 --max_answer_seq_len 6 --generation_batches 2 --ppo_epochs 2 "
    "--n_samples_per_prompt 2 --num_warmup_steps 0 --actor_learning_rate 0.003 --critic_learning_rate 0.003 "
    "--enable_test_mode --test_stop_step 2 --eval_interval 1 --eval_max_prompts 4 --save_minutes 0 --dtype fp32 "
    "--per_device_training_batch_size 4 --gradient_accumulation_steps 2 --old_logprobs recompute --kl_target 0.05 "
    "--entropy_coef 0.01 --unsup_coef 0.1 --actor_zero_stage 3 --critic_zero_stage 2 --tiled_mlp --offload_activations"
)
SFT = (
    "--data_split 1,0,0 --max_seq_len 48 --learning_rate 0.01 --zero_stage 3 --dtype fp32 --packing --save_minutes 0 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 2 --eval_fraction 0.2 --gradient_checkpointing"
)
SHARED, ALONE = (
    "--sequence_parallel_size 2 --per_device_generation_batch_size 2",
    "--per_device_generation_batch_size 4",
)


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """Folder of the outputs; those of two ranks that share rows are made first."""
    folder = tmp_path_factory.mktemp("shared_rows")
    (assets / "plain.jsonl").write_text('{"text": "a few words"}\n' * 9)
    ppo = f"--actor_model_name_or_path {assets}/lm --critic_model_name_or_path {assets}/reward {PPO} "
    ppo += f"--data_path {assets}/prompts.jsonl --eval_data_path {assets}/prompts.jsonl "
    ppo += f"--unsupervised_dataset_name {assets}/plain.jsonl "
    sft = f"--model_name_or_path {assets}/lm --data_path {assets}/sft.jsonl {SFT} "

    def case(step: str, name: str, words: str, *stops: str, to_the_end: bool = True) -> tuple:
        return step, [*words.split(), "--output_dir", f"{folder}/{name}"], stops, to_the_end

    launches = {
        2: {
            "ppo": case("ppo", "shared", ppo + SHARED),
            "cut": case("ppo", "cut", ppo + SHARED, INSIDE),
            "moved": case("ppo", "moved", ppo + SHARED, INSIDE, to_the_end=False),
            "sft": case("sft", "sft_shared", sft + "--sequence_parallel_size 2"),
        },
        1: {
            "ppo": case("ppo", "alone", ppo + ALONE),
            "moved": case("ppo", "moved", ppo + ALONE),
            "sft": case("sft", "sft_alone", sft),
        },
    }
    for ranks, cases in launches.items():
        run_resumes(cases, folder, ranks)
    return folder


@pytest.mark.parametrize("name", ["shared", "cut", "moved"])
def test_ppo_has_the_numbers_of_one_rank(runs, name):
    expected, found = numbers_of(runs / "alone"), numbers_of(runs / name)
    assert len(expected) == 3
    assert expected[1]["value/loss"] != expected[2]["value/loss"]
    for line, other in zip(found, expected, strict=True):
        assert set(line) == set(other)
        for key, value in other.items():
            assert line[key] == pytest.approx(value, rel=2e-4, abs=1e-5), key


def test_packed_sft_has_the_numbers_of_one_rank(runs):
    expected, found = numbers_of(runs / "sft_alone"), numbers_of(runs / "sft_shared")
    assert len(expected) > 4
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_the_plan_counts_groups_of_ranks(runs):
    said = json.loads((runs / "found_2.json").read_text())["ppo"][0]["said"]
    assert "4 rows x 2 micro-batches x 1 group = 8" in said
