"""The command-line parser: refused flags, `--help`, and ranges that hold for every flag."""

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError


@pytest.mark.parametrize("step", NEEDED)
def test_unknown_flags_are_refused(step):
    with pytest.raises(UserError, match="--no_such_flag"):
        read(step, "--no_such_flag", "1")


@pytest.mark.parametrize(("step", "words", "missing"), [
    ("sft", [], "--data_path, --model_name_or_path, --output_dir"),
    ("sft", ["--data_path", "d"], "--model_name_or_path, --output_dir"),
    ("reward", ["--model_name_or_path", "m"], "--data_path, --output_dir"),
    ("ppo", ["--use_reward_model", "False"], "--actor_model_name_or_path, --data_path, --output_dir"),
    ("ppo", ["--data_path", "d", "--reward_model_name_or_path", "r"], "--actor_model_name_or_path, --output_dir"),
    ("ppo", ["--data_path", "d"], "--actor_model_name_or_path, --output_dir, --critic_model_name_or_path (or "
     "--use_reward_model False with --reward_function)"),
])  # fmt: skip
def test_all_missing_flags_are_named_in_one_line(step, words, missing):
    with pytest.raises(UserError) as problem:
        parse(step, words)
    named = missing.replace("--data_path", "--data_path (DeepSpeed-Chat's default: Dahoas/rm-static)")
    assert str(problem.value) == f"required: {named} (all flags: --help all)"


def test_a_switch_can_be_turned_off_by_a_value_or_a_no_flag():
    assert read("ppo")["whiten_advantages"] is True
    assert read("ppo", "--whiten_advantages", "False")["whiten_advantages"] is False
    assert read("ppo", "--no_whiten_advantages")["whiten_advantages"] is False


def test_configurations_are_frozen():
    config = parse("ppo", NEEDED["ppo"])
    with pytest.raises(AttributeError):
        config.ppo.gamma = 0.5


@pytest.mark.parametrize(("words", "printed"), [
    (["--help"], "needed:"), (["-h"], "needed:"), (["--no_such_flag", "--help"], "needed:"),
    (["--help", "all"], "All "),
    (["--help=truncation"], "Data sets, how their rows are read, and tokenisation:\n  --truncation "),
    (["--help", "--learning-rate"], "Training of one model on rows of data (steps 1 and 2):\n  --learning_rate X "),
])  # fmt: skip
def test_help_prints_what_is_asked_for_and_ends(words, printed, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse("sft", words)
    assert leaving.value.code == 0
    assert f"\n{printed}" in f"\n{capsys.readouterr().out}"


def test_help_shows_the_defaults_of_the_step(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # a narrow terminal cuts the text
    for step, objective in (("reward", "reward"), ("dpo", "dpo")):
        with pytest.raises(SystemExit):
            parse(step, ["--help"])
        assert f"reward model on pairs [{objective}]\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step", "name", "value"),
    [
        ("reward", "beta", "1e31"),
        ("sft", "learning_rate", "1e-31"),
        ("ppo", "reward_clip", "1e308"),
        ("ppo", "clip_eps_high", "1e308"),
        ("sft", "seed", str(2**63)),
        ("sft", "max_seq_len", str(2**31)),
        ("sft", "output_dir", "a" * 256),
        ("sft", "data_path", "b/" * 1751),
        ("sft", "data_path", "line\nbreak"),
        ("sft", "model_name_or_path", "\ud800"),
    ],
)
def test_numbers_and_paths_beyond_every_limit_are_refused(step, name, value):
    with pytest.raises(UserError, match=f"--{name}"):
        read(step, f"--{name}", value)


@pytest.mark.parametrize(("step", "given", "meant"), [
    ("sft", "--learning_rat", "learning_rate"), ("sft", "--learning-rat", "learning_rate"),
    ("sft", "--max_seq_length=9", "max_seq_len"), ("ppo", "--actor_learnin_rate", "actor_learning_rate"),
    ("sft", "--max-train-steps", "max_steps"), ("sft", "--eval_steps", None), ("ppo", "--reward_zero_stage", None),
    ("ppo", "--max_length", None), ("ppo", "--learning_rate", None), ("ppo", "--top_n", None),
    ("sft", "--num_train_steps", None), ("ppo", "--min_prompt_seq_len", None),
])  # fmt: skip
def test_a_misspelt_flag_is_suggested_and_an_unrelated_one_is_not(step, given, meant):
    with pytest.raises(UserError) as problem:
        read(step, given, "1")
    hint = f"did you mean --{meant}?"
    assert (hint if meant else given.split("=")[0]) in str(problem.value)
    assert ("did you mean" in str(problem.value)) is (meant is not None)


@pytest.mark.parametrize(("step", "given", "named"), [
    ("sft", "--lora_rank", ["lora_dim"]), ("reward", "--lora-r", ["lora_dim"]),
    ("reward", "--actor_lora_dim", ["lora_dim"]),
    ("sft", "--target_modules", ["lora_module_name"]), ("sft", "--actor_zero_stage", ["zero_stage"]),
    ("ppo", "--lora_dim", ["actor_lora_dim", "critic_lora_dim"]),
    ("ppo", "--lora_target_modules=q_proj", ["actor_lora_module_name", "critic_lora_module_name"]),
    ("ppo", "--learning_rate", ["actor_learning_rate", "critic_learning_rate"]),
    ("ppo", "--critic_temperature", ["temperature"]),
])  # fmt: skip
def test_flags_of_another_step_or_of_peft_are_answered_with_those_of_the_step(step, given, named):
    with pytest.raises(UserError) as problem:
        read(step, given, "1")
    assert f"\n  {given.split('=')[0]}: use {' and '.join(f'--{name}' for name in named)}" in str(problem.value)


@pytest.mark.parametrize(("step", "given", "steps"), [
    ("sft", "--kl-coef=0.1", "dschat-ppo"), ("ppo", "--packing", "dschat-sft and dschat-reward and dschat-dpo"),
    ("sft", "--beta", "dschat-reward and dschat-dpo"),
])  # fmt: skip
def test_a_flag_that_only_other_steps_have_is_answered_with_them(step, given, steps):
    with pytest.raises(UserError, match=rf"\n  --[\w-]+: is a flag of {steps}$"):
        read(step, given, "1")


def test_a_required_flag_under_the_name_of_another_step_is_answered():
    words = [word.replace("--actor_model_name", "--model_name") for word in NEEDED["ppo"]]
    with pytest.raises(UserError, match=r"\n  --model_name_or_path: use --actor_model_name_or_path and"):
        parse("ppo", words)


@pytest.mark.parametrize("given", [["--max-train-samples=3"], ["--max_samples", "10"]])
@pytest.mark.parametrize("step", NEEDED)
def test_flags_of_other_trainers_that_shorten_a_run_are_answered(step, given):
    with pytest.raises(UserError, match=": to try a few steps, use --max_steps, or fewer rows: --data_path DATA@ROWS$"):
        read(step, *given)


def test_each_misspelt_flag_is_answered_and_switches_that_turn_off_too():
    with pytest.raises(UserError) as problem:
        read("ppo", "--no_whiten_advantage", "--kl_cof", "3")
    for meant in ("--no_whiten_advantages", "--kl_coef"):
        assert f": did you mean {meant}?" in str(problem.value)


@pytest.mark.parametrize(("step", "flag", "given", "meant"), [
    ("ppo", "advantage_estimator", "gae2", "gae"), ("ppo", "advantage_estimator", "dr-grpo", "dr_grpo"),
    ("ppo", "policy_loss", "gmop", "gmpo"), ("sft", "dtype", "bfloat16", "bf16"), ("sft", "dtype", "int8", None),
    ("sft", "dtype", "FP32", "fp32"),
    ("sft", "lr_scheduler_type", "cosin", "cosine"), ("reward", "objective", "dop", "dpo"),
])  # fmt: skip
@pytest.mark.parametrize("in_yaml", [False, True])
def test_the_nearest_choice_is_suggested(tmp_path, step, flag, given, meant, in_yaml):
    (tmp_path / "flags.yaml").write_text(f"{flag}: {given}\n")
    words = ["--config", str(tmp_path / "flags.yaml")] if in_yaml else [f"--{flag}", given]
    with pytest.raises(UserError) as problem:
        read(step, *words)
    where = f"--config {tmp_path / 'flags.yaml'}: " if in_yaml else ""
    assert str(problem.value).startswith(f"{where}--{flag} {given}: expected one of ")
    assert str(problem.value).endswith(
        f"; did you mean {meant}? (see --help {flag})" if meant else f" (see --help {flag})"
    )
    assert ("did you mean" in str(problem.value)) is (meant is not None)


@pytest.mark.parametrize("step", NEEDED)
def test_abbreviated_flags_are_refused(step):
    with pytest.raises(UserError, match="--num_train_epo"):
        read(step, "--num_train_epo", "2")
