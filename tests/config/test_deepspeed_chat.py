"""DeepSpeed-Chat's flags are accepted, with its defaults, and its training scripts parse."""

import pytest
from command_lines import read
from config.deepspeed_chat_scripts import GENERATION_BATCHES, REFUSED, SCRIPTS
from deepspeed_chat_flags import DEEPSPEED_CHAT, REQUIRED
from fixed_dtype import REAL_DEFAULT

from dschat_ppo.config.batch_plan import plan_ppo
from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError

# Defaults that differ from DeepSpeed-Chat on purpose: for all steps, and by step.
DEVIATIONS = {
    "dtype": "auto",  # fp16 needs loss scaling and skips steps
    # the cache of `datasets`, whose key is the content, instead of a folder by name
    "data_output_path": None,
    # all linear layers of the blocks, under any name; decoder.layers. is OPT's
    "lora_module_name": None,
    "actor_lora_module_name": None,
    "critic_lora_module_name": None,
    "eot_token": None,  # without effect; so that a value that scripts give prints its note
    "num_padding_at_beginning": None,  # the same
}
OF_STEP = {
    "sft": {
        "learning_rate": 2e-5
    },  # 1e-3 is meant for LoRA, and ruins a pretrained model if all weights are trained
    "reward": {"beta": None},  # the default depends on the objective; 0.1 for dpo
    "ppo": {"seed": 1234},  # runs are reproducible by default
}
STEPS = pytest.mark.parametrize("step", DEEPSPEED_CHAT)


@STEPS
def test_every_flag_of_deepspeed_chat_is_accepted(step):
    for name, (default, words) in DEEPSPEED_CHAT[step].items():
        value = read(step, f"--{name}", *words)[name]
        if default is False:
            assert value is True, name
        elif isinstance(default, list):
            assert value == words, name
        else:
            assert str(value) == words[0] or float(value) == float(words[0]), name


@STEPS
def test_defaults_are_those_of_deepspeed_chat(step):
    theirs = {
        name: default for name, (default, _) in DEEPSPEED_CHAT[step].items() if default != REQUIRED
    }
    expected = {
        name: (DEVIATIONS | OF_STEP[step]).get(name, default) for name, default in theirs.items()
    }
    for name in ("output_dir", "data_path"):  # this project requires both
        del expected[name]
    found = read(step) | REAL_DEFAULT
    assert {name: found[name] for name in expected} == expected


def words_of(name: str) -> list[str]:
    """With the data set that DeepSpeed-Chat downloads where a script names none."""
    script = SCRIPTS[name]
    return script.words if script.data else ["--data_path", "Dahoas/rm-static", *script.words]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in REFUSED])
def test_a_script_parses_and_its_batch_sizes_fit_or_the_message_says_what_does(name):
    words, batches, step = words_of(name), GENERATION_BATCHES.get(name), SCRIPTS[name].step
    config = parse(step, words)
    if batches is not None:
        fault = f"not a whole number of optimizer steps.* Set --generation_batches {batches}$"
        with pytest.raises(UserError, match=fault):
            plan_ppo(config.ppo, 10_000, 1)
        config = parse(step, [*words, "--generation_batches", str(batches)])
    assert step != "ppo" or plan_ppo(config.ppo, 10_000, 1).ppo_steps > 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_is_refused_by_one_reason(name):
    words, (reason, flag) = words_of(name), REFUSED[name]
    with pytest.raises(UserError, match=reason):
        parse("ppo", words)
    place = words.index(flag)
    after = place + 1 if words[place + 1].startswith("--") else place + 2
    parse("ppo", words[:place] + words[after:])
