"""Flags that are refused: all at once, with what to do; and a hint only at the flag that was meant."""

import pytest
from test_cli import read

from dschat_ppo.errors import UserError


def test_all_refused_flags_are_named_at_once_with_what_goes_with_them():
    with pytest.raises(UserError) as problem:
        read("sft", "--lora_dim", "128", "--lora_module_name", "layers.", "--only_optimize_lora", "--max_steps", "9")
    text = str(problem.value)
    flags = "--lora_dim 128, --only_optimize_lora True, --lora_module_name layers.: LoRA is not available yet"
    assert flags in text and "--max_steps 9" in text
    assert "without LoRA all weights are trained" in text and "give --learning_rate 1e-5 to 2e-5" in text
    with pytest.raises(UserError) as problem:
        read("ppo", "--actor_lora_dim", "8", "--critic_lora_dim", "4", "--inference_tp_size", "2")
    assert "--actor_lora_dim 8, --critic_lora_dim 4: LoRA is not available yet" in str(problem.value)
    assert "give --actor_learning_rate and --critic_learning_rate 1e-5 to 2e-5" in str(problem.value)
    assert "; --inference_tp_size 2: tensor-parallel generation is not" in str(problem.value)
    assert "\n" not in str(problem.value)
    with pytest.raises(UserError) as problem:
        read("ppo", "--inference_tp_size", "2")
    assert "1e-5" not in str(problem.value)


@pytest.mark.parametrize(("step", "given", "meant"), [
    ("sft", "--learning_rat", "learning_rate"), ("sft", "--learning-rat", "learning_rate"),
    ("sft", "--max_seq_length=9", "max_seq_len"), ("ppo", "--actor_learnin_rate", "actor_learning_rate"),
    ("sft", "--max_steps", None), ("sft", "--eval_steps", None), ("ppo", "--reward_zero_stage", None),
    ("ppo", "--max_length", None), ("ppo", "--learning_rate", None), ("ppo", "--top_n", None),
    ("sft", "--num_train_steps", None), ("ppo", "--min_prompt_seq_len", None),
])  # fmt: skip
def test_a_slip_of_the_pen_is_put_right_and_another_flag_is_not(step, given, meant):
    with pytest.raises(UserError) as problem:
        read(step, given, "1")
    hint = f"did you mean --{meant}?"
    assert (hint if meant else given.split("=")[0]) in str(problem.value)
    assert ("did you mean" in str(problem.value)) is (meant is not None)
