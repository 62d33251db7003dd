"""Names of other trainers: the message about an unknown flag names ours."""

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import flatten, parse
from dschat_ppo.config.other_names import OUR_NAMES, flags_for
from dschat_ppo.errors import UserError

FLAGS = {step: set(flatten(parse(step, NEEDED[step]))) for step in NEEDED}


@pytest.mark.parametrize(("step", "given", "ours"), [
    ("ppo", "--num_generations", "--n_samples_per_prompt"),
    ("ppo", "--num-generations=8", "--n_samples_per_prompt"),
    ("ppo", "--beta", "--kl_loss_coef and --kl_coef"),
    ("ppo", "--init_kl_coef", "--kl_coef"),
    ("ppo", "--rollout.n_samples_per_prompt", "--n_samples_per_prompt"),
    ("ppo", "--algo.advantage.estimator", "--advantage_estimator"),
    ("ppo", "--actor.adam.lr", "--actor_learning_rate"),
    ("ppo", "--critic.adam.lr", "--critic_learning_rate"),
    ("ppo", "--ds.lora.rank", "--actor_lora_dim and --critic_lora_dim"),
    ("ppo", "--ref.offload", "--offload_reference_model"),
    ("ppo", "--per_device_train_batch_size", "--per_device_training_batch_size"),
    ("sft", "--micro_train_batch_size", "--per_device_train_batch_size"),
    ("sft", "--train.batch_size", "--gradient_accumulation_steps"),
    ("sft", "--max_length", "--max_seq_len"),
    ("sft", "--adam.betas", "--adam_beta1 and --adam_beta2"),
    ("reward", "--desirable_weight", "--kto_desirable_weight"),
    ("sft", "--save_best", "--metric_for_best"),
    ("ppo", "--max_seq_len", "--max_prompt_seq_len and --max_answer_seq_len"),
])  # fmt: skip
def test_a_name_of_another_trainer_is_answered_with_ours(step, given, ours):
    with pytest.raises(UserError) as problem:
        read(step, given, "1")
    assert f"; this step has {ours} (all flags" in str(problem.value)


@pytest.mark.parametrize(("theirs", "ours"), OUR_NAMES.items())
def test_each_name_leads_to_flags_of_a_step(theirs, ours):
    assert any(flags_for(theirs, flags) for flags in FLAGS.values())
    everywhere = set().union(*FLAGS.values())
    assert all({name, f"actor_{name}"} & everywhere for name in ours.split()), ours


@pytest.mark.parametrize("step", NEEDED)
def test_a_setting_without_a_counterpart_suggests_no_other_flag(step):
    for name in ("vllm_mode", "vllm.num_engines", "train.async_enable"):
        assert flags_for(name, FLAGS[step]) == []
