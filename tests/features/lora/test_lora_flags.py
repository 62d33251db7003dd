"""What the flags of LoRA alone decide: what is refused, what has no effect, learning rates, and
whether log-probs of the update can be those of the policy before it."""

import pytest
from command_lines import config_of, noted, read

from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.on_policy import old_logprobs_source
from dschat_ppo.errors import UserError

GRPO = "--advantage_estimator grpo --n_samples_per_prompt 2"
LORA = "--actor_lora_dim 4 --critic_lora_dim 4 --only_optimize_lora"
FUNCTION = "--use_reward_model False --reward_function exact_match"
SHARED = f"--share_base {LORA}"
STAGES = "--actor_zero_stage 3 --critic_zero_stage 2"
OFFLOAD = (
    "--offload_reference_model --offload_reward_model --actor_zero_stage 3 --critic_zero_stage 3"
)
ALONE = "--lora_dim 8 --only_optimize_lora"
RANK = {"sft": "--lora_dim", "dpo": "--lora_dim", "ppo": "--actor_lora_dim"}

CASES = [  # step, what is given, a part of the message
    # one base of all models
    ("ppo", "--share_base --actor_lora_dim 4 --critic_lora_dim 4", "--only_optimize_lora"),
    ("ppo", "--share_base --critic_lora_dim 4 --only_optimize_lora", "--actor_lora_dim above 0"),
    ("ppo", "--share_base --actor_lora_dim 4 --only_optimize_lora", "--critic_lora_dim above 0"),
    (
        "ppo",
        f"--share_base {LORA} --actor_zero_stage 3",
        "--actor_zero_stage 3 and --critic_zero_stage 0 both",
    ),
    (
        "ppo",
        f"--share_base {LORA} --critic_dropout 0.1",
        "--actor_dropout and --critic_dropout to the same value",
    ),
    ("ppo", f"--share_base {LORA} {GRPO} {FUNCTION}", "neither a critic"),
    (
        "ppo",
        f"{SHARED} --ref_model_name_or_path r",
        "--ref_model_name_or_path: with --share_base the reference is the shared base",
    ),
    # quantised weights
    (
        "ppo",
        "--enable_mixed_precision_lora",
        "--actor_zero_stage 3, --actor_lora_dim above 0 and --dtype fp16",
    ),
    (
        "sft",
        "--lora_dim 8 --only_optimize_lora --load_in_4bit --load_in_8bit",
        "--load_in_4bit and --load_in_8bit: use one of the two",
    ),
    # numbers
    ("ppo", "--critic_lora_learning_rate 1.5", "--critic_lora_learning_rate"),
    ("sft", "--lora_dim -1", "--lora_dim"),
    ("sft", "--lora_alpha 0", "--lora_alpha"),
    ("sft", "--lora_dropout 1", "--lora_dropout"),
]


def refused(step: str, *words: str) -> str:
    with pytest.raises(UserError) as problem:
        read(step, *words)
    assert "\n" not in str(problem.value)
    return str(problem.value)


@pytest.mark.parametrize(("step", "given", "message"), CASES)
def test_flags_that_do_not_go_together_are_refused(step, given, message):
    assert message in refused(step, *given.split())


@pytest.mark.parametrize("step", RANK)
def test_lora_flags_that_ask_for_something_need_a_rank_and_quantised_weights_are_frozen_whole(step):
    for name in ("only_optimize_lora", "use_rslora", "use_dora", "load_in_4bit", "load_in_8bit"):
        message = refused(step, f"--{name}")
        assert (
            message.startswith(f"--{name} needs LoRA: set {RANK[step]}")
            and "1e-5 to 2e-5" in message
        )
    stage = RANK[step].replace("lora_dim", "zero_stage")
    for bits in ("load_in_4bit", "load_in_8bit"):
        lora = [RANK[step], "8", f"--{bits}"]
        assert (
            refused(step, *lora)
            == f"--{bits} freezes the weights that it quantises: add --only_optimize_lora"
        )
        lora.append("--only_optimize_lora")
        read(step, *lora)
        assert refused(step, *lora, stage, "3").startswith(f"--{bits} needs {stage} 0, 1 or 2")
        assert refused(step, *lora, "--lora_merge").startswith(
            f"--{bits} with --lora_merge would save"
        )
    words = [RANK[step], "8", "--resize_vocabulary"]
    read(step, *words)
    assert refused(step, *words, "--only_optimize_lora").startswith("--resize_vocabulary adds rows")


WITHOUT_EFFECT = [  # step, what is given, the flags without effect
    ("sft", "--lora_module_name decoder.layers.", "lora_module_name"),
    ("sft", "--lora_learning_rate 1e-3", "lora_learning_rate"),
    ("dpo", "--lora_alpha 16", "lora_alpha"),
    ("reward", "--lora_merge", "lora_merge"),
    ("sft", "--lora_dim 4 --lora_merge", "lora_merge"),
    ("ppo", "--actor_lora_module_name layers.", "actor_lora_module_name"),
    ("ppo", "--actor_lora_dim 8 --critic_lora_learning_rate 1e-3", "critic_lora_learning_rate"),
    (
        "ppo",
        f"{GRPO} --critic_lora_dim 8 --critic_lora_learning_rate 1e-3",
        "critic_lora_dim critic_lora_learning_rate",
    ),
    ("sft", f"--learning_rate 2e-3 --lora_learning_rate 1e-3 {ALONE}", "learning_rate"),
    ("dpo", f"--learning_rate 2e-3 --lora_learning_rate 5e-4 {ALONE}", "learning_rate"),
    ("sft", f"--learning_rate 2e-3 {ALONE}", ""),
    ("sft", "--learning_rate 2e-3 --lora_dim 8", ""),
    ("reward", f"--learning_rate 2e-3 {ALONE}", ""),  # of the score head
    (
        "ppo",
        (
            "--actor_learning_rate 1e-3 --actor_lora_learning_rate 2e-3 --actor_lora_dim 8"
            " --only_optimize_lora"
        ),
        "actor_learning_rate",
    ),
    ("ppo", "--actor_learning_rate 1e-3 --critic_lora_dim 8 --only_optimize_lora", ""),
    # memory
    ("ppo", f"{OFFLOAD} --actor_lora_dim 4", ""),
    ("ppo", f"{OFFLOAD} {LORA}", "offload_reference_model"),
    ("ppo", f"{OFFLOAD} {SHARED}", "offload_reference_model offload_reward_model"),
]


@pytest.mark.parametrize(("step", "words", "names"), WITHOUT_EFFECT)
def test_a_note_names_each_flag_without_effect(step, words, names):
    lines = noted(step, *words.split())
    assert {line.split(" has no effect: ")[0] for line in lines} == {
        f"--{name}" for name in names.split()
    }


@pytest.mark.parametrize(
    "words",
    [
        (
            "--enable_mixed_precision_lora --actor_lora_dim 8 --only_optimize_lora --dtype fp16"
            f" {STAGES}"
        ),
        f"--inference_tp_size 2 {STAGES} --actor_lora_dim 8",
        f"{SHARED} --actor_zero_stage 1 --critic_zero_stage 2",
        f"{SHARED} --actor_dropout 0",
        f"--share_base --actor_lora_dim 4 --only_optimize_lora {GRPO} --actor_zero_stage 3",
        "--actor_lora_dim 8 --only_optimize_lora --load_in_4bit --critic_zero_stage 3",
        (
            f"{GRPO} --critic_lora_dim 8 --actor_lora_dim 8 --only_optimize_lora --load_in_4bit"
            " --critic_zero_stage 3"
        ),
    ],
)
def test_flags_that_fit_together_are_accepted(words):
    read("ppo", *words.split())


@pytest.mark.parametrize(
    ("step", "words", "rates"),
    [
        ("sft", "--learning_rate 5e-6 --lora_dim 8 --only_optimize_lora", {"": 5e-6}),
        (
            "sft",
            "--learning_rate 2e-5 --lora_dim 8 --only_optimize_lora",
            {"": 2e-5},
        ),  # given, although the default
        (
            "reward",
            "--learning-rate=9e-6 --lora_dim 8 --only_optimize_lora",
            {"": 9e-6},
        ),  # and of the score head
        ("sft", "--config FILE --lora_dim 8", {"": 3e-6}),
        ("sft", "--lora_dim 8 --only_optimize_lora", {"": 5e-4}),
        ("sft", "--learning_rate 5e-6 --lora_dim 8", {"": 5e-4}),  # other weights train at 5e-6
        (
            "sft",
            "--learning_rate 5e-6 --lora_learning_rate 1e-4 --lora_dim 8 --only_optimize_lora",
            {"": 1e-4},
        ),
        (
            "ppo",
            (
                "--actor_learning_rate 1e-6 --actor_lora_dim 8 --critic_lora_dim 8"
                " --only_optimize_lora"
            ),
            {"actor_": 1e-6, "critic_": 5e-4},
        ),
        (
            "ppo",
            "--critic_learning_rate 9e-6 --actor_lora_dim 8 --only_optimize_lora",
            {"actor_": 5e-4, "critic_": 5e-4},
        ),
    ],
)
def test_a_given_rate_is_that_of_an_adapter_that_trains_in_place_of_the_weights(
    tmp_path, step, words, rates
):
    (tmp_path / "c.yaml").write_text("learning_rate: 3e-6\nonly_optimize_lora: true\n")
    found = read(step, *words.replace("FILE", str(tmp_path / "c.yaml")).split())
    assert {prefix: found[f"{prefix}lora_learning_rate"] for prefix in rates} == rates


def test_dropout_of_adapters_asks_for_log_probs_before_the_update():
    batches = "--per_device_generation_batch_size 4 --per_device_training_batch_size 4"
    words = f"{batches} --dtype bf16 --actor_lora_dim 4"
    for dropout, source in (("0", "update"), ("0.1", "recompute")):
        config = config_of("ppo", *words.split(), "--lora_dropout", dropout)
        found, reason = old_logprobs_source(config, plan_ppo(config.ppo, 64, 1), [{}, {}])
        assert found == source
    assert reason == "--lora_dropout changes them in training"
