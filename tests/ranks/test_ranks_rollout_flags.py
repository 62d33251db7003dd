"""Step 3 on two ranks, with the flags that change generation."""

import pytest
from launch import metrics_of, run_steps

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

COMMON = "--data_split 0,0,1 --dtype fp32 --actor_zero_stage 3 --critic_zero_stage 3 --num_warmup_steps 0 "
COMMON += "--per_device_generation_batch_size 4 --n_samples_per_prompt 3 --per_device_training_batch_size 12 "
COMMON += "--max_prompt_seq_len 64 --max_answer_seq_len 12 --enable_test_mode --test_stop_step 2 "


CASES = {
    "plain": "",
    "padded": "--rollout_engine padded --unpin_actor_parameters --rollout_rows 3",
    "steered": "--sleep_in_rollout --top_p 0.9 --min_p 0.01 --repetition_penalty 1.3 --min_answer_seq_len 2 "
    "--stop_strings a e i o --stop_token_ids 40 41",
}


@pytest.fixture(scope="module")
def runs(assets, tmp_path_factory):
    """Case -> (metrics of each PPO step, what was said)."""
    folder = tmp_path_factory.mktemp("rollouts")
    models = ["--actor_model_name_or_path", assets / "lm", "--critic_model_name_or_path", assets / "reward"]
    models += ["--data_path", assets / "prompts.jsonl", *COMMON.split()]
    cases = {name: ("ppo", [*models, "--output_dir", folder / name, *flags.split()]) for name, flags in CASES.items()}
    found = run_steps(cases, folder)
    assert [case["error"] for case in found.values()] == [None] * len(CASES)
    return {name: (metrics_of(folder / name), found[name]["said"]) for name in CASES}


def test_the_generation_engine_is_logged_and_correct(runs):
    metrics, said = runs["plain"]
    assert "continuous batching agrees with LlamaForCausalLM" in said
    assert len(metrics) == 2
    for line in metrics:
        assert line["rollout/logprob_diff_max"] < 1e-4
        assert line["policy/first_log_ratio_abs_max"] < 1e-4


def test_answers_do_not_depend_on_the_generation_engine(runs):
    names = ("reward/score_mean", "rollout/length_mean", "policy/entropy", "optim/grad_norm/actor", "value/loss")
    for line, expected in zip(runs["padded"][0], runs["plain"][0], strict=True):
        for key in names:
            assert line[key] == pytest.approx(expected[key], rel=2e-3), key


def test_truncation_stop_strings_and_a_minimum_length_take_effect(runs):
    metrics, said = runs["steered"]
    assert "before truncation and penalty" in said
    for line in metrics:
        assert 2 <= line["rollout/length_mean"] < 12
        assert line["rollout/ended_share"] > 0.2
        assert line["rollout/logprob_diff_max"] < 1e-4
