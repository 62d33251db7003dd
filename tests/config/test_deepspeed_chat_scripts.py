"""The flag lists of DeepSpeed-Chat's training scripts parse."""

from itertools import product

import pytest
from config.deepspeed_chat_scripts import ACTOR_LORA, HYBRID, REFUSED, SCRIPTS

from dschat_ppo.config.cli import parse
from dschat_ppo.errors import UserError


def words_of(name: str) -> list[str]:
    """With the data set that DeepSpeed-Chat downloads where a script names none."""
    script = SCRIPTS[name]
    return script.words if script.data else ["--data_path", "Dahoas/rm-static", *script.words]


def test_there_are_37():
    assert len(SCRIPTS) == 37 and set(REFUSED) < set(SCRIPTS)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in REFUSED])
def test_a_script_parses(name):
    parse(SCRIPTS[name].step, words_of(name))


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_is_refused_by_one_reason(name):
    words, (reason, flag) = words_of(name), REFUSED[name]
    with pytest.raises(UserError, match=reason):
        parse("ppo", words)
    place = words.index(flag)
    after = place + 1 if words[place + 1].startswith("--") else place + 2
    parse("ppo", words[:place] + words[after:])


@pytest.mark.parametrize(("stage", "hybrid", "offload", "lora"), product((2, 3), *[(False, True)] * 3))
def test_all_runs_of_the_sweep_of_step_3_parse(stage, hybrid, offload, lora):
    words = words_of("step3/opt/single_node/sweep/run_single")
    words += ["--actor_zero_stage", str(stage), "--critic_zero_stage", str(stage), *[HYBRID] * hybrid]
    config = parse("ppo", [*words, *["--offload"] * offload, *(ACTOR_LORA.split() if lora else [])])
    assert config.lora.actor_lora_dim == (128 if lora else 0)
