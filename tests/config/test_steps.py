"""Configurations of the steps: flags of several groups together, and where models come from."""

import pytest
from command_lines import NEEDED

from dschat_ppo.config.cli import notes, parse


@pytest.mark.parametrize(
    ("named", "critic", "reward"),
    [
        ("--critic_model_name_or_path c", "critic", "critic"),
        ("--reward_model_name_or_path r", "reward", "reward"),
        ("--critic_model_name_or_path c --reward_model_name_or_path r", "critic", "reward"),
        ("--use_reward_model False --reward_function exact_match", "actor", None),
    ],
)
def test_folders_of_critic_and_reward_and_the_flags_that_name_them(named, critic, reward):
    config = parse(
        "ppo", ["--actor_model_name_or_path", "a", "--data_path", "d", "--output_dir", "out", *named.split()]
    )
    assert config.critic_flag == f"--{critic}_model_name_or_path"
    assert config.critic_folder == critic[0]
    if reward is not None:
        assert config.reward_flag == f"--{reward}_model_name_or_path"
        assert config.reward_folder == reward[0]


FUNCTION_ALONE = "--use_reward_model False --reward_function exact_match"


@pytest.mark.parametrize(
    ("words", "clip"),
    [
        ("", 5.0),
        ("--reward_model_sources a --reward_function length:0 exact_match?strip=1:0.0", 5.0),  # these are only logged
        ("--remote_reward_url http://a/b --remote_reward_weight 0", 5.0),
        ("--remote_reward_url http://a/b", 0.0),
        ("--reward_function length:0 exact_match?strip=1:0.5", 0.0),
        ("--reward_function a,b=exact_match", 0.0),
        (FUNCTION_ALONE, 0.0),
        (f"{FUNCTION_ALONE} --reward_clip 5", 5.0),
        ("--reward_clip 0", 0.0),
        ("--advantage_estimator grpo --n_samples_per_prompt 2", 0.0),
        ("--advantage_estimator grpo --n_samples_per_prompt 2 --reward_clip 3", 3.0),
        ("--advantage_estimator remax", 0.0),
    ],
)
def test_scores_are_clipped_by_default_for_ppo_with_the_learned_reward_alone(words, clip):
    assert parse("ppo", [*NEEDED["ppo"], *words.split()]).score_clip == clip


@pytest.mark.parametrize("step", NEEDED)
def test_what_follows_training_has_no_effect_without_it(step):
    words = [*NEEDED[step], *"--report_to tensorboard --profile 2 --stop_on_health error --validate_only".split()]
    lines = notes(step, parse(step, [*words, "--eval_data_path", "e"]))
    assert [line.split()[0] for line in lines] == ["--report_to", "--profile", "--stop_on_health"]
    assert {line.partition(": ")[2] for line in lines} == {"--validate_only trains nothing"}
    words = [*NEEDED[step], "--validate_only", "--eval_data_path", "e", "--eval_interval", "5"]
    assert notes(step, parse(step, words)) == ["--eval_interval has no effect: --validate_only trains nothing"]


def test_align_overflow_has_an_effect_only_with_a_critic_in_fp16():
    for how, effective in (
        ("--dtype fp16", True), ("--dtype bf16", False), ("--dtype fp16 --advantage_estimator remax", False),
    ):  # fmt: skip
        config = parse("ppo", [*NEEDED["ppo"], "--align_overflow", *how.split()])
        assert config.aligns_overflow is effective
        assert len(notes("ppo", config)) == (0 if effective else 1)
    assert not parse("ppo", [*NEEDED["ppo"], "--dtype", "fp16"]).aligns_overflow
