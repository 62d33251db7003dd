"""Scripts of DeepSpeed-Chat keep working: its flags, their defaults, and those without effect."""

import pytest
from command_lines import NEEDED, read
from deepspeed_chat_flags import DEEPSPEED_CHAT, REQUIRED

from dschat_ppo.config.cli import notes, parse

FLAGS = [(step, name, *entry) for step, flags in DEEPSPEED_CHAT.items() for name, entry in flags.items()]

# Defaults that differ from DeepSpeed-Chat on purpose.
DEVIATIONS = {
    "dtype": "bf16",  # fp16 needs loss scaling and skips steps
    "data_output_path": None,  # the cache of `datasets`, whose key is the content, instead of a folder by name
}
FIT_DEVIATIONS = {
    "lora_module_name": None,  # all linear layers of the blocks, under any name; decoder.layers. is OPT's
}
PADDING = {"num_padding_at_beginning": None}  # without effect; so that 1, which scripts give, prints its note
SFT_DEVIATIONS = {
    **FIT_DEVIATIONS,
    "eot_token": None,  # the same
    "learning_rate": 2e-5,  # 1e-3 is meant for LoRA, and ruins a pretrained model if all weights are trained
}
PAIR_DEVIATIONS = {
    **FIT_DEVIATIONS,
    **PADDING,
    "beta": None,  # the default depends on the objective; 0.1 for dpo
}
PPO_DEVIATIONS = {
    **PADDING,
    "seed": 1234,  # runs are reproducible by default
    "actor_lora_module_name": None,
    "critic_lora_module_name": None,
}

NO_EFFECT = {
    "sft": ("compute_fp32_loss", "deepspeed", "add_eot_token", "eot_token", "print_loss"),
    "reward": (
        "compute_fp32_loss", "deepspeed", "add_eot_token", "num_padding_at_beginning", "offload_reference_model",
        "print_loss",
    ),
    "ppo": (
        "compute_fp32_loss", "deepspeed", "add_eot_token", "num_padding_at_beginning", "enable_hybrid_engine",
        "release_inference_cache", "align_overflow",
    ),
}  # fmt: skip


def deviations_of(step: str) -> dict:
    return {**DEVIATIONS, **{"sft": SFT_DEVIATIONS, "reward": PAIR_DEVIATIONS, "ppo": PPO_DEVIATIONS}.get(step, {})}


def words_for(step: str, name: str) -> list[str]:
    return [f"--{name}", *DEEPSPEED_CHAT[step][name][1]]


@pytest.mark.parametrize(("step", "count"), [("sft", 32 + 2), ("reward", 32 + 4 + 2), ("ppo", 60 + 2)])
def test_the_table_lists_every_flag_of_deepspeed_chat(step, count):
    # Flags of its main.py (step 2: plus those only in its DPO step), plus --deepspeed and --deepspeed_config.
    assert len(DEEPSPEED_CHAT[step]) == count


@pytest.mark.parametrize(("step", "name", "default", "words"), FLAGS)
def test_every_flag_of_deepspeed_chat_is_accepted(step, name, default, words):
    value = read(step, f"--{name}", *words)[name]
    if default is False:
        assert value is True
    elif isinstance(default, list):
        assert value == words
    else:
        assert str(value) == words[0] or float(value) == float(words[0])


@pytest.mark.parametrize(("step", "name", "default", "words"), FLAGS)
def test_defaults_are_those_of_deepspeed_chat(step, name, default, words):
    if default == REQUIRED or name in ("output_dir", "data_path"):  # this project requires both
        return
    assert read(step)[name] == deviations_of(step).get(name, default)


@pytest.mark.parametrize(("step", "name"), [(step, name) for step, names in NO_EFFECT.items() for name in names])
def test_flags_without_effect_print_a_note(step, name):
    lines = notes(step, parse(step, [*NEEDED[step], *words_for(step, name)]))
    assert len(lines) == 1
    assert lines[0].startswith(f"--{name} has no effect: ")
    default = DEEPSPEED_CHAT[step][name][0]
    if default is not False:  # given with DeepSpeed-Chat's default too
        assert notes(step, parse(step, [*NEEDED[step], f"--{name}", str(default)])) == lines
