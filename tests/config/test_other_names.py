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
    ("ppo", "--per_device_train_batch_size", "--per_device_training_batch_size"),
    ("sft", "--micro_train_batch_size", "--per_device_train_batch_size"),
    ("sft", "--train.batch_size", "--gradient_accumulation_steps"),
    ("sft", "--max_length", "--max_seq_len"),
    ("ppo", "--max_seq_len", "--max_prompt_seq_len and --max_answer_seq_len"),
])  # fmt: skip
def test_a_name_of_another_trainer_is_answered_with_ours(step, given, ours):
    with pytest.raises(UserError) as problem:
        read(step, given, "1")
    assert str(problem.value).endswith(f"(all flags: --help all)\n  {given.split('=')[0]}: use {ours}")


@pytest.mark.parametrize(("words", "first"), [
    ("--num_generations 8 --beta 0.04 --clip_epss 4", "unknown flag or value: "),
    ("--config {yaml}", "--config {yaml}: unknown flag or value: --num_generations --beta --clip_epss (all"),
])  # fmt: skip
def test_each_foreign_flag_has_a_line(tmp_path, words, first):
    yaml = tmp_path / "c.yaml"
    yaml.write_text("num_generations: 8\nbeta: 0.04\nclip_epss: 4\n")
    with pytest.raises(UserError) as problem:
        read("ppo", *words.format(yaml=yaml).split())
    above, *hints = str(problem.value).splitlines()
    assert above.startswith(first.format(yaml=yaml))
    assert [line.strip().removeprefix("--") for line in hints] == [
        "num_generations: use --n_samples_per_prompt", "beta: use --kl_loss_coef and --kl_coef",
        "clip_epss: did you mean --clip_eps?",
    ]  # fmt: skip


@pytest.mark.parametrize("words", [["--deepspeed", "FILE"], ["--deepspeed=FILE"], ["--config", "YAML"]])
def test_the_file_of_deepspeed_is_its_configuration(tmp_path, words):
    file, yaml = tmp_path / "ds.json", tmp_path / "c.yaml"
    yaml.write_text(f"deepspeed: {file}\n")
    found = read("sft", *[word.replace("FILE", str(file)).replace("YAML", str(yaml)) for word in words])
    assert (found["deepspeed_config"], found["deepspeed"]) == (str(file), False)
    assert read("sft", "--deepspeed")["deepspeed"] is True


@pytest.mark.parametrize(("step", "words", "way_out"), [
    ("ppo", "--top_k -1", "0 = off"), ("ppo", "--temperature 0", "above 0; --top_k 1"),
    ("ppo", "--temperature -1", "above 0; --top_k 1"),
    ("sft", "--max_steps -1", "0 = --num_train_epochs"), ("sft", "--save_steps -1", "0 = off"),
    ("ppo", "--eval_interval -1 --eval_data_path e", "0 = "),
])  # fmt: skip
def test_values_that_mean_off_elsewhere_are_answered_with_ours(step, words, way_out):
    with pytest.raises(UserError, match=f"{words.split()[0]} .*{way_out}"):
        read(step, *words.split())


@pytest.mark.parametrize(("theirs", "ours"), OUR_NAMES.items())
def test_each_name_leads_to_flags_of_a_step(theirs, ours):
    assert any(flags_for(theirs, flags) for flags in FLAGS.values())
    everywhere = set().union(*FLAGS.values())
    assert all({name, f"actor_{name}"} & everywhere for name in ours.split()), ours
