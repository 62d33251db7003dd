"""Flags of LoRA: ranges, flags that need others, and flags without effect."""

import pytest
from command_lines import NEEDED, read

from dschat_ppo.config.cli import notes, parse
from dschat_ppo.errors import UserError

RANK = {"sft": "--lora_dim", "reward": "--lora_dim", "dpo": "--lora_dim", "ppo": "--actor_lora_dim"}
STAGE = {"sft": "--zero_stage", "reward": "--zero_stage", "dpo": "--zero_stage", "ppo": "--actor_zero_stage"}
NEEDED = {**NEEDED, "dpo": NEEDED["reward"]}


def refused(step: str, *words: str) -> str:
    with pytest.raises(UserError) as raised:
        parse(step, [*NEEDED[step], *words])
    assert "\n" not in str(raised.value)
    return str(raised.value)


def notes_of(step: str, *words: str) -> list[str]:
    return notes(step, parse(step, [*NEEDED[step], *words]))


@pytest.mark.parametrize("step", NEEDED)
@pytest.mark.parametrize("name", ["only_optimize_lora", "use_rslora", "use_dora", "load_in_4bit", "load_in_8bit"])
def test_flags_that_ask_for_something_need_a_rank(step, name):
    message = refused(step, f"--{name}")
    assert message.startswith(f"--{name} needs LoRA: set {RANK[step]}") and "1e-5 to 2e-5" in message
    if not name.startswith("load"):
        parse(step, [*NEEDED[step], f"--{name}", RANK[step], "8"])


@pytest.mark.parametrize("step", NEEDED)
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_quantised_weights_are_frozen_whole_and_not_merged(step, bits):
    lora = [RANK[step], "8", f"--{bits}"]
    assert refused(step, *lora) == f"--{bits} freezes the weights that it quantises: add --only_optimize_lora"
    lora.append("--only_optimize_lora")
    parse(step, [*NEEDED[step], *lora])
    assert refused(step, *lora, STAGE[step], "3").startswith(f"--{bits} needs {STAGE[step]} 0, 1 or 2")
    assert refused(step, *lora, "--lora_merge").startswith(f"--{bits} with --lora_merge would save")


def test_a_model_without_lora_may_be_partitioned_beside_a_quantised_one():
    words = ["--actor_lora_dim", "8", "--only_optimize_lora", "--load_in_4bit", "--critic_zero_stage", "3"]
    parse("ppo", [*NEEDED["ppo"], *words])


@pytest.mark.parametrize("step", NEEDED)
def test_frozen_embeddings_get_no_new_rows(step):
    words = [RANK[step], "8", "--resize_vocabulary"]
    parse(step, [*NEEDED[step], *words])
    assert refused(step, *words, "--only_optimize_lora").startswith("--resize_vocabulary adds rows")


@pytest.mark.parametrize(
    ("step", "words", "named"),
    [
        ("sft", ["--lora_module_name", "decoder.layers."], "lora_module_name"),
        ("sft", ["--lora_learning_rate", "1e-3"], "lora_learning_rate"),
        ("dpo", ["--lora_alpha", "16"], "lora_alpha"),
        ("reward", ["--lora_merge"], "lora_merge"),
        ("ppo", ["--lora_dropout", "0.1"], "lora_dropout"),
        ("ppo", ["--actor_lora_module_name", "layers."], "actor_lora_module_name"),
        ("ppo", ["--actor_lora_dim", "8", "--critic_lora_learning_rate", "1e-3"], "critic_lora_learning_rate"),
    ],
)
def test_settings_of_lora_without_a_rank_print_a_note(step, words, named):
    [line] = notes_of(step, *words)
    assert line.startswith(f"--{named} has no effect: ")


def test_lora_of_a_critic_that_the_run_does_not_have_is_none():
    grpo = ["--advantage_estimator", "grpo", "--n_samples_per_prompt", "2"]
    words = [*grpo, "--critic_lora_dim", "8", "--critic_lora_learning_rate", "1e-3"]
    assert notes_of("ppo", *words) == [
        f"--{name} has no effect: --advantage_estimator grpo has no critic"
        for name in ("critic_lora_dim", "critic_lora_learning_rate")
    ]
    message = refused("ppo", *words, "--only_optimize_lora")
    assert message.startswith("--only_optimize_lora needs LoRA: set --actor_lora_dim, or omit --only")
    quantised = ["--actor_lora_dim", "8", "--only_optimize_lora", "--load_in_4bit", "--critic_zero_stage", "3"]
    parse("ppo", [*NEEDED["ppo"], *words, *quantised])


def test_merging_is_what_happens_if_all_weights_train():
    [line] = notes_of("sft", "--lora_dim", "4", "--lora_merge")
    assert line.startswith("--lora_merge has no effect: other weights train too")


@pytest.mark.parametrize(("step", "words", "noted"), [
    ("sft", "--learning_rate 2e-3 --lora_learning_rate 1e-3 --lora_dim 8 --only_optimize_lora", "learning_rate"),
    ("dpo", "--learning_rate 2e-3 --lora_learning_rate 5e-4 --lora_dim 8 --only_optimize_lora", "learning_rate"),
    ("ppo", "--actor_learning_rate 1e-3 --actor_lora_learning_rate 2e-3 --actor_lora_dim 8 --only_optimize_lora",
     "actor_learning_rate"),
    ("sft", "--learning_rate 2e-3 --lora_dim 8 --only_optimize_lora", None),
    ("sft", "--lora_dim 8 --only_optimize_lora", None),
    ("sft", "--learning_rate 2e-3 --lora_dim 8", None),
    ("reward", "--learning_rate 2e-3 --lora_dim 8 --only_optimize_lora", None),  # of the score head
    ("ppo", "--critic_learning_rate 1e-3 --critic_lora_dim 8 --only_optimize_lora", None),
    ("ppo", "--actor_learning_rate 1e-3 --critic_lora_dim 8 --only_optimize_lora", None),
])  # fmt: skip
def test_a_learning_rate_of_which_no_weight_has_use_prints_a_note(step, words, noted):
    found = notes_of(step, *words.split())
    assert [line.split(" has no effect: ")[0] for line in found] == ([] if noted is None else [f"--{noted}"])
    assert all("LoRA parameters train, with --" in line for line in found)


@pytest.mark.parametrize(("step", "words", "rates"), [
    ("sft", "--learning_rate 5e-6 --lora_dim 8 --only_optimize_lora", {"": 5e-6}),
    ("sft", "--learning_rate 2e-5 --lora_dim 8 --only_optimize_lora", {"": 2e-5}),  # given, although the default
    ("reward", "--learning-rate=9e-6 --lora_dim 8 --only_optimize_lora", {"": 9e-6}),  # and of the score head
    ("sft", "--config FILE --lora_dim 8", {"": 3e-6}),
    ("sft", "--lora_dim 8 --only_optimize_lora", {"": 5e-4}),
    ("sft", "--learning_rate 5e-6 --lora_dim 8", {"": 5e-4}),  # other weights train at 5e-6
    ("sft", "--learning_rate 5e-6 --lora_learning_rate 1e-4 --lora_dim 8 --only_optimize_lora", {"": 1e-4}),
    ("ppo", "--actor_learning_rate 1e-6 --actor_lora_dim 8 --critic_lora_dim 8 --only_optimize_lora",
     {"actor_": 1e-6, "critic_": 5e-4}),
    ("ppo", "--critic_learning_rate 9e-6 --critic_lora_dim 8 --only_optimize_lora", {"actor_": 5e-4, "critic_": 9e-6}),
    ("ppo", "--critic_learning_rate 9e-6 --actor_lora_dim 8 --only_optimize_lora", {"actor_": 5e-4, "critic_": 5e-4}),
])  # fmt: skip
def test_a_given_rate_is_that_of_an_adapter_that_trains_in_place_of_the_weights(tmp_path, step, words, rates):
    (tmp_path / "c.yaml").write_text("learning_rate: 3e-6\nonly_optimize_lora: true\n")
    found = read(step, *words.replace("FILE", str(tmp_path / "c.yaml")).split())
    assert {prefix: found[f"{prefix}lora_learning_rate"] for prefix in rates} == rates
